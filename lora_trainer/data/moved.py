"""Data that was copied to a folder of this machine, and is read there as if it were at its own place.

The copies lie below one folder by their whole paths: `/images/cat/1.png` is `FOLDER/images/cat/1.png`. So a run of them is
recorded and described with the places that its settings name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import known_as
from lora_trainer.data.images.remote import is_url

if TYPE_CHECKING:
    from lora_trainer.config.schema import SourceSection
    from lora_trainer.core.findings import Finding
    from lora_trainer.data.sample import Manifest

_folder: ContextVar[Path | None] = ContextVar("folder of copied data", default=None)


@contextmanager
def data_below(folder: Path | None) -> Iterator[None]:
    """Inside the block all data is read below this folder; with None at its own place."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def original_place(path: Path) -> Path:
    """The place that a copied file is a copy of; any other path as it is."""
    folder = _folder.get()
    if folder is None or not path.is_relative_to(folder):
        return path
    return Path(path.anchor, path.relative_to(folder))


def read_moved(
    sources: list[SourceSection], read: Callable[[list[SourceSection]], tuple[Manifest, tuple[Finding, ...]]]
) -> tuple[Manifest, tuple[Finding, ...]]:
    """What `read` makes of the sources where they are now, in words that name their own places."""
    folder = _folder.get()
    if folder is None:
        return read(sources)
    there = str(folder)

    def moved(place: str | None) -> str | None:
        if place is None or is_url(place) or place == "alpha":
            return place
        path = Path(place)
        return str(folder / path.relative_to(path.anchor))

    now = []
    for source in sources:
        changed: dict[str, Any] = {name: moved(getattr(source, name)) for name in ("path", "captions_file", "masks")}
        changed["control_images"] = tuple(moved(each) for each in source.control_images)
        now.append(source.model_copy(update=changed))
    with known_as({there: ""}):
        manifest, findings = read(now)
    notes = tuple(note.replace(there, "") for note in manifest.notes)
    own = (replace(each, message=each.message.replace(there, ""), fix=each.fix.replace(there, "")) for each in findings)
    return replace(manifest, notes=notes), tuple(own)
