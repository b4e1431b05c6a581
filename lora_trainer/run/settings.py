"""Resolve presets, files and flags into one config; the model decides which family preset is below them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from lora_trainer.config.contradictions import Yields, from_user, is_asked_for
from lora_trainer.config.layers import DEFAULT, Layer, Resolved, resolve, valid_settings
from lora_trainer.config.options import with_lacking
from lora_trainer.config.presets import family_layers, refuse_other_family
from lora_trainer.config.schema import Config, GatesSection, SampleSection
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.config.schema.types import Flavor, PredictionType
from lora_trainer.config.toml import EMPTY
from lora_trainer.core.errors import Problem, UsageError, gathering, known_as
from lora_trainer.core.imports import is_installed, why_unusable
from lora_trainer.importers.data_files import with_data_files
from lora_trainer.models.attention.packages import lacking
from lora_trainer.models.detection import detect_family
from lora_trainer.models.family import USUAL_FAMILY, Family, ModelFacts
from lora_trainer.monitor.tracker_kinds import missing_libraries
from lora_trainer.optim.optimizers import OPTIMIZERS
from lora_trainer.run.accelerate_settings import accelerate_layers, as_note
from lora_trainer.run.bases import find as bases
from lora_trainer.run.bases.names import as_hub_part

HUB_SETTINGS = ("path", "vae", "text_encoders")  # settings that may name a model of a hub


def settle(
    presets: Sequence[Layer],
    user: Sequence[Layer],
    problems: Iterable[Problem] = (),
    *,
    builtin_if_none: bool = True,
    say: Callable[[str], None] = bases.on_stderr,
) -> Resolved:
    """Family preset, presets, what the built-in model needs, accelerate and the user's layers (files, flags) as one config; later wins.

    Without a model the built-in model's preset applies, unless `builtin_if_none` is false.
    A model of a hub is pinned to its current commit. Raises UsageError with `problems` first, then every error in any
    layer.
    """
    found = list(problems)
    notes: list[str] = []
    user = with_data_files(user, found, notes)
    accelerate = accelerate_layers(found)
    notes += map(as_note, accelerate)
    wrong = list(found)
    for layer in (*presets, *accelerate, *user):
        valid_settings(layer, wrong)
    # Refused settings make no request to a hub.
    family, is_builtin, pinned = _family_of(user, found, say, builtin_if_none=builtin_if_none, refused=bool(wrong))
    found += refuse_other_family(presets, family) if family != EMPTY else []
    families = family_layers(family, builtin=is_builtin)
    needed = []
    if is_builtin:
        # Learning rate and batch of models a hundred times the size teach the miniature next to nothing.
        own = families[-1].values
        kept = {"optimizer": own["optimizer"], "train": {"effective_batch_size": own["train"]["effective_batch_size"]}}
        needed = [replace(families[-1], values=kept)]
    resolved = resolve([*families, *presets, *needed, *accelerate, *user, *pinned], found)
    return replace(resolved, notes=(*notes, *resolved.notes))


def go_offline(config: Config) -> None:
    """From here on no library uses the network, where `run.offline` is set."""
    if config.run.offline:
        bases.go_offline()


def with_installed_libraries(resolved: Resolved) -> Resolved:
    """The settings, with AdamW in place of a preset's 8-bit AdamW where bitsandbytes cannot be used, which is noted.

    Raises UsageError, before anything is loaded, for all that the user set and that lacks a library.
    """
    # A run reports the default tracker where its library is missing, and does without it.
    trackers = resolved.config.run.trackers if from_user(resolved.origin["run.trackers"]) else ()
    problems = missing_libraries(trackers)
    with gathering(problems):
        refuse_missing_attention(resolved)
    with gathering(problems):
        resolved = with_installed_optimizer(resolved)
    if problems:
        raise UsageError(problems)
    return resolved


def refuse_missing_attention(resolved: Resolved) -> None:
    """Raise UsageError, before anything is loaded, for an attention backend set by the user whose package is missing."""
    problem = lacking(resolved.config.hardware.attention_backend)
    if problem is not None and from_user(resolved.origin["hardware.attention_backend"]):
        raise UsageError(problem)


def with_installed_optimizer(resolved: Resolved) -> Resolved:
    """The same of the optimizer alone. Its learning rate is that of AdamW; another optimizer's would not be."""
    setting, name = "optimizer.name", resolved.config.optimizer.name
    spec = OPTIMIZERS[name]
    if spec.library is None:
        return resolved
    # Others are imported later (`import_libraries`): transformers would look for libraries that the run hides.
    reason = why_unusable(spec.library) if spec.has_8_bit_state else None
    if reason is None and is_installed(spec.library):
        return resolved
    package = spec.library.replace("_", "-")
    message, fix = f"{package} {reason or 'is not installed'}", f"pip install {package}, or set optimizer.name=adamw."
    if not spec.has_8_bit_state:
        raise UsageError(Problem("library_missing", f"{setting}={name}: {message}.", fix))
    return with_lacking(resolved, [Yields(setting, "adamw", message, fix, f"{DEFAULT} ({message})")])


