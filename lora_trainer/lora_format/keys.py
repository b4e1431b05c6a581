"""Names of LoRA weights: the modules of a file's keys, whichever program wrote it, and kohya's names of modules.

A module is named as diffusers names it, with its component first:
`unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q`. A kohya name is the
component's kohya prefix and the rest with dots turned into underscores. To restore the dots,
`COMPOUND` lists the names that have underscores of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lora_trainer.lora_format.kinds import KINDS, NETWORKS
from lora_trainer.lora_format.layouts import Names, Rule, rules_of_original, rules_of_ours, split_numbers

# Components of a pipeline with one text encoder and the prefix of each in kohya's files.
KOHYA_PREFIXES: Mapping[str, str] = {"unet": "lora_unet", "text_encoder": "lora_te"}
ONE_TEXT_ENCODER = Names("a U-Net with one text encoder", "unet", KOHYA_PREFIXES)
DENOISER = "denoiser"  # placeholder for `unet` or `transformer` until the family is known
# Every prefix that is read, of names without dots and of names with dots. Where there are two text encoders, kohya
# numbers both; the third is T5.
COMPONENT_OF_PREFIX: Mapping[str, str] = {
    "lora_unet": DENOISER,
    "lora_transformer": DENOISER,
    "lycoris": DENOISER,
    **{network.prefix: DENOISER for network in NETWORKS},
    "lora_te": "text_encoder",
    "lora_te1": "text_encoder",
    "lora_te2": "text_encoder_2",
    "lora_te3": "text_encoder_3",
}
COMPONENT_OF_DOTTED: Mapping[str, str] = {
    "unet.": "unet",
    "transformer.": "transformer",
    "diffusion_model.": DENOISER,
    "model.diffusion_model.": DENOISER,
    "text_encoder.": "text_encoder",
    "text_encoder_2.": "text_encoder_2",
    "text_encoder_3.": "text_encoder_3",
    "text_encoders.clip_l.transformer.": "text_encoder",
    "text_encoders.clip_h.transformer.": "text_encoder",  # SD2's
    "text_encoders.clip_g.transformer.": "text_encoder_2",
    "text_encoders.t5xxl.transformer.": "text_encoder_3",
    "clip_l.": "text_encoder",
    "clip_g.": "text_encoder_2",
    "t5.": "text_encoder_3",
}
PEFT = "base_model.model."
INSIDE = (PEFT, "transformer.", "diffusion_model.")  # beginnings that programs put inside others
LANGUAGE_MODEL = re.compile(
    r"text_encoders\.\w+\.transformer\.(?:model\.)?"
)  # ComfyUI's names of the newer text encoders
WITHOUT_DOTS = (
    "lora_",
    "lycoris_",
    *(f"{network.prefix}_" for network in NETWORKS),
)  # beginnings: dots became underscores
NUMBERED = "lora_te1"  # prefix of the first of several text encoders in kohya's form

T5 = ".encoder.block."  # in the names of its modules

# Entries of a header that only this program writes.
OWN_VERSION, T5_TOKENS, WITHOUT = "lora_trainer.version", "lora_trainer.t5_tokens", "lora_trainer.without_t5"
BASE_FORM = "lora_trainer.base_model_form"
HINTS = ("ss_base_model_version", "modelspec.architecture", "ss_base_model")  # entries that name a family

DIFFUSERS_DOWN, DIFFUSERS_UP = ".lora_A.weight", ".lora_B.weight"
KOHYA_DOWN, KOHYA_UP, KOHYA_ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"
EMBEDDING = "bundle_emb."  # a learned token: `bundle_emb.WORD.clip_l`

_OWN, _BESIDE = (
    "|".join(kind.ends for kind in KINDS.values() if kind.ends and bool(kind.decompose) == is_beside)
    for is_beside in (False, True)
)
_ENDINGS = re.compile(
    r"(?P<name>.+?)(?:"
    r"[._]lora_(?P<kohya>down|up|mid)\.weight"
    r"|\.lora_(?P<peft>[AB])(?:\.[^.]+)?(?:\.weight)?"
    r"|[._]lora(?P<stream>[12]?)\.(?P<old>down|up)\.weight"
    r"|\.lora_linear_layer\.(?P<older>down|up)\.weight"
    rf"|\.(?P<lycoris>{_OWN})"
    rf"|\.(?P<beside>{_BESIDE})(?:\.default)?(?:\.weight)?"
    r"|\.(?P<alpha>alpha))"
)

# Parts of module names with underscores of their own, in U-Nets (diffusers' and the first code's), transformers,
# CLIP, T5 and language models.
COMPOUND = frozenset(
    "down_blocks up_blocks mid_block transformer_blocks single_transformer_blocks to_q to_k to_v to_out to_add_out "
    "add_q_proj add_k_proj add_v_proj to_qkv_mlp_proj ff_context linear_in linear_out proj_in proj_out proj_mlp conv_in conv_out conv_shortcut "
    "time_emb_proj time_embedding add_embedding linear_1 linear_2 norm_q norm_k text_model self_attn q_proj k_proj "
    "v_proj out_proj text_projection x_embedder context_embedder time_text_embed time_guidance_embed norm1_context norm_out pos_embed "
    "timestep_embedder guidance_embedder text_embedder input_blocks output_blocks middle_block in_layers out_layers "
    "emb_layers skip_connection time_embed label_emb wi_0 wi_1 o_proj gate_proj up_proj down_proj embed_tokens".split()
)
_LONGEST = max(name.count("_") for name in COMPOUND) + 1

# diffusers does not know SDXL's size embedding by its own name in kohya's form, only by the first SDXL code's.
SPECIAL: Mapping[str, str] = {"add_embedding.linear_1": "label_emb_0_0", "add_embedding.linear_2": "label_emb_0_2"}

ALIKE = 1e-3  # ratios of a layer's sides that are the same
_OTHER = re.compile(r"[^a-z0-9 ]")
ORIGINAL = 2  # the score of a name of the original, where one of diffusers' has 1

_UNET = re.compile(r"(?:down_blocks|up_blocks|mid_block|conv_in|conv_out|time_embedding|add_embedding)(?:\.|$)")
# The first code of SD1.x and SDXL: two residual blocks at each of three or four sizes.
_RESNET = {"in_layers.2": "conv1", "emb_layers.1": "time_emb_proj", "out_layers.3": "conv2"}
_RESNET["skip_connection"] = "conv_shortcut"
_OUTER = {"input_blocks.0.0": "conv_in", "out.2": "conv_out"}
_OUTER |= {"time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2"}
_OUTER |= {"label_emb.0.0": "add_embedding.linear_1", "label_emb.0.2": "add_embedding.linear_2"}
_BLOCK = re.compile(r"(input_blocks|output_blocks|middle_block)\.(\d+)\.(?:(\d+)\.)?(.+)")
_CLIP_BEFORE = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}  # diffusers', before peft


@dataclass(frozen=True)
class Key:
    """A key of a file: the module's name there, which tensor of it, and the format that writes it so."""

    name: str
    part: str  # `down`, `up`, `mid`, `alpha`, or LyCORIS' and peft's own names of others
    form: str  # `kohya`, `diffusers`, `lycoris`, `old` or, of an alpha and of what lies beside another kind, ""


