"""Options that only some models support, depending on what the model predicts."""

from __future__ import annotations

from collections.abc import Sequence

from lora_trainer.config.contradictions import Settings, Yields, from_user, without_clashes
from lora_trainer.config.layers import DEFAULT, Resolved, resolved_as
from lora_trainer.config.toml import section_types
from lora_trainer.core.errors import Problem, UsageError

# setting -> (what the model must predict, why); a setting at its default needs nothing.
NEEDS = {
    "loss.min_snr_gamma": (
        ("epsilon", "v_prediction"),
        "a flow-matching model has no signal-to-noise ratio to weight by",
    ),
    **{
        f"flow.{name}": (("flow",), "timesteps can be chosen only for flow-matching models")
        for name in section_types()["flow"].model_fields
    },
    # A flow ends in pure noise, so no signal leaks that an offset would have to fix; sampling starts from plain noise,
    # which a model trained on other noise has never seen.
    **dict.fromkeys(
        ("noise.offset", "noise.multires_iterations"),
        (
            ("epsilon", "v_prediction"),
            "a flow-matching model samples from plain noise",
        ),
    ),
    "noise.zero_terminal_snr": (
        ("v_prediction",),
        "without any signal, only a model that predicts velocity (v_prediction) can learn",
    ),
}

# (setting, value) -> the same, where only some values of a setting need it.
NEEDS_OF_VALUES = {
    ("loss.weighting", "debiased"): NEEDS["loss.min_snr_gamma"],
    ("loss.weighting", "v_as_epsilon"): (("v_prediction",), "its loss is that of noise already"),
}

# setting -> (the prediction type, why a preset's value is dropped for it); a user may set it nevertheless.
DROPPED_FROM_PRESETS = {
    "loss.min_snr_gamma": (
        "v_prediction",
        "min-SNR weights its noisiest timesteps near 0 (0.001 with zero terminal SNR)",
    ),
}


def suited(resolved: Resolved, prediction: str) -> Resolved:
    """The settings for a model with the prediction type `epsilon`, `v_prediction` or `flow`.

    A preset's option that the model does not support is dropped and noted. Raises UsageError if
    the user set it.
    """
    settings = Settings(resolved.config.model_dump(), resolved.origin)
    unsuited = [(name, why) for name, (predictions, why) in NEEDS.items() if prediction not in predictions]
    unsuited += [
        (name, why)
        for (name, value), (predictions, why) in NEEDS_OF_VALUES.items()
        if prediction not in predictions and settings[name] == value
    ]
    unsuited += [
        (name, why)
        for name, (dropped_for, why) in DROPPED_FROM_PRESETS.items()
        if prediction == dropped_for and not from_user(settings.origin.get(name, DEFAULT))
    ]
    lacking = [
        Yields(
            name,
            settings.default(name),
            f"the model predicts {prediction}, and {why}",
            f"Remove {name}.",
            f"{DEFAULT} (the model lacks it)",
        )
        for name, why in unsuited
        if settings[name] != settings.default(name)
    ]
    return with_lacking(resolved, lacking)


def with_lacking(resolved: Resolved, lacking: Sequence[Yields]) -> Resolved:
    """The settings with other values for those of presets that something lacks, which is noted.

    Raises UsageError for settings of the user.
    """
    problems = list[Problem]()
    left, notes = without_clashes(Settings(resolved.config.model_dump(), resolved.origin), lacking, problems)
    if problems:
        raise UsageError(problems)
    return resolved_as(left, resolved.origin, resolved.evidence, (*resolved.notes, *notes))
