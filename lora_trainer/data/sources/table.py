"""A table as a source: the images that its rows name, relative to the table."""

from __future__ import annotations

import os
from pathlib import Path

from lora_trainer.data.sources.beside import NOTHING, TextFiles, read_beside, reader_of, texts_beside
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.listing import names_in
from lora_trainer.data.sources.metadata import FilesBelow, controls_in, table_or_finding

SHARES = ("//", "\\\\", "\\/", "/\\")  # of other machines: on Windows, opening one sends them the user's identity


def read_table_source(path: Path, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """Its rows in order. A row without a caption may have one beside its image."""
    table = table_or_finding(path, reading, request.columns)
    if table is None:
        reading.problem(f"{path} cannot be read as a table of images.", "Columns: file_name and text, as UTF-8.")
        return []
    files, texts = FilesBelow(path.parent), dict[Path, TextFiles]()
    found, elsewhere = [], []
    outside, impossible = 0, []
    for row in table.rows:
        if remote := [name for name in (row.name, *row.controls) if "://" in name or name.startswith(SHARES)]:
            elsewhere.append(remote[0])
            continue
        if unnamed := [name for name in (row.name, *row.controls) if not _possible(name)]:
            impossible.append(unnamed[0])
            continue
        image = files.find(path.parent, row.name)
        controls = controls_in(path.parent, row.controls, files)
        outside += not image.is_relative_to(path.parent)
        beside = NOTHING
        if row.text is None:
            folder = image.parent
            if folder not in texts:
                texts[folder] = texts_beside(names_in(folder), request)
            beside = read_beside(image, texts[folder].of.get(image.name, ()), reader_of(folder), request, reading)
        found.append(
            FoundImage(
                image,
                beside.caption if row.text is None else row.text,
                request.repeats(),
                beside.weight if row.weight is None else row.weight,
                instead=beside.instead,
                hint=beside.hint,
                controls=controls,
                caption_file=beside.file,
                damage=beside.damage,
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
