"""`check --clean-copy`: a cleaned copy of a dataset. The original is only read.

Only findings are fixed: files that cannot be trained on and duplicates are skipped, endings are
corrected, animations become their first frame, bars and narrow frames are cut off, captions in
other encodings become UTF-8. All else is copied byte for byte. Folders keep their names, and with
them their repeats.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.disk import what_helps
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import write_json
from lora_trainer.data.images.remote import shown_place
from lora_trainer.data.images.spans import open_bytes
from lora_trainer.data.manifest import request_source
from lora_trainer.data.sources.found import SourceReading, SourceRequest
from lora_trainer.data.sources.layout import kohya_name
from lora_trainer.data.sources.names import CLEAN_COPY_RECORD, MASK_LABEL, folded
from lora_trainer.data.sources.places import common_root, place_from, places_of
from lora_trainer.dataset_check.caption_checks import fix_garbled
from lora_trainer.dataset_check.data_report import SEVERITIES, DataReport
from lora_trainer.dataset_check.fixes import (
    CaptionFile,
    caption_file,
    fix_image,
    in_old_letters,
    right_ending,
)
from lora_trainer.dataset_check.score import ENOUGH_IMAGES

if TYPE_CHECKING:
    from lora_trainer.core.findings import Finding
    from lora_trainer.data.sample import Manifest, Sample
    from lora_trainer.data.views import Framing

METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class Fixed:
    """The result for one file: `copy` is its place in the new folder, None where it was skipped."""

    path: Path
    copy: str | None
    done: tuple[str, ...]


@dataclass(frozen=True)
class FixedCopy:
    """The new folder, where each source of the original lies in it, and what was done to each file."""

    folder: Path
    roots: tuple[Path, ...]
    files: tuple[Fixed, ...]


@dataclass(frozen=True)
class _Lot:
    """One source: names are kept below `base`, and it lies at `root` of the copy. A table names images elsewhere."""

    request: SourceRequest
    base: Path
    root: str
    table: bool

    @property
    def copy(self) -> str:
        """The `--data` value that trains the copy."""
        return f"{self.root}/{METADATA}" if self.table else self.root


def write_fixed(
    report: DataReport,
    manifest: Manifest,
    sources: Sequence[SourceSection],
    framings: Sequence[Framing],
    target: Path,
    captions: CaptionsSection | None = None,
) -> FixedCopy:
    """Write the copy, whole or not at all. `captions` are for sources without their own, as in `read_manifest`.

    Raises UsageError for a folder that is not empty or lies in the data or around it, for a copy
    without images, and where it cannot be written.
    """
    target = Path(os.path.abspath(target))
    request = [request_source(number, source, captions or CaptionsSection()) for number, source in enumerate(sources)]
    places = [places_of(each, SourceReading()) for each in request]
    images = {sample.path for sample in manifest.samples if sample.span is None}
    if problems := place_problems(target, [place for several in places for place in several], images):
        raise UsageError(problems)
    left_out = what_to_leave_out(report, manifest)
    if all(sample.path in left_out for sample in manifest.samples):
        raise UsageError(
            Problem("no_usable_image", "No image of the data would be left.", "Fix or replace the images.")
        )
    lots = _lots(request, places, manifest)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".part", dir=target.parent) as scratch:
            whole = Path(scratch) / "copy"
            files = _Writer(report, lots, framings, whole).write(manifest.samples, left_out)
            # Files with a finding that are no samples are not copied either.
            samples = {sample.path for sample in manifest.samples}
            others = ((path, found) for path, found in report.files.items() if path not in samples and found)
            worst = {path: min(found, key=lambda each: SEVERITIES.index(each.severity)) for path, found in others}
            files += [Fixed(path, None, (f"skipped: {each.message}",)) for path, each in worst.items()]
            named = {str(place_from(lot.request.section.path)): lot.copy for lot in lots}
            rows = [{"path": str(each.path), "copy": each.copy, "done": list(each.done)} for each in files]
            write_json(whole / CLEAN_COPY_RECORD, {"sources": named, "files": rows})
            if target.exists():
                target.rmdir()
            os.replace(whole, target)
    except OSError as error:
        message = f"The copy cannot be written to {target} ({(error.strerror or str(error)).lower()})."
        raise UsageError(
            Problem("copy_not_written", message, f"{what_helps(error)}, or name another folder with --clean-copy.")
        ) from error
    return FixedCopy(target, tuple(target / lot.copy for lot in lots), tuple(files))


def place_problems(target: Path, places: Sequence[Path], images: Iterable[Path] = ()) -> list[Problem]:
    """Why a copy should not be written there: in the data, around it, or over something else."""
    real = target.resolve()
    elsewhere = "Name a folder elsewhere with --clean-copy."
    for place in places:
        there = place.resolve()
        if real.is_relative_to(there) or there.is_relative_to(real):
            return [Problem("output_inside_data", f"{target} lies in the data or around it ({place}).", elsewhere)]
    if any(image.is_relative_to(real) for image in images):  # those of a table lie anywhere
        return [Problem("output_has_images", f"{target} holds images of the data.", elsewhere)]
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        return [Problem("output_not_empty", f"{target} is not an empty folder.", "Name a new one with --clean-copy.")]
    return []


def _lots(request: Sequence[SourceRequest], places: Sequence[Sequence[Path]], manifest: Manifest) -> list[_Lot]:
    """The folder of each source in the copy. One folder is the copy itself, unless its name holds repeats; sources of
    the same images with other captions get folders of their own."""
    keys = [
        (each.section.path, each.section.captions_file, each.section.default_caption, each.captions) for each in request
    ]
    first = [keys.index(key) for key in keys]
    elsewhere = _tables(places, manifest)
    lots: list[_Lot] = []
    names: set[str] = set()
    for number, several in enumerate(places):
        base, outer = common_root(several), shown_place(several[0])
        name = outer.name if several[0].is_dir() else outer.stem
        root, count = name, 2
        while root.casefold() in names and first[number] == number:
            root, count = f"{count}/{name}", count + 1
        if len(set(first)) == 1 and kohya_name(name) is None:
            root = "."
        if first[number] != number:
            root = lots[first[number]].root
        names.add(root.casefold())
        lots.append(_Lot(request[number], base, root, number in elsewhere))
    return lots


def _tables(places: Sequence[Sequence[Path]], manifest: Manifest) -> set[int]:
    """The sources that are files and whose images lie outside of them."""
    files = {number: several[0] for number, several in enumerate(places) if len(several) == 1 and several[0].is_file()}
    return {
        sample.source
        for sample in manifest.samples
        if sample.source in files and sample.span is None and sample.path != files[sample.source]
    }


def what_to_leave_out(report: DataReport, manifest: Manifest) -> dict[Path, str]:
    """Files that are not copied, with the reason: what cannot be trained on, and all but the best that look the same."""
    reasons: dict[Path, str] = {}
    samples = {sample.path: sample for sample in manifest.samples}
    for path, found in report.files.items():
        errors = [each for each in found if each.severity == "error" and each.code != "unreadable_caption"]
        if errors:
            reasons[path] = errors[0].message
        elif any(each.code == "unreadable_caption" for each in found):
            file = samples[path].caption_file if path in samples else ""
            if not file or not in_old_letters(path.with_name(file)).strip():
                reasons[path] = "its caption cannot be read."
    left = {sample.content for sample in manifest.samples if sample.path not in reasons and not sample.regularization}
    for group in report.groups:
        usable = [samples[path] for path in group if path in samples and path not in reasons]
        usable.sort(key=lambda sample: _worth(sample, report.files.get(sample.path, ())), reverse=True)
        kept: dict[str, Path] = {}
        for sample in usable:
            spare = sample.content in kept or len(left) > ENOUGH_IMAGES or sample.regularization
            if kept and spare:
                same = kept.get(sample.content)
                reason = "looks the same as" if same is None else "is a copy of"
                reasons[sample.path] = f"{reason} {report.name_of(same or usable[0].path)}."
                left -= {sample.content} - kept.keys()
            else:
                kept[sample.content] = sample.path
    return reasons


def _worth(sample: Sample, found: Sequence[Finding]) -> tuple[bool, bool, int, int]:
    """Which of several that look the same is kept: no regularization, with a caption, the fewest warnings, the largest."""
    warnings = sum(each.severity == "warning" and "duplicate" not in each.code for each in found)
    return (not sample.regularization, bool(sample.caption), -warnings, sample.width * sample.height)


class _Writer:
    """Copies the samples into a new folder."""

    def __init__(self, report: DataReport, lots: Sequence[_Lot], framings: Sequence[Framing], target: Path) -> None:
        self.report, self.lots, self.framings, self.target = report, lots, framings, target
        self.taken: set[str] = set()
        self.rows: dict[str, list[str]] = {}

    def write(self, samples: Sequence[Sample], left_out: Mapping[Path, str]) -> list[Fixed]:
        files: dict[tuple[str, Path], Fixed] = {}
        for sample in samples:
            key = self.lots[sample.source].root, sample.path
            if sample.path in left_out:
                files[key] = Fixed(sample.path, None, (f"skipped: {left_out[sample.path]}",))
            elif key not in files:
                files[key] = self._sample(sample)
            elif self.lots[sample.source].table:  # another caption of the same image
                done = self._caption(sample, files[key].copy or "", self._codes(sample))
                files[key] = replace(files[key], done=tuple(dict.fromkeys((*files[key].done, *done))))
        for root, rows in self.rows.items():
            (self.target / root).mkdir(parents=True, exist_ok=True)
            (self.target / root / METADATA).write_text("".join(rows), encoding="utf-8")
        return list(files.values())

    def _codes(self, sample: Sample) -> set[str]:
        """The codes of its findings, which are fixed."""
        notes = ("animated", "wrong_ending")
        return {each.code for each in self.report.files[sample.path] if each.severity != "note" or each.code in notes}

    def _sample(self, sample: Sample) -> Fixed:
        codes = self._codes(sample)
        data, done = fix_image(sample, codes, self.report.borders.get(sample.path), self.framings[sample.source])
        name = self._name(sample, ".png" if data is not None else right_ending(sample, codes))
        if data is None and Path(name).name != sample.path.name:
            done.append(f"renamed to {Path(name).name}")
        place = self.target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if data is not None:
            place.write_bytes(data)
        else:
            with open_bytes(sample.path, sample.span) as original, open(place, "wb") as copy:
                shutil.copyfileobj(original, copy)
        done += self._caption(sample, name, codes)
        done += self._mask(sample, name)
        return Fixed(sample.path, name, tuple(done))

    def _name(self, sample: Sample, ending: str) -> str:
        """Its place below the new folder, as below its source; another number where an image there has it, whose caption
        would be the same file."""
        lot = self.lots[sample.source]
        outer = lot.base.parent if lot.table else lot.base
        try:
            below = os.path.relpath(sample.path, outer) if sample.path != lot.base else sample.path.name
        except ValueError:  # on another drive
            below = sample.path.name
        parts = [part for part in Path(below).parts if part not in ("..", os.sep)]
        stem = Path(lot.root, *parts).with_suffix("").as_posix()
        free, number = stem, 2
        while folded(free) in self.taken:
            free, number = f"{stem}-{number}", number + 1
        self.taken.add(folded(free))
        return free + ending

    def _caption(self, sample: Sample, name: str, codes: set[str]) -> list[str]:
        """In a file beside the image where it came from one, else in metadata.jsonl; nowhere where it is the folder's
        name. The rows of a table stay rows."""
        lot = self.lots[sample.source]
        text, done = sample.caption, []
        file = caption_file(sample, lot.request, codes)
        plain = name.encode("utf-8", "ignore").decode("utf-8") == name
        if file is None and "garbled_caption" in codes and fix_garbled(text) != text:
            text, done = fix_garbled(text), ["garbled letters of the caption fixed"]
        if file is None and not plain:
            file = CaptionFile(lot.request.ending or ".txt", text.encode("utf-8"), tuple(done))
        if file is not None:
            (self.target / name).with_suffix(file.ending).write_bytes(file.data)
            done = list(file.done)
        row: dict[str, object] = {"file_name": Path(name).relative_to(lot.root).as_posix()}
        if file is None and text and (lot.table or text != _kohya_caption(name)):
            row[lot.request.columns.captions[0]] = text
        # Without the source's weight, which is not written into the copy.
        shared = lot.request.section.loss_weight
        weight = float(f"{sample.weight / shared:.12g}") if shared else 1.0
        if weight != 1.0:
            row["weight"] = weight
        if len(row) > 1 or lot.table:
            self.rows.setdefault(lot.root, []).append(json.dumps(row, ensure_ascii=False) + "\n")
        return done

    def _mask(self, sample: Sample, name: str) -> list[str]:
        """A mask beside its image is copied with it; a folder of masks stays where it is."""
        mask = sample.mask
        if mask is None or mask.path is None or mask.path.parent != sample.path.parent:
            return []
        renamed = f"{Path(name).stem}{MASK_LABEL}{mask.path.suffix}"
        with open_bytes(mask.path, mask.span) as original, open((self.target / name).with_name(renamed), "wb") as copy:
            shutil.copyfileobj(original, copy)
        return []


def _kohya_caption(name: str) -> str | None:
    for part in reversed(Path(name).parent.parts):
        if (kohya := kohya_name(part)) is not None:
            return kohya[1]
    return None
