"""A table as a source: the images that its rows name, relative to the table."""

from __future__ import annotations

import os
from pathlib import Path

from lora_trainer.data.sources.beside import (
    NOTHING,
    TextFiles,
    find_other_caption,
    read_beside,
    reader_of,
    texts_beside,
)
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.listing import names_in
from lora_trainer.data.sources.metadata import FilesBelow, controls_in, note_moved, table_or_finding

SHARES = ("//", "\\\\", "\\/", "/\\")  # of other machines: on Windows, opening one sends them the user's identity

TABLE_FIX = (
    "It needs the columns file_name and text, as UTF-8. Images named by their address are fetched first: img2dataset reads"
    " such tables and writes tars."
)


def read_table_source(path: Path, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """Its rows in order. A row without a caption may have one beside its image."""
    table = table_or_finding(path, reading, request.columns)
    if table is None:
        reading.problem(f"{path} {reading.findings[-1].message}", TABLE_FIX)
        return []
    below, texts = FilesBelow(path.parent), dict[Path, TextFiles]()
    names = (name for row in table.rows for name in (row.name, *row.controls))
    below.compare(path.parent, (name for name in names if _possible(name) and not name.startswith(SHARES)))
    found, elsewhere = [], []
    outside, impossible = 0, []
    for row in table.rows:
        if remote := [name for name in (row.name, *row.controls) if "://" in name or name.startswith(SHARES)]:
            elsewhere.append(remote[0])
            continue
        if unnamed := [name for name in (row.name, *row.controls) if not _possible(name)]:
            impossible.append(unnamed[0])
            continue
        image = below.find(path.parent, row.name)
        controls = controls_in(path.parent, row.controls, below)
        outside += not image.is_relative_to(path.parent)
        folder = image.parent
        if folder not in texts:
            texts[folder] = texts_beside(names_in(folder), request)
        files = texts[folder].of.get(image.name, ())
        beside = NOTHING
        if row.text is None:
            beside = read_beside(image, files, reader_of(folder), request, reading)
        elif files and files[0].is_caption:
            # It is not used, so that what is wrong with it is none of the data's.
            other = read_beside(image, files, reader_of(folder), request, SourceReading()).caption
            find_other_caption(image, path.name, row.text, files[0].name, other, reading)
        found.append(
            FoundImage(
                image,
                beside.caption if row.text is None else row.text,
                request.repeats(),
                beside.weight if row.weight is None else row.weight,
                instead=beside.instead,
                hint=beside.hint or row.hint,
                controls=controls,
                caption_file=beside.file,
                damage=beside.damage,
            )
        )
    if elsewhere:
        message = f"{path} names {len(elsewhere)} images by their address (first: {elsewhere[0]})."
        reading.problem(message, "Fetch them first: nothing is downloaded here.")
    elif not found:
        reading.problem(f"{path} names no image.", TABLE_FIX)
    if impossible:
        message = f"names {len(impossible)} images as no file can be named (first: {impossible[0]!r:.80})."
        reading.find("absent_image", "warning", message, "Fix or remove the lines.", path)
    note_moved(path, sum(len(names) == 1 for names in below.moved.values()), reading)
    if outside:
        reading.note(f"{path.name}: {outside} of its {len(found)} images lie outside of its folder.")
    return found


def _possible(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair, from JSON
        return False
