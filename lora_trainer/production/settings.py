"""From what was asked to one config: the model that is named decides which family's presets stand below. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from lora_trainer.config.contradictions import from_user
from lora_trainer.config.imports.data_files import with_data_files
from lora_trainer.config.layers import Layer, Resolved, resolve, valid_settings
from lora_trainer.config.presets import family_layers
from lora_trainer.config.schema import Config
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.config.schema.types import Flavor
from lora_trainer.config.toml import EMPTY
from lora_trainer.core.errors import Problem, UsageError, known_as
from lora_trainer.models.attention.packages import lacking
from lora_trainer.models.family import USUAL_FAMILY
from lora_trainer.models.folder import detect_family
from lora_trainer.production.bases import base as bases
from lora_trainer.production.bases.names import as_hub_part

NAMED_THERE = ("path", "vae", "text_encoders")  # settings that may name a hub's


def settle(
    presets: Sequence[Layer],
    user: Sequence[Layer],
    problems: Iterable[Problem] = (),
    *,
    builtin_if_none: bool = True,
    say: Callable[[str], None] = bases.on_stderr,
) -> Resolved:
    """Family preset, presets and the user's layers (files, flags) as one config; later wins.

    Without a model the built-in base's preset applies, unless `builtin_if_none` is false.
    A model of a hub is held to the commit that it is at now. Raises UsageError with `problems` first and everything
    that is wrong in any layer.
    """
    found = list(problems)
    notes: list[str] = []
    user = with_data_files(user, found, notes)
    wrong = list(found)
    for layer in (*presets, *user):
        valid_settings(layer, wrong)
    # What is refused already asks no hub.
    family, held = _family_layers(user, found, say, builtin_if_none=builtin_if_none, refused=bool(wrong))
    resolved = resolve([*family, *presets, *user, *held], found)
    return replace(resolved, notes=(*notes, *resolved.notes))


def go_offline(config: Config) -> None:
    """From here on no library asks the network, when that is the wish."""
    if config.run.offline:
        bases.go_offline()


def refuse_missing_attention(resolved: Resolved) -> None:
    """Raise UsageError, before anything is loaded, for an attention that the user named and whose package is not here."""
    problem = lacking(resolved.config.hardware.attention_backend)
    if problem is not None and from_user(resolved.origin["hardware.attention_backend"]):
        raise UsageError(problem)


def _family_layers(
    user: Sequence[Layer],
    problems: list[Problem],
    say: Callable[[str], None],
    *,
    builtin_if_none: bool,
    refused: bool,
) -> tuple[list[Layer], list[Layer]]:
    """The family's presets, for the model that the user's layers name or for the built-in base; and what holds it."""
    model = _model_of(user)
    offline = [said for layer in user if (said := _section(layer, "run").get("offline")) is not None][-1:] == [True]
    asked = model.get("family", EMPTY)
    path = model.get("path")
    if path is None:
        if "revision" in model:
            message = f"model.revision = {model['revision']!r} is of a hub, and no model is named."
            problems.append(Problem(message, "Name the model as owner/name with --model, or remove model.revision."))
        usual = asked in (EMPTY, USUAL_FAMILY)
        return family_layers(USUAL_FAMILY if usual else str(asked), builtin=builtin_if_none and usual), []
    named = next(layer.name for layer in reversed(user) if "path" in _section(layer, "model"))
    origin = named if named == "--model" else f"model.path (from {named})"
    if offline:
        bases.go_offline()
    if refused and any(as_hub_part(str(model[name])) is not None for name in NAMED_THERE if name in model):
        return family_layers(str(asked), builtin=False), []
    family, commit = str(asked), None
    parts: Mapping[str, str] = {}
    try:
        base = bases.find_base(_plain_section(model), offline=offline, weights=False, origin=origin, say=say)
        with known_as(base.places):
            family, commit, parts = detect_family(base.folder, origin), base.commit, base.held
        if base.note:
            say(base.note)
        if asked not in (EMPTY, family):
            message = f"model.family={asked}, and {path} is a model of {family}."
            problems.append(Problem(message, f"Remove model.family, or check {origin}."))
    except UsageError as error:
        problems.extend(error.problems)
    held = commit or EMPTY
    now = model.get("revision") or EMPTY
    changed = any("revision" in _section(layer, "model") for layer in user) or commit is not None
    holding = {name: value for name, value in parts.items() if model.get(name) != value}
    if changed and now != held:
        holding["revision"] = held
    return family_layers(family, builtin=False), [Layer("commit of the model", {"model": holding})] if holding else []


def _model_of(user: Sequence[Layer]) -> dict[str, Any]:
    """What the layers say of the model, later wins, without what is empty; a revision is that of the path it came with."""
    model: dict[str, Any] = {}
    for layer in user:
        section = _section(layer, "model")
        if "path" in section:
            model.pop("revision", None)
        model.update(section)
    return {key: value for key, value in model.items() if value not in (None, EMPTY)}


def _plain_section(model: Mapping[str, Any]) -> ModelSection:
    """The same as a section; values of a wrong kind are left out here and refused with all the other settings."""
    texts = ("path", "revision", "vae", "text_encoders")
    values: dict[str, Any] = {key: model[key] for key in texts if isinstance(model.get(key), str)}
    if model.get("flavor") in get_args(Flavor):
        values["flavor"] = model["flavor"]
    return ModelSection(**values, without_t5=model.get("without_t5") is True)


def _section(layer: Layer, name: str) -> Mapping[str, Any]:
    values = layer.values.get(name)
    return values if isinstance(values, dict) else {}
