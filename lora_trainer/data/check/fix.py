"""`check --fix`: a cleaned copy of a data set. The original is only read.

Only what a finding says is changed: what cannot be trained on and what is there twice is
left out, endings are put right, animations become their first frame, borders are cut off,
captions become clean UTF-8. All other pictures are copied byte for byte. Folders keep
their names, and with them their repeats.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import Finding
from lora_trainer.core.io import write_json
from lora_trainer.data.check.captions import mended
from lora_trainer.data.check.report import DataReport
from lora_trainer.data.check.score import ENOUGH_PICTURES
from lora_trainer.data.pictures.images import (
    ENDINGS_OF_FORMAT,
    TURNS,
    BrokenPictureError,
    header_of,
    opened,
    orientation_of,
    to_rgb,
)
from lora_trainer.data.pictures.measures import SMALL_SIDE, Borders
from lora_trainer.data.pictures.spans import open_bytes
from lora_trainer.data.sample import Manifest, Sample
from lora_trainer.data.sources.beside import CAPTION_ENDINGS
from lora_trainer.data.sources.folder import KOHYA_FOLDER
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES, TextError, read_bounded
from lora_trainer.data.views import Framing, plain_fits

RECORD = "fixed.json"
METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class Fixed:
    """What became of one file: `copy` is its place in the new folder, None where it was left out."""

    path: Path
    copy: str | None
    done: tuple[str, ...]


@dataclass(frozen=True)
class FixedCopy:
    """The new folder, where each source of the original lies in it, and what was done to each file."""

    folder: Path
    roots: tuple[Path, ...]
    files: tuple[Fixed, ...]


def write_fixed(
    report: DataReport, manifest: Manifest, sources: Sequence[Path], framings: Sequence[Framing], target: Path
) -> FixedCopy:
    """Write the copy; it is there whole or not at all.

    Raises UsageError for a folder that is not empty or lies in the data or around it, where nothing
    would be left, and where it cannot be written.
    """
    target = Path(os.path.abspath(target))
    _check_place(target, sources)
    left_out = what_to_leave_out(report, manifest)
    if all(sample.path in left_out for sample in manifest.samples):
        raise UsageError(Problem("No picture of the data would be left.", "Mend or replace the pictures."))
    roots = _roots(sources)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".part", dir=target.parent) as scratch:
            whole = Path(scratch) / "copy"
            files = _Writer(report, sources, roots, framings, whole).write(manifest.samples, left_out)
            files += [Fixed(path, None, ("left out: not a sample",)) for path in _others(report, manifest, left_out)]
            _write_record(whole, sources, roots, files)
            if target.exists():
                target.rmdir()
            os.replace(whole, target)
    except OSError as error:
        message = f"The copy cannot be written to {target} ({(error.strerror or str(error)).lower()})."
        raise UsageError(Problem(message, "Free some space or name another folder with --fix.")) from error
    return FixedCopy(target, tuple(target / root for root in roots), tuple(files))


def _check_place(target: Path, sources: Sequence[Path]) -> None:
    real = target.resolve()
    for source in sources:
        there = source.resolve()
        if real.is_relative_to(there) or there.is_relative_to(real):
            message = f"{target} lies in the data or around it ({source})."
            raise UsageError(Problem(message, "Name a folder elsewhere with --fix."))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(Problem(f"{target} is not an empty folder.", "Name a new one with --fix."))


def _roots(sources: Sequence[Path]) -> list[str]:
    """Where each source lies in the copy. One folder is the copy itself, unless its name says its repeats."""
    if len(set(sources)) == 1 and not KOHYA_FOLDER.fullmatch(sources[0].name):
        return ["."] * len(sources)
    named: dict[Path, str] = {}
    for source in sources:
        name = source.name if source.is_dir() else source.stem
        while source not in named and name in named.values():
            name += "_"
        named.setdefault(source, name)
    return [named[source] for source in sources]


def what_to_leave_out(report: DataReport, manifest: Manifest) -> dict[Path, str]:
    """Files that are not copied, with the reason: what cannot be trained on, and all but the best that look the same."""
    reasons: dict[Path, str] = {}
    for path, found in report.files.items():
        errors = [each for each in found if each.severity == "error" and each.code != "unreadable_caption"]
        if errors:
            reasons[path] = errors[0].message
        elif any(each.code == "unreadable_caption" for each in found) and not caption_in_old_letters(path):
            reasons[path] = "its caption cannot be read."
    samples = {sample.path: sample for sample in manifest.samples}
    left = {sample.content for sample in manifest.samples if sample.path not in reasons and not sample.regularisation}
    for group in report.groups:
        usable = [samples[path] for path in group if path in samples and path not in reasons]
        usable.sort(key=lambda sample: _worth(sample, report.files.get(sample.path, ())), reverse=True)
        kept: set[str] = set()
        for sample in usable:
            spare = sample.content in kept or len(left) > ENOUGH_PICTURES or sample.regularisation
            if kept and spare:
                reasons[sample.path] = f"looks the same as {report.name_of(usable[0].path)}."
                left -= {sample.content} - kept
            else:
                kept.add(sample.content)
    return reasons


def _worth(sample: Sample, found: Sequence[Finding]) -> tuple[bool, int, int]:
    """Which of several that look the same is kept: what is learned, the fewest warnings, the largest."""
    warnings = sum(each.severity == "warning" and "duplicate" not in each.code for each in found)
    return (not sample.regularisation, -warnings, sample.width * sample.height)


def _others(report: DataReport, manifest: Manifest, left_out: Mapping[Path, str]) -> list[Path]:
    """Files with a finding that are no samples: they are not copied either."""
    samples = {sample.path for sample in manifest.samples}
    return [path for path in report.files if path not in samples]


class _Writer:
    """Copies the samples into a new folder."""

    def __init__(
        self,
        report: DataReport,
        sources: Sequence[Path],
        roots: Sequence[str],
        framings: Sequence[Framing],
        target: Path,
    ) -> None:
        self.report, self.sources, self.roots, self.framings, self.target = report, sources, roots, framings, target
        self.taken: set[str] = set()
        self.rows: dict[str, list[str]] = {}

    def write(self, samples: Sequence[Sample], left_out: Mapping[Path, str]) -> list[Fixed]:
        files: dict[Path, Fixed] = {}
        for sample in samples:
            if sample.path in files:  # the same picture in another source
                continue
            if sample.path in left_out:
                files[sample.path] = Fixed(sample.path, None, (f"left out: {left_out[sample.path]}",))
            else:
                files[sample.path] = self._sample(sample)
        for root, rows in self.rows.items():
            (self.target / root).mkdir(parents=True, exist_ok=True)
            (self.target / root / METADATA).write_text("".join(rows), encoding="utf-8")
        return list(files.values())

    def _sample(self, sample: Sample) -> Fixed:
        codes = {each.code for each in self.report.files.get(sample.path, ()) if each.severity != "note"}
        codes |= {each.code for each in self.report.files[sample.path] if each.code in ("animated", "wrong_ending")}
        data, done = mended_picture(sample, codes, self.report.borders.get(sample.path), self.framings[sample.source])
        name = self._name(sample, ".png" if data is not None else _right_ending(sample, codes))
        if data is None and Path(name).suffix != sample.path.suffix:
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
        """Its place below the new folder, as below its source; another number where it is taken."""
        source, root = self.sources[sample.source], self.roots[sample.source]
        below = os.path.relpath(sample.path, source) if sample.path != source else sample.path.name
        parts = [part for part in Path(below).parts if part not in ("..", os.sep)]
        stem = Path(root, *parts).with_suffix("").as_posix()
        name, number = stem + ending, 2
        while name.casefold() in self.taken:
            name, number = f"{stem}-{number}{ending}", number + 1
        self.taken.add(name.casefold())
        return name

    def _caption(self, sample: Sample, name: str, codes: set[str]) -> list[str]:
        """Beside the picture where it stood there, else in metadata.jsonl; nowhere where the folder's name says it."""
        done = []
        text = sample.caption
        if "unreadable_caption" in codes:
            text = caption_in_old_letters(sample.path)
            done.append("caption written as UTF-8")
        if mended(text) != text:
            text = mended(text)
            done.append("garbled letters of the caption put right")
        stood = beside(sample.path)
        plain = name.encode("utf-8", "ignore").decode("utf-8") == name
        if stood is not None or not plain:
            ending = ".txt" if stood is None else stood.suffix.lower()
            (self.target / name).with_suffix(ending).write_text(text + "\n", encoding="utf-8")
            if stood is not None and not done and _bytes_of(stood).strip() != text.encode("utf-8"):
                done.append("caption cleaned")
        if (stood is None and plain and text and text != _kohya_caption(name)) or sample.weight != 1.0:
            root = self.roots[sample.source]
            row = {"file_name": Path(name).relative_to(root).as_posix(), "text": text}
            row |= {"weight": sample.weight} if sample.weight != 1.0 else {}  # type: ignore[dict-item]
            self.rows.setdefault(root, []).append(json.dumps(row, ensure_ascii=False) + "\n")
        return done

    def _mask(self, sample: Sample, name: str) -> list[str]:
        """A mask that lies beside its picture goes with it; a folder of masks stays where it is."""
        mask = sample.mask
        if mask is None or mask.path is None or mask.path.parent != sample.path.parent:
            return []
        renamed = mask.path.stem.replace(sample.path.stem, Path(name).stem, 1) + mask.path.suffix
        with open_bytes(mask.path, mask.span) as original, open((self.target / name).with_name(renamed), "wb") as copy:
            shutil.copyfileobj(original, copy)
        return []


