"""Reading a data set: sources -> manifest, without decoding a picture.

Sources may be plain folders (nested), kohya's `10_name` folders, Hugging Face image
folders (`metadata.jsonl`) and single pictures. Captions come from, first found wins:
`.txt` beside the picture, `.caption` beside it, `metadata.jsonl`, the name of a kohya
folder. One bad file never stops the reading: it becomes a finding.
"""

from __future__ import annotations

import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import Finding, Severity
from lora_trainer.core.io import sha256_file
from lora_trainer.data.images import PICTURE_ENDINGS, BrokenPictureError, read_header
from lora_trainer.data.sample import Manifest, Sample

CAPTION_ENDINGS = (".txt", ".caption")
METADATA_NAME = "metadata.jsonl"
FOREIGN_PICTURES = (".heic", ".heif", ".jxl", ".psd", ".svg", ".raw", ".cr2", ".nef", ".dng")
KOHYA_FOLDER = re.compile(r"(\d+)_(.*)")
MOST_REPEATS = 1000  # a larger number is a year or an id: `2024_holiday`


@dataclass
class _Reading:
    """What gathers while sources are read."""

    allow_missing_captions: bool
    samples: list[Sample] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_manifest(
    sources: Sequence[Path], *, allow_missing_captions: bool = False
) -> tuple[Manifest, tuple[Finding, ...]]:
    """Read all sources; pictures that cannot be read become findings, not samples.

    Raises UsageError, all problems at once, for a source that is missing, given twice or
    holds no picture.
    """
    places = [Path(os.path.abspath(Path(source).expanduser())) for source in sources]
    problems = _overlaps(places)
    reading = _Reading(allow_missing_captions)
    for place in places:
        if not place.exists():
            problems.append(Problem(f"There is no folder or file {place}.", "Check the path given as data."))
        elif place.is_dir():
            problems.extend(_read_folder(place, reading))
        elif place.suffix.lower() in PICTURE_ENDINGS:
            _read_picture(place, _Row(), None, reading)
        else:
            fix = f"Give a folder, or a picture that ends in {' '.join(PICTURE_ENDINGS)}."
            problems.append(Problem(f"{place} is neither a folder nor a picture.", fix))
    if not places:
        problems.append(Problem("No data was given.", "Name a folder of pictures with --data."))
    if problems:
        raise UsageError(problems)
    return Manifest(tuple(reading.samples), tuple(reading.notes)), tuple(reading.findings)


def _overlaps(places: Sequence[Path]) -> list[Problem]:
    """Pictures must not come in twice unseen: repeats say that openly."""
    problems = []
    real = [place.resolve() for place in places]
    for later in range(len(places)):
        for earlier in range(later):
            if real[later] == real[earlier]:
                message = f"{places[later]} is given as data twice."
            elif real[later].is_relative_to(real[earlier]) or real[earlier].is_relative_to(real[later]):
                message = f"Of the data {places[earlier]} and {places[later]} one contains the other."
            else:
                continue
            problems.append(Problem(message, "Name it once; to weigh pictures use folders such as 10_name."))
    return problems


def _read_folder(root: Path, reading: _Reading) -> list[Problem]:
    files = _files_below(root, reading)
    pictures = [path for path in files if path.suffix.lower() in PICTURE_ENDINGS]
    if not pictures:
        return [_no_pictures(root, files)]
    rows: dict[str, _Row] = {}
    for path in files:
        if path.name == METADATA_NAME:
            rows.update(_read_metadata(path, pictures, reading))
    kohya = {folder: _kohya_of(folder, root, reading) for folder in sorted({path.parent for path in pictures})}
    plain = [folder for folder, named in kohya.items() if named is None]
    if len(plain) not in (0, len(kohya)):
        shown = ", ".join(folder.relative_to(root).as_posix() for folder in plain[:3])
        reading.notes.append(f"{root}: folders without a repeat count are taken once ({shown}).")
    for path in pictures:
        _read_picture(path, rows.get(_key(path), _Row()), kohya[path.parent], reading)
    _note_unused(files, pictures, reading)
    return []


def _files_below(root: Path, reading: _Reading) -> list[Path]:
    """All files that are not hidden, sorted by relative path; linked folders are followed once."""
    found: list[Path] = []
    seen: set[Path] = set()
    waiting = [root]
    while waiting:
        folder = waiting.pop(0)
        real = folder.resolve()
        if real in seen:
            continue
        seen.add(real)
        try:
            entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
        except OSError as error:
            message = f"cannot be opened ({(error.strerror or str(error)).lower()})."
            reading.findings.append(
                Finding("unreadable", "error", message, "Make it readable or remove it.", path=folder)
            )
            continue
        shown = [entry for entry in entries if not entry.name.startswith(".")]
        waiting.extend(entry for entry in shown if entry.is_dir())
        # A link that leads nowhere stays in, to be named as unreadable; devices and pipes do not.
        found.extend(entry for entry in shown if entry.is_file() or (entry.is_symlink() and not entry.is_dir()))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _no_pictures(root: Path, files: Sequence[Path]) -> Problem:
    endings = Counter(path.suffix.lower() or "no ending" for path in files)
    listed = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(5))
    message = f"{root} holds no picture; looked for {' '.join(PICTURE_ENDINGS)} and found {listed or 'no file'}."
    return Problem(message, "Name the folder that holds the pictures.")


def _kohya_of(folder: Path, root: Path, reading: _Reading) -> tuple[int, str] | None:
    """(repeats, caption) of the nearest folder named `10_name`, the source itself included."""
    for place in (folder, *folder.parents):
        if match := KOHYA_FOLDER.fullmatch(place.name):
            repeats, caption = int(match[1]), match[2].strip()
            if repeats <= MOST_REPEATS:
                return repeats, caption
            note = f"{place}: {match[1]} is taken as part of the name, not as repeats (most: {MOST_REPEATS})."
            if note not in reading.notes:
                reading.notes.append(note)
        if place == root:
            break
    return None


