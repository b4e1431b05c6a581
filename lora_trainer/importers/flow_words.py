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
from lora_trainer.core.families import is_flow, known_to
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
KOHYA_FAMILIES = known_to("kohya")


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
    """The family of a flow-matching model, or nothing where the config is of a diffusion model."""
    keys = around.keys if isinstance(around, Around) else around
    seen = {key for key, value in keys.items() if value is not None and value != ""}
    if "LoRA_type" in seen:  # the GUI keeps keys of all families; a checkbox selects one
        return next((name for name, own in KOHYA_FAMILIES.items() if _on(keys, own["checkbox"])), "")
    module = str(keys.get("network_module"))
    for name, own in KOHYA_FAMILIES.items():
        if seen & {*own.get("keys", ())} or module == own.get("network_module"):
            return name
    return next((name for name, own in KOHYA_FAMILIES.items() if seen & {*own.get("keys_of_several", ())}), "")


def kohya_defaults(family: str) -> dict[str, Any]:
    """The defaults that kohya's scripts have for one family alone."""
    return dict(KOHYA_FAMILIES.get(family, {}).get("defaults", {}))


def _on(keys: Mapping[str, Any], key: str) -> bool:
    return bool(is_on(keys.get(key) or False))


def _kohya_sampling(value: Any, around: Around) -> Took:
    family, word = kohya_family(around), text(value).lower()
    default_shift = KOHYA_FAMILIES.get(family, {}).get("shift")
    if default_shift is None:
        return Took({}, "weighting_scheme rules" if family else NO_FLOW, "ignored")
    spread = number_of(around, "sigmoid_scale", 1.0)
    shift = number_of(around, "discrete_flow_shift", default_shift)
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
    if not family or "shift" in KOHYA_FAMILIES[family]:
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


SIMPLETUNER_FAMILIES = {name: family for family, names in known_to("simpletuner").items() for name in names}
SIMPLETUNER_DEFAULTS: Mapping[str, Any] = {"flow_schedule_shift": 3.0}


def is_simpletuner_flow(keys: Mapping[str, Any]) -> bool:
    family = SIMPLETUNER_FAMILIES.get(str(keys.get("model_family")).lower())
    return family is not None and is_flow(family)


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
ONETRAINER_TYPES = {name: family for family, own in known_to("onetrainer").items() for name in own["types"]}


def is_onetrainer_flow(around: Around | Mapping[str, Any]) -> bool:
    keys = around.keys if isinstance(around, Around) else around
    family = ONETRAINER_TYPES.get(str(keys.get("model_type")).upper())
    return family is not None and is_flow(family)


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
AITOOLKIT_FAMILIES = known_to("aitoolkit")
AITOOLKIT_DEFAULTS: Mapping[str, Any] = {"train.timestep_type": "sigmoid"}


def is_aitoolkit_flow(keys: Mapping[str, Any]) -> bool:
    arch = str(keys.get("model.arch") or "").lower().split(":")[0]
    for family, own in AITOOLKIT_FAMILIES.items():
        switches = own.get("switches", ())
        if any(_on(keys, f"model.{switch}") for switch in switches):
            return True
        if is_flow(family) and arch in (*own["architectures"], *own.get("not_trained", ())):
            return True
    return False


def _aitoolkit(value: Any, around: Around) -> Took:
    if not is_aitoolkit_flow(around.keys):
        return Took({}, NO_FLOW, "ignored")
    word = text(value).lower()
    own_shifts = [name for own in AITOOLKIT_FAMILIES.values() for name in own.get("timestep_types", ())]
    known = {
        "sigmoid": times("logit_normal", shift=1.0),
        "linear": times("uniform", shift=1.0),
        # By size where the model's scheduler says so, by its number otherwise.
        **dict.fromkeys(("shift", *own_shifts), times("uniform")),
    }
    if any(is_on(around[f"train.{key}"] or False) for key in ("linear_timesteps", "linear_timesteps2")):
        word = "weighted"
    if word in known:
        return Took(known[word])
    return Took(times("uniform", shift=1.0), WEIGHED if word == "weighted" else "uniform here", "changed")


AITOOLKIT: Mapping[str, KeyRule] = {"train.timestep_type": by(_aitoolkit, ALL)}


# What the parsers of its scripts hold for each family, and the layers that learn unless lora_layers says others.
DIFFUSERS_FAMILIES = known_to("diffusers")


def diffusers_family(script: str) -> Mapping[str, Any]:
    """What a script for flow matching has for its family: `defaults`, `targets` and `shift`; empty for diffusion models.

    The longest name counts: one may be the beginning of another's.
    """
    named = [name for name in DIFFUSERS_FAMILIES if name in script]
    return DIFFUSERS_FAMILIES[max(named, key=len)] if named else {}


def _diffusers(value: Any, around: Around) -> Took:
    """Some scripts take the scheduler's timesteps before they are shifted by size, the others shifted ones."""
    shift: float | str = diffusers_family(str(around[SCRIPT])).get("shift", "model")
    squared = is_on(around["precondition_outputs"] or 0)
    return by_weighting(text(value).lower(), around, shift, backwards=True, squared=squared)


def _guidance(value: Any, around: Around) -> Took:
    guided = "guidance_scale" in diffusers_family(str(around[SCRIPT])).get("defaults", {})
    return Took({}) if guided and number(value) != 1.0 else Took({}, "as here", "ignored")


DIFFUSERS: Mapping[str, KeyRule] = {
    "weighting_scheme": by(_diffusers, ALL),
    **{key: number_with("weighting_scheme") for key in ("logit_mean", "logit_std", "mode_scale")},
    "guidance_scale": by(_guidance, "", NO_GUIDANCE, changes=True),
    "precondition_outputs": part_of("weighting_scheme"),
}