@dataclass(frozen=True)
class Found:
    """The meaning of a module's name in a file: one module of diffusers, or the parts of a fused one by `rules`."""

    modules: tuple[str, ...]
    rules: tuple[Rule, ...] = ()


def of_language_model(module: str) -> bool:
    """Whether a module is of a language model that reads captions, such as Qwen3."""
    return module.startswith(("text_encoder.layers.", "text_encoder.embed_tokens"))


def read_key(key: str) -> Key | None:
    """A key of a LoRA file, parsed; None for an unknown key."""
    match = _ENDINGS.fullmatch(key)
    if match is None:
        return None
    if match["alpha"] or match["beside"]:
        return Key(match["name"], match["alpha"] or match["beside"], "")
    if match["lycoris"]:
        return Key(match["name"], match["lycoris"], "lycoris")
    if match["peft"]:
        return Key(match["name"], "down" if match["peft"] == "A" else "up", "diffusers")
    if match["kohya"]:
        return Key(match["name"], match["kohya"], "kohya")
    stream = f"_lora{match['stream']}" if match["stream"] else ""  # XLabs': 1 of the image, 2 of the text
    return Key(match["name"] + stream, match["old"] or match["older"], "old")


def resolve(
    names: Iterable[str], families: Sequence[Names], hint: str = "", sides: Mapping[str, tuple[int, int]] | None = None
) -> tuple[dict[str, Found], Names | None]:
    """The modules of a file's names, and the family whose names they are; names of no family are skipped.

    `hint` is text of the header: where names fit several families, the one that it names. `sides` are the rows and
    columns of the layers, as far as they are known: families with the same names have layers of different shapes.
    """
    parsed = {name: _side(name) for name in names}
    known = {parsed[name][1]: pair for name, pair in (sides or {}).items() if name in parsed}
    family, sure = _family_of(parsed.values(), families, hint, known)
    found = {name: place for name, side in parsed.items() if (place := _found(*side, family)) is not None}
    return found, family if sure else None


