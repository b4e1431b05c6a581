"""A table as a source: the images that its rows name, relative to the table."""

from __future__ import annotations

import os
from pathlib import Path

from lora_trainer.data.sources.beside import caption_beside
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.metadata import controls_in, table_or_finding

SHARES = ("//", "\\\\", "\\/", "/\\")  # of other machines: on Windows, opening one sends them the user's identity


def read_table_source(path: Path, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """Its rows in order. A row without a caption may have one beside its image."""
    table = table_or_finding(path, reading, request.section.control_columns)
    if table is None:
        reading.problem(f"{path} cannot be read as a table of images.", "Columns: file_name and text, as UTF-8.")
        return []
    names: dict[str, frozenset[str]] = {}
    found, elsewhere = [], []
    outside, impossible = 0, []
    for row in table.rows:
        if remote := [name for name in (row.name, *row.controls) if "://" in name or name.startswith(SHARES)]:
            elsewhere.append(remote[0])
            continue
        if unnamed := [name for name in (row.name, *row.controls) if not _possible(name)]:
            impossible.append(unnamed[0])
            continue
        image = Path(os.path.normpath(os.path.join(path.parent, row.name.replace("\\", "/"))))
        controls = controls_in(path.parent, row.controls)
        outside += not image.is_relative_to(path.parent)
        folder = str(image.parent)
        if folder not in names:
            names[folder] = _names_of(folder)
        caption, instead = row.text, ""
        if caption is None:
            caption, instead = caption_beside(image, names[folder], request, reading)
        found.append(
            FoundImage(
                image,
                caption,
                request.repeats(),
                row.weight,
                instead=instead,
                controls=controls,
            )
        )
    if elsewhere:
        message = f"{path} names {len(elsewhere)} images by their address (first: {elsewhere[0]})."
        reading.problem(message, "Fetch them first: nothing is downloaded here.")
    elif not found:
        reading.problem(f"{path} names no image.", "Columns: file_name and text.")
    if impossible:
        message = f"names {len(impossible)} images as no file can be named (first: {impossible[0]!r:.80})."
        reading.find("absent_image", "warning", message, "Fix or remove the lines.", path)
    if outside:
        reading.note(f"{path.name}: {outside} of its {len(found)} images lie outside of its folder.")
    return found


def _possible(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair, from JSON
        return False


def _names_of(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()