@dataclass(frozen=True)
class _Row:
    """What metadata.jsonl says of a picture."""

    text: str | None = None
    weight: object = 1.0


def _read_metadata(path: Path, pictures: Sequence[Path], reading: _Reading) -> dict[str, _Row]:
    """Captions and weights of a Hugging Face image folder by the picture's key; further fields are ignored."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fix = "Save it as UTF-8."
        reading.findings.append(Finding("bad_metadata", "error", f"cannot be read ({error}).", fix, path=path))
        return {}
    known = {_key(picture) for picture in pictures}
    rows: dict[str, _Row] = {}
    bad: list[int] = []
    absent: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, text = row["file_name"], row.get("text")
        except (ValueError, KeyError, TypeError, AttributeError):
            bad.append(number)
            continue
        if not isinstance(name, str) or not isinstance(text, str | None):
            bad.append(number)
            continue
        key = _key(Path(os.path.normpath(path.parent / name.replace("\\", "/"))))
        if key not in known:
            absent.append(name)
        else:
            rows[key] = _Row(text, row.get("weight", 1.0))
    if bad:
        message = f"{len(bad)} of {len(lines)} lines are not JSON with file_name and text (first: line {bad[0]})."
        reading.findings.append(Finding("bad_metadata", "error", message, "Mend or remove these lines.", path=path))
    if absent:
        message = f"names {len(absent)} pictures that are not there (first: {absent[0]})."
        reading.findings.append(
            Finding("absent_picture", "warning", message, "Add them or remove the lines.", path=path)
        )
    return rows


def _key(path: Path) -> str:
    """Compares names however the file system composes accents."""
    return unicodedata.normalize("NFC", path.as_posix())


def _read_picture(path: Path, row: _Row, kohya: tuple[int, str] | None, reading: _Reading) -> None:
    repeats = kohya[0] if kohya else 1
    if repeats == 0:
        note = f"{path.parent}: 0 repeats, left out."
        if note not in reading.notes:
            reading.notes.append(note)
        return
    try:
        width, height = read_header(path)
        content = sha256_file(path)
    except BrokenPictureError as broken:
        reading.findings.append(Finding(broken.code, "error", broken.message, broken.fix, path=path))
        return
    caption = _caption_of(path, row.text, kohya, reading)
    weight = _weight_of(path, row.weight, reading)
    reading.samples.append(Sample(path, caption, width, height, content, repeats, weight))


def _weight_of(path: Path, weight: object, reading: _Reading) -> float:
    """The weight that metadata.jsonl gives; a finding, and 1, for one that no loss can be multiplied by."""
    if isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight) and weight >= 0.0:
        return float(weight)
    message = f"has the weight {weight!r} in {METADATA_NAME}."
    fix = "Write a number of at least 0; 1 is usual."
    reading.findings.append(Finding("bad_weight", "error", message, fix, path=path))
    return 1.0


def _caption_of(path: Path, written: str | None, kohya: tuple[int, str] | None, reading: _Reading) -> str:
    beside = [file for ending in CAPTION_ENDINGS if (file := _beside(path, ending)) is not None]
    if len(beside) > 1:
        message = f"has two captions; {beside[0].name} is used and {beside[1].name} is not."
        reading.findings.append(Finding("two_captions", "note", message, "Remove one of them.", path=path))
    text = written if written is not None else (kohya[1] if kohya else None)
    if beside:
        try:
            text = _decode(beside[0].read_bytes())
        except (OSError, UnicodeDecodeError) as error:
            message = f"has a caption file that is not UTF-8 text ({beside[0].name}: {error})."
            reading.findings.append(Finding("unreadable_caption", "error", message, "Save it as UTF-8.", path=path))
            return ""
    caption = " ".join((text or "").split())
    if not caption:
        code, message = (
            ("missing_caption", "has no caption.") if text is None else ("empty_caption", "has an empty caption.")
        )
        severity: Severity = "note" if reading.allow_missing_captions else "error"
        fix = f"Write one into {path.stem}.txt or set data.allow_missing_captions=true."
        if reading.allow_missing_captions:
            fix = f"It is trained on the empty caption, as data.allow_missing_captions asks; or write {path.stem}.txt."
        reading.findings.append(Finding(code, severity, message, fix, path=path))
    return caption


def _beside(path: Path, ending: str) -> Path | None:
    """The caption file of a picture: `cat.txt`, `cat.TXT`, or `cat.png.txt`."""
    for candidate in (path.with_suffix(ending), path.with_suffix(ending.upper()), path.with_name(path.name + ending)):
        if candidate.is_file():
            return candidate
    return None


def _decode(data: bytes) -> str:
    """UTF-8 with or without a mark, or UTF-16 with one, as Windows editors write."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16")
    return data.decode("utf-8-sig")


def _note_unused(files: Sequence[Path], pictures: Sequence[Path], reading: _Reading) -> None:
    stems = {path.with_suffix("") for path in pictures} | set(pictures)
    for path in files:
        ending = path.suffix.lower()
        if ending in FOREIGN_PICTURES:
            message = f"is not read: {ending} is not among {' '.join(PICTURE_ENDINGS)}."
            reading.findings.append(
                Finding("foreign_format", "warning", message, "Convert it to PNG or JPEG.", path=path)
            )
        elif ending in CAPTION_ENDINGS and path.with_suffix("") not in stems:
            message = "is a caption without a picture."
            reading.findings.append(
                Finding("orphan_caption", "note", message, "Add the picture or remove it.", path=path)
            )