class _Fit(NamedTuple):
    """How well a family fits a file, among those that know the most of its names: from the most telling to the least."""

    header: int  # the length of its name in the header, 0 where it is not there: one may be the beginning of another's
    has_texts: bool  # it has text encoders where the file has layers of them
    has_sides: bool  # its layers have such shapes
    weight: int  # of the names: the original's tell more than diffusers', which families share


def _family_of(
    parsed: Collection[tuple[str, str]], families: Sequence[Names], hint: str, sides: Mapping[str, tuple[int, int]]
) -> tuple[Names | None, bool]:
    """The family that fits best, and whether the names are surely its own: models that nobody here knows share diffusers' names."""
    header = _OTHER.sub("", hint)
    has_texts = any(component.startswith("text_encoder") for component, _ in parsed)
    rests = [rest for component, rest in parsed if not component.startswith("text_encoder") and not _is_unet(rest)]
    candidates = list[tuple[int, int, Names]]()  # the names that a family knows, their weight, the family
    for family in families:
        if family.layout:
            matches = [_match(rest, family) for rest in rests]
            candidates.append((len(matches) - matches.count(0), sum(matches), family))
    most = max((known for known, _, _ in candidates), default=0)
    fits = list[tuple[_Fit, Names]]()
    for known, weight, family in candidates:
        if known == most:
            title = _OTHER.sub("", family.family)
            fit = _Fit(
                header=len(title) if title in header else 0,
                has_texts=not has_texts or "text_encoder" in family.prefixes,
                has_sides=most == 0 or _has_sides(sides, family),
                weight=weight,
            )
            fits.append((fit, family))
    if not fits:
        return None, False
    best = max(fit for fit, _ in fits)
    tied = [family for fit, family in fits if fit == best]
    if not most:  # of text encoders alone, the header decides
        return tied[0] if best.header and not rests else None, False
    is_own = most == len(rests) or best.weight > most
    if best.header:
        return tied[0], is_own
    there = {family.family for family in tied}
    tied = [family for family in tied if family.like not in there]
    # Models that nobody here knows share these names: only the shapes of a published model make one sure.
    published = [family for family in tied if is_published(sides, family)]
    return (published or tied)[0], len(published) == 1 and is_own


def is_published(sides: Mapping[str, tuple[int, int]], family: Names) -> bool:
    """Whether layers have the shapes of one of the family's published models; True for a family without any."""
    if not family.published:
        return True
    found: list[tuple[str, list[int]]] = []
    for rest, (rows, columns) in sides.items():
        if match := _original(family, rest):
            rules, numbers = match
            for rule in rules:
                own = rows * rule.shares[rule.part] // sum(rule.shares)
                found.append((split_numbers(rule.ours.format(*numbers))[0], [own, columns]))
        elif ours := _ours(family, rest):
            found.append((split_numbers(ours)[0], [rows, columns]))
    for model in family.published:
        known = [(model[name], shape) for name, shape in found if name in model]
        if known and all(shape in layers.shapes for layers, shape in known):
            return True
    return False


def _has_sides(sides: Mapping[str, tuple[int, int]], family: Names) -> bool:
    """Whether the layers have the shapes of the family's: where its table says how many rows there are to a column."""
    for rest, (rows, columns) in sides.items():
        found = rules_of_original(family.layout, rest)
        if found and found[0][0].ratio and abs(rows / columns - found[0][0].ratio) > ALIKE:
            return False
    return True


def _match(rest: str, family: Names) -> int:
    """Whether the family knows a name; the original's weigh more, where they differ from diffusers', which families share."""
    if found := _original(family, rest):
        return ORIGINAL if any(rule.ours != rule.original for rule in found[0]) else 1
    return 1 if _ours(family, rest) else 0


def _original(family: Names, rest: str) -> tuple[tuple[Rule, ...], tuple[str, ...]] | None:
    return rules_of_original(family.layout, rest) or rules_of_original(family.also, rest)


def _ours(family: Names, rest: str) -> str | None:
    return rules_of_ours(family.layout, rest) or rules_of_ours(family.layout, _diffusers(rest))


