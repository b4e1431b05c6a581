"""Parts that replace or complete those of a base model: from this disk, or from a hub. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.folder import EXPECTED, named_parts, read_index, tokenizer_of
from lora_trainer.run.bases.hub_files import choose_parts, files_in, parts_of
from lora_trainer.run.bases.names import as_hub_part, local_path, page_of_the_web

if TYPE_CHECKING:  # every command imports this file; it is needed for checkpoints only
    from lora_trainer.config.schema.inputs import ModelSection
    from lora_trainer.models.single.stored import SingleFile


@dataclass(frozen=True)
class Replaced:
    """`parts` by component, None for omitted ones; `pinned` names those of a hub with their commits, by setting.

    Parts that are not `whole` have only their configs here.
    """

    parts: Mapping[str, Path | None] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True


@dataclass(frozen=True)
class _Found:
    """The path of a part that a setting names; for a hub's, its name with the commit."""

    path: Path
    pinned: str | None = None
    called: str = ""
    whole: bool = True


def find_parts(
    model: ModelSection,
    base: Path | SingleFile,
    places: dict[str, str],
    *,
    offline: bool,
    weights: bool,
    say: Callable[[str], None],
) -> Replaced:
    """The parts that replace the base model's own, or that it lacks. Adds their names to `places`.

    Raises UsageError, all problems at once.
    """
    if model.vae is None and model.text_encoders is None and not model.without_t5:
        return Replaced()
    from lora_trainer.models.single.fitting import find_text_parts, vae_folder
    from lora_trainer.models.single.lay_out import lacking_parts

    def find(setting: str, named: str, parts: tuple[str, ...]) -> Path:
        one = _find(f"model.{setting}", named, parts, offline=offline, weights=weights, say=say)
        if one.pinned is not None:
            pinned[setting] = one.pinned
            places[str(one.path)] = one.called
        wholes.append(one.whole)
        return one.path

    parts: dict[str, Path | None] = {}
    pinned: dict[str, str] = {}
    wholes: list[bool] = []
    problems: list[Problem] = []
    try:
        family = detect_family(base) if isinstance(base, Path) else base.family
        if model.without_t5:
            spare = FAMILIES[family].text.optional
            omitted = [part for name in spare for part in (name, tokenizer_of(name))]
            parts |= dict.fromkeys(named_parts(base, omitted) if isinstance(base, Path) else omitted)
        if model.text_encoders is not None:
            wanted = lacking_parts(base) - set(parts)
            named = find("text_encoders", model.text_encoders, tuple(sorted(wanted)))
            parts |= find_text_parts(named, wanted, family)
    except UsageError as error:
        problems.extend(error.problems)
    if model.vae is not None:
        try:
            parts["vae"] = vae_folder(find("vae", model.vae, ("vae",)))
        except UsageError as error:
            problems.extend(error.problems)
    if problems:
        raise UsageError(problems)
    return Replaced(parts, pinned, all(wholes))


def refuse_missing(base: Path, replaced: Collection[str]) -> None:
    """Raise one UsageError for all parts that a folder's index names, and that are neither there nor `replaced`."""
    wanted = set(parts_of(read_index(base))) - set(replaced)
    if lacking := choose_parts(files_in(base), wanted, weights=False).lacking:
        raise UsageError([Problem("model_part_invalid", f"{base / what}.", EXPECTED) for what in lacking])


def _find(
    origin: str, named: str, parts: tuple[str, ...], *, offline: bool, weights: bool, say: Callable[[str], None]
) -> _Found:
    """What a setting names: a path as it is, or the wanted parts of a hub's model. Raises UsageError."""
    if page := page_of_the_web(named, origin):
        raise UsageError(page)
    hub = as_hub_part(named, parts, origin)
    if hub is None:
        return _Found(local_path(named))
    if not parts:
        raise UsageError(
            Problem(
                "model_part_not_needed", f"{origin}: {named} is not needed: the model has its own.", f"Remove {origin}."
            )
        )
    from lora_trainer.run.bases.hub import find_snapshot

    found = find_snapshot(hub, weights=weights, without_t5=False, offline=offline, say=say)
    pinned = "/".join(filter(None, (f"{hub.name}@{found.commit}", hub.file)))
    return _Found(found.folder / hub.file if hub.file else found.folder, pinned, str(hub), found.whole)
