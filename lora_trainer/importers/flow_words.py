"""How other programs sample timesteps of flow-matching models, and what is the same here.

Time 1 is pure noise. Programs that take the n-th of their scheduler's timesteps count from there, so their logits have
the opposite sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lora_trainer.config.options import NEEDS
from lora_trainer.importers.documents import SCRIPT
from lora_trainer.importers.reading import Around, KeyRule, Took, Verdict
from lora_trainer.importers.rules import by, is_on, lacking, number, part_of, text, truth

ALL = "flow.timestep_sampling flow.logit_mean flow.logit_std flow.mode_scale flow.shift"
NO_FLOW = "of models with flow matching, which this is not"
NO_GUIDANCE = "distilled models are trained with guidance 1"
WEIGHED = "without its weighting of the loss"
SQUARED = "its loss counts a time by its square there; all times count alike here"
OF_DIFFUSION = frozenset(
    {
        "loss.weighting",
        "model.prediction_type",
        *(name for name, (predictions, _) in NEEDS.items() if "flow" not in predictions),
    }
)
NOT_READ = "its program does not read it for models with flow matching"
NOT_OF_FLOWS = "a flow has no such thing here (docs/flow.md)"
# Keys of kohya's that only its scripts for Anima, for SD3, or for FLUX and later models, read.
OF_ANIMA = ("qwen3", "llm_adapter_path", "t5_tokenizer_path", "qwen3_max_token_length", "t5_max_token_length")
OF_SD3 = ("clip_g", "training_shift", "sd3_cache_text_encoder_outputs")
OF_FLUX = ("ae", "timestep_sampling", "model_prediction_type", "guidance_scale", "discrete_flow_shift")
KOHYA_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "flux": {"timestep_sampling": "sigma", "model_prediction_type": "sigma_scaled", "guidance_scale": 3.5},
    "sd3": {"weighting_scheme": "uniform"},
    "anima": {"timestep_sampling": "sigmoid"},
}
KOHYA_SHIFTS = {"flux": 3.0, "anima": 1.0}
KOHYA_BOXES = {"flux": "flux1_checkbox", "sd3": "sd3_checkbox", "anima": "anima_checkbox"}


def times(
    kind: str, *, mean: float = 0.0, spread: float = 1.0, scale: float = 1.29, shift: float | str = "model"
) -> dict[str, Any]:
    """The settings that a distribution uses, and the shift."""
    used = {
        "uniform": {},
        "logit_normal": {"flow.logit_mean": mean, "flow.logit_std": spread},
        "mode": {"flow.mode_scale": scale},
    }
    return {"flow.timestep_sampling": kind, **used[kind], "flow.shift": shift}


def number_of(around: Around, key: str, otherwise: float) -> float:
    """The number of another key; a wrong value is reported for that key."""
    try:
        return number(around[key]) if around[key] is not None else otherwise
    except ValueError:
        return otherwise


def number_with(key: str) -> KeyRule:
    """A number that is read together with another key."""

    def read(value: Any, around: Around) -> Took:
        number(value)
        return Took({}, f"read together with {key}")

    return by(read, "", f"read together with {key}")


def of_flows(rules: Mapping[str, KeyRule], why: str, verdict: Verdict) -> dict[str, KeyRule]:
    """A program's rules for flow-matching models, without the settings that only diffusion models have."""
    return {key: replace(rule, read=partial(_without_diffusion, rule, why, verdict)) for key, rule in rules.items()}


def _without_diffusion(rule: KeyRule, why: str, verdict: Verdict, value: Any, around: Around) -> Took:
    took = rule.read(value, around)
    kept = {name: each for name, each in took.settings.items() if name not in OF_DIFFUSION}
    return took if len(kept) == len(took.settings) else Took(kept, why, verdict)


def by_weighting(scheme: str, around: Around, shift: float | str, *, backwards: bool, squared: bool = False) -> Took:
    """The distributions of diffusers' SD3 scripts, also used by others. `backwards`: timesteps count from noise.

    `squared`: the loss is of clean latents, which weights a time by its square, unless `sigma_sqrt` divides by that.
    """
    if squared and scheme == "sigma_sqrt":
        return Took(times("uniform", shift=shift))
    plain = _distribution(scheme, around, shift, backwards)
    return Took(plain.settings, SQUARED, "changed") if squared and plain.why != WEIGHED else plain


