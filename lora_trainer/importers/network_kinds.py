"""Other programs' kinds of networks as `lora.type`, and what their ranks and alphas mean with each kind.

After LyCORIS' wrapper.py and modules/, sd-scripts' networks/oft.py, OneTrainer's LoRAModule.py and ai-toolkit's NetworkConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_trainer.importers.reading import Around, KeyRule, Took
from lora_trainer.importers.rules import by, is_on, lacking, nothing, number, same, unless_off, whole
from lora_trainer.importers.words import NOT_LORA

TYPE, RANK, ALPHA, FACTOR = "lora.type", "lora.rank", "lora.alpha", "lora.lokr_factor"
MOST_RANK = 4096  # of `lora.rank`; both factors of a LoKr are whole with it
BLOCKS = "the number of blocks there, the largest size of a block here: lora.rank stays as it is"
BOUND = "a bound on the rotation there; here it has none"
NO_ALPHA = "an OFT has no alpha"
UNCOUNTED = "a LoKr with two whole factors has none"
PARTLY_COUNTED = "there layers whose two factors are whole count no alpha, here every layer does"
NO_MAGNITUDES = "only a LoRA learns magnitudes here"
BY_INPUTS = "DoRA's norm is of each output here, of each input there"
ROTATES_INPUTS = "inputs are rotated there, outputs here"
# LyCORIS' algorithms, and what others name their kinds -> (ours, how it differs).
KINDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("lora", "locon", "standard", "lora_fa"), ("lora", "")),
    "dora": ("dora", ""),
    "loha": ("loha", ""),
    "lokr": ("lokr", ""),
    **dict.fromkeys(("oft", "diag_oft"), ("oft", "")),
    "boft": ("oft", "BOFT multiplies several rotations of a layer; one is trained here"),
    "oft_2": ("oft", ROTATES_INPUTS),
    "tlora": ("lora", "T-LoRA is on with lora.timestep_min_rank"),
    **dict.fromkeys(("full", "native fine_tuning"), ("lora", f"whole changes of weights are not trained: {NOT_LORA}")),
}


def kind_of(name: str, *, decomposed: bool = False) -> tuple[str, str]:
    """`lora.type` for a program's name of a kind, and how it differs; `decomposed` LoRAs are DoRAs."""
    kind, why = KINDS.get(name.strip().lower().replace("-", "_"), ("lora", NOT_LORA))
    return ("dora", why) if decomposed and kind == "lora" else (kind, why)


def with_kind(settings: Mapping[str, Any], kind: tuple[str, str], why: str = "") -> Took:
    """A key's settings with `lora.type`, which stays unset where it is our default."""
    reasons = "; ".join(each for each in (kind[1], why) if each)
    named = {} if kind[0] == "lora" else {TYPE: kind[0]}
    return Took({**settings, **named}, reasons, "changed" if reasons else "mapped")


def is_whole_rank(value: Any) -> bool:
    """Whether a LoKr of this rank has whole factors in all layers. The rank may be missing, or text."""
    try:
        return whole(value) >= MOST_RANK
    except ValueError:  # the rule of the rank reports it
        return False


def rank_of(value: Any, kind: str) -> Took:
    """A rank; LyCORIS' users choose whole factors of a LoKr by one that is larger than any layer."""
    rank = whole(value)
    return Took({RANK: MOST_RANK}, "w2 is whole") if kind == "lokr" and is_whole_rank(rank) else Took({RANK: rank})


def alpha_of(value: Any, kind: str, *, is_whole: bool) -> Took:
    """An alpha; `is_whole`: both factors of a LoKr are whole in all layers."""
    alpha = number(value)
    if kind == "oft":
        return Took({}, NO_ALPHA, "ignored")
    if kind == "lokr" and is_whole:
        return Took({}, UNCOUNTED, "ignored")
    return Took({ALPHA: alpha}, PARTLY_COUNTED, "changed") if kind == "lokr" else Took({ALPHA: alpha})


# -- kohya's scripts, its GUI and musubi-tuner: networks and their arguments.

GUI_KINDS = {"kohya locon": "locon", "kohya dylora": "dylora", "flux1": "lora", "flux1 oft": "oft"}


def argument(around: Around, key: str) -> Any:
    """One of `network_args`, which the GUI has beside its other keys."""
    inside = around[f"network_args.{key}"]
    return around[key] if inside is None else inside