def refuse_unmeasured(gates: GatesSection) -> None:
    """Raise UsageError for a gate that is enforced on a score that is not measured."""
    if gates.lora_check == "off" and gates.lora > 0:
        message = f"gates.lora is {gates.lora:g}, but gates.lora_check=off measures no score."
        fix = "Set gates.lora_check=lite or full, or gates.lora=0, or use `train`, which enforces no gate."
        raise UsageError(Problem("gate_without_check", message, fix))


def refuse_unchecked(resolved: Resolved) -> None:
    """Raise UsageError for settings of a check that the user turned off; `validate` uses them whatever it is."""
    gates, check = resolved.config.gates, "gates.lora_check"
    if gates.lora_check != "off" or not from_user(resolved.origin[check]):
        return
    usual, idle = GatesSection(), []
    for key in ("compare", "encoder", "unresolved"):
        is_changed = getattr(gates, key) != getattr(usual, key)
        if is_changed and is_asked_for(resolved.origin, f"gates.{key}", [check]):
            idle.append(f"gates.{key}")
    if idle:
        does = "does nothing" if len(idle) == 1 else "do nothing"
        message = f"{' and '.join(idle)} {does} while {check} is off."
        raise UsageError(
            Problem("setting_has_no_effect", message, f"Set {check}=lite or full, or remove {' and '.join(idle)}.")
        )


def refuse_guidance(resolved: Resolved, family: Family, facts: ModelFacts) -> None:
    """Raise UsageError for a guidance scale of the user's that the model does not take; 1 or less asks for none."""
    scale, usual = resolved.config.sample.guidance_scale, SampleSection().guidance_scale
    of_family = [
        layer.values.get("sample", {}).get("guidance_scale") for layer in family_layers(family.name, builtin=False)
    ]
    is_asked_for = from_user(resolved.origin["sample.guidance_scale"]) and scale > 1.0
    if not is_asked_for or scale in (usual, *of_family) or family.pipeline.sampling_defaults(facts.path).guided:
        return
    message = f"sample.guidance_scale is {scale:g}, but {facts.name} is sampled without guidance."
    raise UsageError(Problem("guidance_unused", message, "Remove it."))


def _family_of(
    user: Sequence[Layer],
    problems: list[Problem],
    say: Callable[[str], None],
    *,
    builtin_if_none: bool,
    refused: bool,
) -> tuple[str, bool, list[Layer]]:
    """The family of the user's model or of the built-in one, whether it is that one, and a layer that pins the model's commits."""
    model = _model_of(user)
    offline = [value for layer in user if (value := _section(layer, "run").get("offline")) is not None][-1:] == [True]
    requested = model.get("family", EMPTY)
    path = model.get("path")
    if path is None:
        if "revision" in model:
            message = f"model.revision is {model['revision']!r}, but no model of a hub is set."
            problems.append(
                Problem("revision_of_local_model", message, "Set --model to owner/name, or remove model.revision.")
            )
        usual = requested in (EMPTY, USUAL_FAMILY)
        return USUAL_FAMILY if usual else str(requested), builtin_if_none and usual, []
    named = next(layer.name for layer in reversed(user) if "path" in _section(layer, "model"))
    origin = named if named == "--model" else f"model.path (from {named})"
    if offline:
        bases.go_offline()
    if refused and any(as_hub_part(str(model[name])) is not None for name in HUB_SETTINGS if name in model):
        return str(requested), False, []
    family, commit = str(requested), None
    parts: Mapping[str, str] = {}
    try:
        base = bases.find_base(_plain_section(model), offline=offline, weights=False, origin=origin, say=say)
        with known_as(base.places):
            family, commit, parts = detect_family(base.folder, origin), base.commit, base.pinned
        if base.note:
            say(base.note)
        if requested not in (EMPTY, family):
            message = f"model.family is {requested}, but {path} is a model of {family}."
            problems.append(Problem("family_differs", message, f"Remove model.family, or check {origin}."))
    except UsageError as error:
        problems.extend(error.problems)
    revision = commit or EMPTY
    now = model.get("revision") or EMPTY
    changed = any("revision" in _section(layer, "model") for layer in user) or commit is not None
    pinned = {name: value for name, value in parts.items() if model.get(name) != value}
    if changed and now != revision:
        pinned["revision"] = revision
    return family, False, [Layer("commit of the model", {"model": pinned})] if pinned else []


def _model_of(user: Sequence[Layer]) -> dict[str, Any]:
    """The layers' model settings, later wins, without empty ones; a revision belongs to the path of its layer."""
    model: dict[str, Any] = {}
    for layer in user:
        section = _section(layer, "model")
        if "path" in section:
            model.pop("revision", None)
        model.update(section)
    return {key: value for key, value in model.items() if value not in (None, EMPTY)}


def _plain_section(model: Mapping[str, Any]) -> ModelSection:
    """The same as a section; values of a wrong type are dropped here and refused with the other settings."""
    texts = ("path", "revision", "vae", "text_encoders")
    values: dict[str, Any] = {key: model[key] for key in texts if isinstance(model.get(key), str)}
    if model.get("flavor") in get_args(Flavor):
        values["flavor"] = model["flavor"]
    if model.get("prediction_type") in get_args(PredictionType):
        values["prediction_type"] = model["prediction_type"]
    return ModelSection(**values, without_t5=model.get("without_t5") is True)


def _section(layer: Layer, name: str) -> Mapping[str, Any]:
    values = layer.values.get(name)
    return values if isinstance(values, dict) else {}