def _distribution(scheme: str, around: Around, shift: float | str, backwards: bool) -> Took:
    if scheme == "logit_normal":
        mean = number_of(around, "logit_mean", 0.0) * (-1.0 if backwards else 1.0)
        return Took(times("logit_normal", mean=mean, spread=number_of(around, "logit_std", 1.0), shift=shift))
    if scheme == "mode":
        return Took(times("mode", scale=number_of(around, "mode_scale", 1.29), shift=shift))
    weighs = scheme in ("sigma_sqrt", "cosmap")
    return Took(times("uniform", shift=shift), WEIGHED if weighs else "", "changed" if weighs else None)


def kohya_family(around: Around | Mapping[str, Any]) -> str:
    """`flux`, `sd3`, `anima`, or nothing where the config is of a diffusion model."""
    keys = around.keys if isinstance(around, Around) else around
    seen = {key for key, value in keys.items() if value is not None and value != ""}
    if "LoRA_type" in seen:  # the GUI keeps keys of all families; a checkbox selects one
        return next((name for name, box in KOHYA_BOXES.items() if _on(keys, box)), "")
    if seen & {*OF_ANIMA} or keys.get("network_module") == "networks.lora_anima":
        return "anima"
    if seen & {*OF_SD3}:
        return "sd3"
    return "flux" if seen & {*OF_FLUX} else "sd3" if "t5xxl" in seen else ""


def _on(keys: Mapping[str, Any], key: str) -> bool:
    return bool(is_on(keys.get(key) or False))


def _kohya_sampling(value: Any, around: Around) -> Took:
    family, word = kohya_family(around), text(value).lower()
    if family not in KOHYA_SHIFTS:
        return Took({}, "weighting_scheme rules" if family else NO_FLOW, "ignored")
    spread = number_of(around, "sigmoid_scale", 1.0)
    shift = number_of(around, "discrete_flow_shift", KOHYA_SHIFTS[family])
    shifts: dict[str, float | str] = {"sigmoid": 1.0, "shift": shift, "flux_shift": "resolution"}
    if word in shifts:
        return Took(times("logit_normal", spread=spread, shift=shifts[word]))
    if word == "uniform":
        return Took(times("uniform", shift=1.0))
    if word != "sigma":
        return Took(times("logit_normal"), "there is no such sampling here", "changed")
    scheme = str(around["weighting_scheme"] or "uniform").lower()
    return by_weighting(scheme, around, shift, backwards=True)


def _kohya_weighting(value: Any, around: Around) -> Took:
    family = kohya_family(around)
    if family != "sd3":
        return Took(
            {}, "read together with timestep_sampling" if family else NO_FLOW, "mapped" if family else "ignored"
        )
    shift = number_of(around, "training_shift", 1.0)
    return by_weighting(text(value).lower(), around, shift, backwards=False, squared=True)


def of_flow(rule: KeyRule) -> KeyRule:
    """A rule of kohya's that applies only to flow-matching models."""

    def read(value: Any, around: Around) -> Took:
        return rule.read(value, around) if kohya_family(around) else Took({}, NO_FLOW, "ignored")

    return KeyRule(rule.verdict, rule.ours, rule.why, read)


KOHYA: Mapping[str, KeyRule] = {
    "timestep_sampling": by(_kohya_sampling, ALL),
    "weighting_scheme": by(_kohya_weighting, ALL),
    **{key: of_flow(number_with("timestep_sampling")) for key in ("sigmoid_scale", "discrete_flow_shift")},
    **{
        key: of_flow(number_with("weighting_scheme"))
        for key in ("logit_mean", "logit_std", "mode_scale", "training_shift")
    },
    "model_prediction_type": of_flow(lacking("the flow's own velocity is learned", off=("raw",))),
    "guidance_scale": of_flow(lacking(NO_GUIDANCE, off=(1,))),
}


SIMPLETUNER_FLOWS = ("sd3", "flux", "flux2", "chroma", "z_image", "qwen_image", "krea2", "anima")
SIMPLETUNER_DEFAULTS: Mapping[str, Any] = {"flow_schedule_shift": 3.0}


def is_simpletuner_flow(keys: Mapping[str, Any]) -> bool:
    return str(keys.get("model_family")).lower() in SIMPLETUNER_FLOWS


def _simpletuner_shift(around: Around) -> float | str:
    old = number_of(around, "flux_schedule_shift", 0.0)  # the name of earlier versions, beside the new one's default
    shift = old or number_of(around, "flow_schedule_shift", 0.0)
    if is_on(around["flow_schedule_auto_shift"] or False):
        return "resolution"
    return shift if shift > 0 else 1.0