def kohya_kind(around: Around) -> tuple[str, str]:
    """The kind of the GUI's `LoRA_type`, of `networks.loha`, or of LyCORIS' `algo`."""
    if (form := around["LoRA_type"]) is not None:
        name = str(form).strip().lower()
        return kind_of(GUI_KINDS.get(name, name.removeprefix("lycoris/")), decomposed=_is_decomposed(around))
    module = str(around["network_module"] or "networks.lora").lower()
    if module.startswith("lycoris"):
        return kind_of(str(around["network_args.algo"] or "lora"), decomposed=_is_decomposed(around))
    name = module.rpartition(".")[2]  # networks.lora_flux, networks.oft_flux
    return kind_of(next((each for each in ("lora", "loha", "lokr", "oft") if name.startswith(each)), name))


def _is_decomposed(around: Around) -> bool:
    return bool(is_on(argument(around, "dora_wd") or False))


def is_whole(around: Around) -> bool:
    """Whether both factors of a LoKr of kohya's are whole in all layers."""
    return is_whole_rank(around["network_dim"]) or bool(is_on(argument(around, "full_matrix") or False))


def has_blocks_for_rank(around: Around) -> bool:
    """Whether `network_dim` counts the blocks of sd-scripts' own OFT, whose alpha bounds the rotation."""
    named = str(around["network_module"] or around["LoRA_type"] or "").lower()
    return named.startswith(("networks.oft", "flux1 oft"))


def _dim(value: Any, around: Around) -> Took:
    kind = kohya_kind(around)[0]
    if has_blocks_for_rank(around):
        whole(value)
        return Took({}, BLOCKS, "changed")
    if kind == "lokr" and is_whole(around):
        whole(value)
        return Took({RANK: MOST_RANK}, "w2 is whole")
    return rank_of(value, kind)


def _alpha(value: Any, around: Around) -> Took:
    if not is_on(value):
        return Took({}, "0 means as network_dim, as here")
    if has_blocks_for_rank(around):
        number(value)
        return Took({}, BOUND, "changed")
    return alpha_of(value, kohya_kind(around)[0], is_whole=is_whole(around))


def alpha_of_texts(around: Around) -> Any:
    """The alpha that the text encoders' networks share with the denoiser's; None where the kind counts none."""
    kind = kohya_kind(around)[0]
    return None if kind == "oft" or (kind == "lokr" and is_whole(around)) else around["network_alpha"]


def _decomposed(value: Any, around: Around) -> Took:
    if not is_on(value):
        return Took({}, "off", "ignored")
    if kohya_kind(around)[0] == "dora":
        return Took({}, "read together with the kind of network")
    return Took({}, NO_MAGNITUDES, "changed")


def _of_kind(kind: str, rule: KeyRule) -> KeyRule:
    """A rule that counts only for one kind of network."""

    def read(value: Any, around: Around) -> Took:
        if not is_on(value) or kohya_kind(around)[0] == kind:
            return rule.read(value, around)
        return Took({}, "means nothing for this kind of network", "ignored")

    return KeyRule(rule.verdict, rule.ours, rule.why, read)


NETWORK_ARGUMENTS: Mapping[str, KeyRule] = {
    "dora_wd": by(_decomposed, TYPE),
    "wd_on_output": by(
        lambda value, around: (
            Took({})
            if not is_on(value) and kohya_kind(around)[0] == "dora"
            else Took({}, "as here, or of a DoRA alone", "ignored")
        ),
        "",
        BY_INPUTS,
        changes=True,
    ),
    "full_matrix": _of_kind("lokr", unless_off(RANK, lambda value: MOST_RANK)),
    "factor": _of_kind("lokr", same(FACTOR, whole)),
    "decompose_both": _of_kind("lokr", lacking("w1 is always whole")),
    "unbalanced_factorization": _of_kind("lokr", lacking("w2 always has the longer part of a side")),
    **dict.fromkeys(("use_tucker", "use_cp", "use_conv_cp"), lacking("convolutions have no core")),
    "disable_conv_cp": lacking("convolutions have no core", off=(True,)),
    "use_scalar": lacking("there is no learned scale of a whole network"),
    "rs_lora": unless_off("lora.use_rslora", lambda value: True),
    **dict.fromkeys(("constraint", "constrain"), _of_kind("oft", lacking(BOUND))),
    "rescaled": _of_kind("oft", lacking("an OFT has no learned scale")),
    "block_size": nothing("of DyLoRA"),
    "bypass_mode": nothing("a way to compute the same"),
    "rank_dropout_scale": nothing("of rank_dropout"),
}
DIM, NETWORK_ALPHA = by(_dim, RANK), by(_alpha, ALPHA)