def mended_picture(
    sample: Sample, codes: set[str], borders: Borders | None, framing: Framing
) -> tuple[bytes | None, list[str]]:
    """(the picture as PNG, what was done to it), None where its bytes are good as they are."""
    animated = "animated" in codes
    cut = "border" in codes and borders is not None and sample.mask is None
    if not animated and not cut:
        return None, []
    try:
        with opened(sample.path, sample.span) as picture:
            turn = None if picture.format == "TIFF" else TURNS.get(orientation_of(picture))
            picture.load()
            flat = picture.convert("RGBA") if picture.has_transparency_data else to_rgb(picture)
    except BrokenPictureError as error:
        raise OSError(None, f"{sample.path} {error.message}") from error
    flat = flat.transpose(turn) if turn is not None else flat
    done = ["first frame taken"] if animated else []
    if cut and borders is not None:
        box = _inside(flat.size, borders)
        if _still_large(box, sample, framing):
            flat = flat.crop(box)
            done.append(f"border cut off: {flat.width}×{flat.height} left")
        elif not animated:
            return None, ["border left: the rest would be too small"]
    file = io.BytesIO()
    flat.save(file, "PNG")
    return file.getvalue(), done


def _inside(size: tuple[int, int], borders: Borders) -> tuple[int, int, int, int]:
    """The box inside of the borders; they were measured in a smaller copy, so a line of it more is cut off."""
    width, height = size
    line = max(1, -(-max(size) // SMALL_SIDE))
    left, right = (math.ceil(share * width) + line if share else 0 for share in (borders.left, borders.right))
    top, bottom = (math.ceil(share * height) + line if share else 0 for share in (borders.top, borders.bottom))
    return left, top, width - right, height - bottom


def _still_large(box: tuple[int, int, int, int], sample: Sample, framing: Framing) -> bool:
    """Whether what is left need not be enlarged, or no more than the whole."""

    def factor(width: int, height: int) -> float:
        return plain_fits(width, height, framing)[0].scale_from(width, height)

    width, height = box[2] - box[0], box[3] - box[1]
    return min(width, height) > 0 and factor(width, height) <= max(1.0, factor(sample.width, sample.height))


def _right_ending(sample: Sample, codes: set[str]) -> str:
    if "wrong_ending" not in codes:
        return sample.path.suffix
    try:
        return ENDINGS_OF_FORMAT[header_of(sample.path, sample.span).format][0]
    except (BrokenPictureError, KeyError):
        return sample.path.suffix


def beside(picture: Path) -> Path | None:
    """The caption file beside a picture, where there is one."""
    for ending in CAPTION_ENDINGS:
        for place in (picture.with_suffix(ending), picture.with_suffix(ending.upper()), Path(f"{picture}{ending}")):
            if place.is_file():
                return place
    return None


def _bytes_of(path: Path) -> bytes:
    try:
        return read_bounded(path, MOST_CAPTION_BYTES)
    except TextError:
        return b""


def caption_in_old_letters(picture: Path) -> str:
    """The caption beside a picture read as Windows-1252, for one that is no UTF-8; empty where it is no such text."""
    place = beside(picture)
    data = _bytes_of(place) if place is not None else b""
    if b"\0" in data:
        return ""
    try:
        return " ".join(data.decode("cp1252").split())
    except UnicodeDecodeError:
        return ""


def _kohya_caption(name: str) -> str | None:
    for part in reversed(Path(name).parent.parts):
        if match := KOHYA_FOLDER.fullmatch(part):
            return match[2].strip()
    return None


def _write_record(folder: Path, sources: Sequence[Path], roots: Sequence[str], files: Sequence[Fixed]) -> None:
    named = dict(zip(map(str, sources), roots, strict=True))
    rows = [{"path": str(each.path), "copy": each.copy, "done": list(each.done)} for each in files]
    write_json(folder / RECORD, {"sources": named, "files": rows})