def _simpletuner(value: Any, around: Around) -> Took:
    """Of whichever of its keys comes first: all of them together."""
    if around["model_family"] is not None and not is_simpletuner_flow(around.keys):
        return Took({}, NO_FLOW, "ignored")
    if is_on(around["flow_use_uniform_schedule"] or False):
        return Took(times("uniform", shift=_simpletuner_shift(around)))
    spread = number_of(around, "flow_sigmoid_scale", 1.0)
    settings = times("logit_normal", spread=spread, shift=_simpletuner_shift(around))
    beta = is_on(around["flow_use_beta_schedule"] or False)
    return Took(settings, "a beta distribution there" if beta else "", "changed" if beta else None)


SIMPLETUNER: Mapping[str, KeyRule] = {
    **{
        key: by(_simpletuner, ALL)
        for key in (
            "flow_schedule_shift flux_schedule_shift flow_schedule_auto_shift flow_sigmoid_scale "
            "flow_use_uniform_schedule flow_use_beta_schedule"
        ).split()
    },
    **{key: part_of("flow_use_beta_schedule") for key in ("flow_beta_schedule_alpha", "flow_beta_schedule_beta")},
    **{
        key: lacking("there is no such drawing of times here")
        for key in ("flux_fast_schedule", "flow_custom_timesteps", "flow_cubic_schedule_weights")
    },
    "flux_guidance_mode": lacking(NO_GUIDANCE, off=("constant",)),
    "flux_guidance_value": lacking(NO_GUIDANCE, off=(1,)),
}
ONETRAINER_FLOWS = (
    "STABLE_DIFFUSION_3",
    "STABLE_DIFFUSION_35",
    "FLUX_DEV_1",
    "FLUX_2",
    "CHROMA_1",
    "Z_IMAGE",
    "QWEN",
    "ANIMA",
    "KREA_2",
)


def is_onetrainer_flow(around: Around | Mapping[str, Any]) -> bool:
    keys = around.keys if isinstance(around, Around) else around
    return str(keys.get("model_type")).upper() in ONETRAINER_FLOWS


def _onetrainer(value: Any, around: Around) -> Took:
    name = text(value).upper()
    if not is_onetrainer_flow(around):
        uniform = name == "UNIFORM"
        return Took(
            {}, "as here" if uniform else "all timesteps are trained alike", "ignored" if uniform else "changed"
        )
    moved = is_on(around["dynamic_timestep_shifting"] or False)
    shift: float | str = "resolution" if moved else number_of(around, "timestep_shift", 1.0)
    weight, bias = number_of(around, "noising_weight", 0.0), number_of(around, "noising_bias", 0.0)
    if name == "LOGIT_NORMAL":
        return Took(times("logit_normal", mean=bias, spread=weight + 1.0, shift=shift))
    if name == "HEAVY_TAIL":
        return Took(times("mode", scale=weight, shift=shift))
    known = name == "UNIFORM"
    return Took(times("uniform", shift=shift), "" if known else "uniform here", None if known else "changed")


def _onetrainer_number(value: Any, around: Around) -> Took:
    number(value)
    if not is_onetrainer_flow(around):
        return Took({}, NO_FLOW, "ignored")
    return Took({}, "read together with timestep_distribution", "mapped")


def _onetrainer_switch(value: Any, around: Around) -> Took:
    truth(value)
    return _onetrainer_number(0, around)


ONETRAINER: Mapping[str, KeyRule] = {
    "timestep_distribution": by(_onetrainer, ALL),
    **{key: by(_onetrainer_number, ALL) for key in ("noising_weight", "noising_bias", "timestep_shift")},
    "dynamic_timestep_shifting": by(_onetrainer_switch, ALL),
}
AITOOLKIT_FLOWS = (
    "flux",
    "flux_kontext",
    "flux2",
    "flux2_klein_4b",
    "flux2_klein_9b",
    "chroma",
    "anima",
    "sd3",
    "flex1",
    "zimage",
    "qwen_image",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    "qwen_image_2",
    "krea2",
)
AITOOLKIT_DEFAULTS: Mapping[str, Any] = {"train.timestep_type": "sigmoid"}


