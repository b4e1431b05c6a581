"""Options that only some models can be trained with, by what the model predicts."""

from __future__ import annotations

from dataclasses import replace

from lora_trainer.config.contradictions import Settings, Yields, give_way, note_on
from lora_trainer.config.layers import DEFAULT, Resolved
from lora_trainer.config.schema import Config
from lora_trainer.config.toml import section_types
from lora_trainer.core.errors import UsageError

# setting -> (what the model must predict, why); a setting at its default asks for nothing.
NEEDS = {
    "loss.min_snr_gamma": (
        ("epsilon", "v_prediction"),
        "a flow has no signal-to-noise ratio to weigh by",
    ),
    **{
        f"flow.{name}": (("flow",), "only models of flow matching are trained at times that can be chosen")
        for name in section_types()["flow"].model_fields
    },
    # The flow ends in noise without any signal, so nothing leaks there that an offset would have to mend; drawing starts
    # from plain noise, which a model trained on other noise has never met.
    **dict.fromkeys(
        ("noise.offset", "noise.multires_iterations"),
        (
            ("epsilon", "v_prediction"),
            "a flow starts drawing from plain noise",
        ),
    ),
    "noise.zero_terminal_snr": (
        ("v_prediction",),
        "where no signal is left, only a model that predicts velocity (v_prediction) has anything to learn",
    ),
}


def suited(resolved: Resolved, prediction: str) -> Resolved:
    """The settings for a model that predicts `epsilon`, `v_prediction` or another thing.

    What a preset wants and the model lacks is dropped and noted. Raises UsageError where the
    user wants it.
    """
    settings = Settings(resolved.config.model_dump(), resolved.origin)
    lacking = [
        Yields(name, settings.default(name), f"the model predicts {prediction}, and {why}", f"Remove {name}.")
        for name, (predictions, why) in NEEDS.items()
        if prediction not in predictions and settings[name] != settings.default(name)
    ]
    dropped, problems = give_way(settings, lacking)
    if problems:
        raise UsageError(problems)
    values, origin = settings.without(dropped), dict(resolved.origin)
    origin.update({each.name: f"{DEFAULT} (the model lacks it)" for each in dropped})
    notes = (*resolved.notes, *(note_on(settings, each) for each in dropped))
    return replace(resolved, config=Config.model_validate(values), origin=origin, notes=notes)
