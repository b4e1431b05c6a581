"""A dataset copied as plain files that may be edited: images, captions as .txt, masks, and settings without commands.

It is the process of a task: it says on its standard error how far it is, and is whole or not there at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w

from lora_trainer.core.errors import DONE, WRONG_USAGE, Problem, UsageError, UserError
from lora_trainer.core.io import remove_abandoned, write_text
from lora_trainer.data.images.spans import open_bytes
from lora_trainer.data.sample import Sample, Span
from lora_trainer.data.sources.layout import kohya_name
from lora_trainer.data.sources.names import MASK_LABEL, SETTINGS_FILE, folded
from lora_trainer.jobs.folders import THE_BATCH_DECIDES, folder_values
from lora_trainer.run.inputs import data_in_use
from lora_trainer.web.dataset_reader import DatasetReading, read_samples

SAY_SECONDS = 0.5
A_WEEK = 604_800.0
STOPPED = 143


def copy_dataset(path: str, target: Path, roots: Sequence[Path]) -> dict[str, Any]:
    """Copy a dataset; what was copied. Raises UserError for one that cannot be read, and OSError."""
    with data_in_use():
        found = read_samples(path, roots, watch("reading"))
        samples = [each for each in found.manifest.samples if found.around.holds(each)]
        if not samples:
            raise UsageError(
                Problem("no_usable_image", "The dataset has no image that can be copied.", "Check it first.")
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent, A_WEEK)  # of copies that were killed
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".part", dir=target.parent) as scratch:
            whole = Path(scratch) / "copy"
            controls = Path(scratch) / "controls"
            writer = CopyWriter(found, whole, controls)
            say = watch("copied")
            for number, sample in enumerate(samples):
                writer.write(sample)
                say(number + 1, len(samples))
            if found.around.is_inside(os.path.join(path, SETTINGS_FILE)):
                values = {
                    section: dict(of) for section, of in folder_values(Path(path)).items() if isinstance(of, Mapping)
                }
                for section, key in THE_BATCH_DECIDES:  # commands, places of its own, trackers
                    values.get(section, {}).pop(key, None)
                if any(values.values()):
                    write_text(whole / SETTINGS_FILE, tomli_w.dumps({name: of for name, of in values.items() if of}))
            places = {place: target.with_name(f"{target.name}-{place.name}") for place in sorted(controls.glob("*"))}
            if taken := next((each for each in (target, *places.values()) if os.path.lexists(each)), None):
                raise UsageError(
                    Problem("name_taken", f"There is a dataset {taken.name} already.", "Choose another name.")
                )
            for place, end in {whole: target, **places}.items():
                os.rename(place, end)
    document: dict[str, Any] = {"path": str(target), "images": len(samples), "captions": writer.captions}
    return {**document, "masks": writer.masks, "controls": writer.controls_written}


class CopyWriter:
    """Writes samples below `target`, folders as they are in the dataset, and their control images below `controls`."""

    def __init__(self, found: DatasetReading, target: Path, controls: Path) -> None:
        self.found, self.target, self.controls = found, target, controls
        self.taken: set[str] = set()
        self.captions = self.masks = self.controls_written = 0

    def write(self, sample: Sample) -> None:
        place = self.target / self._name(sample)
        place.parent.mkdir(parents=True, exist_ok=True)
        copy_bytes(sample.path, sample.span, place)
        # A folder's name stays, and with it the captions that are in it.
        folders = place.parent.relative_to(self.target).parts
        if sample.caption and (sample.own_caption or all(kohya_name(each) is None for each in folders)):
            place.with_suffix(".txt").write_text(sample.caption + "\n", encoding="utf-8")
            self.captions += 1
        mask = sample.mask.path if sample.mask is not None else self.found.around.mask_beside(sample.path)
        if mask is not None and self.found.around.is_inside(str(mask)):
            copy_bytes(mask, None if sample.mask is None else sample.mask.span, masked(place, mask.suffix))
            self.masks += 1
        for number, control in enumerate(sample.controls, 1):
            if control.span is not None or self.found.around.is_inside(str(control.path)):
                folder = self.controls / f"control{'' if number == 1 else f'-{number}'}"
                to = folder / place.relative_to(self.target).with_suffix(control.path.suffix)
                to.parent.mkdir(parents=True, exist_ok=True)
                copy_bytes(control.path, control.span, to)
                self.controls_written += 1

    def _name(self, sample: Sample) -> str:
        """Its place in the copy: as in the dataset, below its source where there are several; no two share a caption."""
        base, sources = self.found.bases[sample.source], self.found.bases
        below = sample.path.relative_to(base) if sample.path.is_relative_to(base) else Path(sample.path.name)
        parts = [part for part in below.parts if part != ".."]
        repeats = self.found.sources[sample.source].repeats
        name = base.stem if base.is_file() else base.name
        if repeats is not None and repeats >= 1 and repeats == int(repeats) and (repeats != 1 or len(sources) > 1):
            kohya = kohya_name(name)
            parts.insert(0, f"{int(repeats)}_{name if kohya is None else kohya[1]}")
        elif len(sources) > 1 or kohya_name(name) is not None:
            parts.insert(0, name)
        path, number = Path(*parts), 2
        while folded(path.with_suffix("").as_posix()) in self.taken:
            path, number = Path(*parts).with_stem(f"{Path(*parts).stem}-{number}"), number + 1
        self.taken.add(folded(path.with_suffix("").as_posix()))
        return str(path)


def masked(image: Path, ending: str) -> Path:
    return image.with_name(f"{image.stem}{MASK_LABEL}{ending}")


def copy_bytes(path: Path, span: Span | None, to: Path) -> None:
    with open_bytes(path, span) as original, open(to, "xb") as copy:
        shutil.copyfileobj(original, copy)


def watch(word: str) -> Any:
    """Says now and then how far something is."""
    last = 0.0

    def say(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > SAY_SECONDS or done == total:
            last = time.monotonic()
            sys.stderr.write(f"{word} {done:,} of {total:,}\n")

    return say


def main() -> int:
    """Copy the dataset that the arguments name; the document is on the standard output."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(STOPPED)  # what was begun is removed

    signal.signal(signal.SIGTERM, stop)
    path, target, *roots = sys.argv[1:]
    try:
        document = copy_dataset(path, Path(target), [Path(root) for root in roots])
    except UserError as error:
        sys.stderr.write("".join(f"error: {each}\n" for each in error.problems))
        return WRONG_USAGE
    except OSError as error:
        sys.stderr.write(f"error: The copy cannot be written: {(error.strerror or str(error)).lower()}.\n")
        return WRONG_USAGE
    sys.stdout.write(json.dumps(document) + "\n")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