def _side(name: str) -> tuple[str, str]:
    """Component (or DENOISER) and the rest of a name, still as the file has it."""
    if "." not in name:
        for prefix in sorted(COMPONENT_OF_PREFIX, key=len, reverse=True):
            if name.startswith(prefix + "_"):
                component, rest = COMPONENT_OF_PREFIX[prefix], name.removeprefix(prefix + "_")
                # Some programs put a second underscore, or the component, behind kohya's beginning.
                return component, rest.removeprefix("_").removeprefix("unet_") if component == DENOISER else rest
        return DENOISER, name  # a layer outside of all blocks, of a file whose names have no prefix
    rest = name.removeprefix(PEFT)
    for prefix, component in COMPONENT_OF_DOTTED.items():
        if rest.startswith(prefix):
            rest = rest.removeprefix(prefix)
            for inside in INSIDE:
                rest = rest.removeprefix(inside)
            return component, rest
    if match := LANGUAGE_MODEL.match(rest):
        return "text_encoder", rest[match.end() :]
    if rest.startswith(("text_model.", "encoder.layers.", "encoder.block.")):
        return "text_encoder", rest
    return DENOISER, rest


def _found(component: str, rest: str, family: Names | None) -> Found | None:
    """`rest` has no dots where the file's form has none."""
    if component.startswith("text_encoder"):
        return Found((_text_module(component, _with_dots(rest), family),))
    if family is not None:
        if match := _original(family, rest):
            rules, numbers = match
            return Found(tuple(f"{family.denoiser}.{rule.ours.format(*numbers)}" for rule in rules), rules)
        if ours := _ours(family, rest):
            return Found((f"{family.denoiser}.{ours}",))
    dotted = _diffusers(rest)
    if _is_unet(dotted):
        return Found((f"unet.{_of_first_code(dotted) or dotted}",))
    return None if component == DENOISER else Found((f"{component}.{dotted}",))


def _text_module(component: str, rest: str, family: Names | None) -> str:
    if rest.startswith(("encoder.block.", "shared")) and component != "text_encoder_2":
        # T5 comes after the family's other text encoders, whichever number a program gives it for all families.
        others = 2 if family is None else sum(name.startswith("text_encoder") for name in family.prefixes)
        return f"text_encoder{f'_{others + 1}' if others else ''}.{rest}"
    if rest.startswith(("encoder.layers.", "embeddings.")):
        rest = f"text_model.{rest}"  # transformers 5 leaves it out, and the files of those who save what it says
    head, _, last = rest.rpartition(".")
    return f"{component}.{head}.{_CLIP_BEFORE[last]}" if last in _CLIP_BEFORE and head else f"{component}.{rest}"


def _diffusers(rest: str) -> str:
    """A name with its dots, and without the parts that diffusers inserted before it used peft."""
    named = _with_dots(rest)
    return f"{named}.0" if named.endswith(".to_out") else named


def _with_dots(rest: str) -> str:
    return rest.replace(".processor.", ".") if "." in rest else dotted(rest)


def _is_unet(rest: str) -> bool:
    named = rest if "." in rest else dotted(rest)
    return bool(_UNET.match(named)) or _of_first_code(named) is not None


def _of_first_code(rest: str) -> str | None:
    """diffusers' name of a module of the first code's U-Net: `input_blocks.4.1.proj_in` -> `down_blocks.1.attentions.0.proj_in`."""
    if rest in _OUTER:
        return _OUTER[rest]
    match = _BLOCK.fullmatch(rest)
    if match is None:
        return None
    side, number, within, leaf = match[1], int(match[2]), match[3], match[4]
    if side == "middle_block":
        leaf = f"{within}.{leaf}" if within else leaf
        return (
            f"mid_block.attentions.0.{leaf}"
            if number == 1
            else f"mid_block.resnets.{number // 2}.{_RESNET.get(leaf, leaf)}"
        )
    if within is None:
        return None
    block, layer = divmod(number - 1 if side == "input_blocks" else number, 3)
    place = f"{'down' if side == 'input_blocks' else 'up'}_blocks.{block}"
    if leaf in ("op", "conv"):
        return f"{place}.{'downsamplers' if leaf == 'op' else 'upsamplers'}.0.conv"
    if within == "0":
        return f"{place}.resnets.{layer}.{_RESNET.get(leaf, leaf)}"
    return f"{place}.attentions.{layer}.{leaf}"


def dotted(underscored: str) -> str:
    """Put the dots back, taking the longest known compound at each place."""
    names = underscored.split("_")
    parts: list[str] = []
    at = 0
    while at < len(names):
        for length in range(min(_LONGEST, len(names) - at), 0, -1):
            part = "_".join(names[at : at + length])
            if length == 1 or part in COMPOUND:
                break
        parts.append(part)
        at += length
    return ".".join(parts)
