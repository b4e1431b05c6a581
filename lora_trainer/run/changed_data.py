"""`images.csv`: the images that a run was started with, so that a resumed one can name those that have changed. No torch."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.disk import write_with_retry
from lora_trainer.core.io import atomic_path

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample

FILE = "images.csv"
HEADER = ("image", "content", "caption", "all")  # its name, and hashes
MOST_NAMED = 3
OTHER = "repeats, weight or mask"


def rows_of(samples: Sequence[Sample]) -> Iterator[tuple[str, str, str, str]]:
    for sample in samples:
        caption = hashlib.sha256(sample.caption.encode("utf-8", "backslashreplace")).hexdigest()[:16]
        whole = hashlib.sha256(json.dumps(sample.facts).encode("ascii")).hexdigest()[:16]
        yield str(sample.path), sample.content[:16], caption, whole


def write_images(folder: Path, samples: Sequence[Sample]) -> None:
    """Write them, waiting where the disk refuses."""

    def write() -> None:
        with (
            atomic_path(folder / FILE) as path,
            open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file,
        ):
            table = csv.writer(file, lineterminator="\n")
            table.writerow(HEADER)
            table.writerows(rows_of(samples))

    write_with_retry(FILE, folder, write)


def changed_images(folder: Path, samples: Sequence[Sample]) -> str:
    """`a.png (caption), b.png (new) and 4 more`; empty where nothing differs or the list cannot be read."""
    try:
        with open(folder / FILE, encoding="utf-8", newline="") as file:
            before = {row[0]: tuple(row[1:4]) for row in list(csv.reader(file))[1:] if len(row) == len(HEADER)}
    except (OSError, ValueError, csv.Error):
        return ""
    known, found = {row[2] for row in before.values()}, list[str]()
    now = {name: (content, caption, whole) for name, content, caption, whole in rows_of(samples)}
    kept = {row[2] for row in now.values()}
    # By file names: the folder may be another one now.
    gone = {Path(name).name: row for name, row in before.items() if row[2] not in kept and name not in now}
    for name, row in now.items():
        if row[2] in known:  # wherever it is now
            continue
        old = before.get(name) or gone.pop(Path(name).name, None)
        if old is None:
            what = "new"
        elif old[0] != row[0]:
            what = "image"
        else:
            what = "caption" if old[1] != row[1] else OTHER
        found.append(f"{Path(name).name} ({what})")
    found += [f"{name} (gone)" for name in gone]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more