def is_aitoolkit_flow(keys: Mapping[str, Any]) -> bool:
    arch = str(keys.get("model.arch") or "").lower().split(":")[0]
    return arch in AITOOLKIT_FLOWS or _on(keys, "model.is_flux") or _on(keys, "model.is_v3")


def _aitoolkit(value: Any, around: Around) -> Took:
    if not is_aitoolkit_flow(around.keys):
        return Took({}, NO_FLOW, "ignored")
    word = text(value).lower()
    known = {
        "sigmoid": times("logit_normal", shift=1.0),
        "linear": times("uniform", shift=1.0),
        # By size where the model's scheduler says so, by its number otherwise.
        **dict.fromkeys(("shift", "flux_shift", "lumina2_shift"), times("uniform")),
    }
    if any(is_on(around[f"train.{key}"] or False) for key in ("linear_timesteps", "linear_timesteps2")):
        word = "weighted"
    if word in known:
        return Took(known[word])
    return Took(times("uniform", shift=1.0), WEIGHED if word == "weighted" else "uniform here", "changed")


AITOOLKIT: Mapping[str, KeyRule] = {"train.timestep_type": by(_aitoolkit, ALL)}


# What the parsers of its scripts hold for each family, and the layers that learn unless lora_layers says others.
OF_ITS_FLOWS = {"learning_rate": 1e-4, "resolution": 512, "adam_weight_decay": 1e-4}
DIFFUSERS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sd3": {
        **OF_ITS_FLOWS,
        "weighting_scheme": "logit_normal",
        "precondition_outputs": 1,
        "max_sequence_length": 77,
    },
    "flux2": {**OF_ITS_FLOWS, "weighting_scheme": "none"},  # before the name that it begins with
    "flux": {**OF_ITS_FLOWS, "weighting_scheme": "none", "guidance_scale": 3.5},
    "z_image": {**OF_ITS_FLOWS, "weighting_scheme": "none"},
    "qwen_image": {**OF_ITS_FLOWS, "weighting_scheme": "none"},
    "krea2": {**OF_ITS_FLOWS, "weighting_scheme": "none", "learning_rate": 3e-4, "rank": 32, "lora_alpha": 32},
}
ATTENTION = tuple(f"*.attn.{name}" for name in ("to_[qkv]", "to_out.0", "add_[qkv]_proj", "to_add_out"))
DIFFUSERS_TARGETS: Mapping[str, Any] = {
    "sd3": list(ATTENTION),
    "flux2": [
        *(f"transformer_blocks.*.attn.{name}" for name in ("to_[qkv]", "to_out.0")),
        *(f"single_transformer_blocks.*.attn.{name}" for name in ("to_qkv_mlp_proj", "to_out")),
    ],
    "flux": [*ATTENTION, *(f"*.{part}.net.{layer}" for part in ("ff", "ff_context") for layer in ("0.proj", "2"))],
    "qwen_image": list(ATTENTION[:2]),
    "krea2": [
        *(f"*.attn.{name}" for name in ("to_[qkv]", "to_out.0", "to_gate")),
        *("*.ff.up", "*.ff.down", "img_in", "final_layer.linear", "text_fusion.projector"),
        *("txt_in.linear_[12]", "time_embed.linear_[12]", "time_mod_proj"),
    ],
}


def diffusers_family(script: str) -> str:
    """The family of a script for flow matching, or nothing for one of diffusion models."""
    return next((name for name in DIFFUSERS_DEFAULTS if name in script), "")


def _diffusers(value: Any, around: Around) -> Took:
    """Its FLUX scripts take the scheduler's timesteps before they are shifted by size, the others shifted ones."""
    shift: float | str = 1.0 if "flux" in str(around[SCRIPT]) else "model"
    squared = is_on(around["precondition_outputs"] or 0)
    return by_weighting(text(value).lower(), around, shift, backwards=True, squared=squared)


def _guidance(value: Any, around: Around) -> Took:
    guided = diffusers_family(str(around[SCRIPT])) == "flux"  # FLUX.2 klein has no such input
    return Took({}) if guided and number(value) != 1.0 else Took({}, "as here", "ignored")


DIFFUSERS: Mapping[str, KeyRule] = {
    "weighting_scheme": by(_diffusers, ALL),
    **{key: number_with("weighting_scheme") for key in ("logit_mean", "logit_std", "mode_scale")},
    "guidance_scale": by(_guidance, "", NO_GUIDANCE, changes=True),
    "precondition_outputs": part_of("weighting_scheme"),
}
