"""Write captions for images that have none; existing captions are overwritten only where the user wants it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.config.schema import CaptionsSection, SourceSection
from lora_trainer.core.errors import Problem, UsageError, memory_may_run_out
from lora_trainer.core.io import append_text, user_cache_folder, write_text
from lora_trainer.data.captions import make_texts
from lora_trainer.data.images.images import BrokenImageError, load_rgb
from lora_trainer.data.sources.beside import CAPTION_ENDINGS
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.names import ending_of
from lora_trainer.data.sources.read import read_source

if TYPE_CHECKING:
    from PIL import Image

Describe = Callable[[Sequence["Image.Image"]], list[list[str]]]  # the candidates of each image
Watch = Callable[[int, int], None]  # (done, of)


@dataclass(frozen=True)
class Captioned:
    """The result, by image."""

    written: int = 0
    existing: int = 0  # got one by another process meanwhile
    silent: tuple[Path, ...] = ()  # the model returned no text
    broken: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True)
class Wanted:
    """An image and the file for its caption."""

    image: Path
    target: Path


def find_wanted(
    folders: Sequence[Path], output: Path | None, journal: OverwriteJournal | None = None
) -> tuple[list[Wanted], int, list[tuple[Path, str]]]:
    """Images without a caption, how many have one, and which of these are empty or cannot be read.

    Captions are written into `output`, without it next to the images. With a `journal` all images are wanted, existing
    captions too, except those that are done by its account.

    Names of kohya folders do not count as captions. Raises UsageError for data that is not a folder, for an `output`
    inside the data, where only `--in-place` may write, and for images whose captions would have the same file.
    """
    problems = [
        Problem(
            "folder_missing", f"{folder} is not a folder.", "Unpack it: captions are written for folders of images."
        )
        for folder in folders
        if not folder.is_dir()
    ]
    if output is not None:
        fix = "Use a folder outside of it, or --in-place to write next to the images."
        problems += [
            Problem("output_inside_data", f"{output} is inside the dataset {folder}.", fix)
            for folder in folders
            if output.resolve().is_relative_to(folder.resolve())
        ]
    if problems:
        raise UsageError(problems)
    wanted: list[Wanted] = []
    unusable: list[tuple[Path, str]] = []
    existing = 0
    first_images: dict[Path, Path] = {}  # by target
    done = set() if journal is None else journal.read()
    for number, folder in enumerate(folders):
        found, unreadable = _images(folder, number)
        stems = Counter(each.path.with_suffix("") for each in found)
        files = Counter(each.path.with_name(each.caption_file) for each in found if each.caption_file)
        place = None if output is None else output / folder.resolve().name if len(folders) > 1 else output
        for each in found:
            # `cat.png` and `cat.jpg` would share `cat.txt`.
            path = each.path
            name = path.with_suffix(".txt") if stems[path.with_suffix("")] == 1 else path.with_name(path.name + ".txt")
            target = name if place is None else place / name.relative_to(folder)
            is_written = journal is not None or (each.caption is None and path not in unreadable)
            if journal is None:
                has_caption = not is_written or os.path.exists(target)
                if path in unreadable:
                    unusable.append((path, unreadable[path]))
                elif each.caption is not None and not "".join(each.caption).strip():
                    unusable.append((path, "has an empty caption."))
            else:
                # What training reads is overwritten, if it is a text of this image alone.
                own = path.with_name(each.caption_file) if each.caption_file else target
                if place is None and files[own] == 1 and ending_of(own.name) in CAPTION_ENDINGS:
                    target = own
                has_caption = str(target) in done
            first = first_images.setdefault(target, path) if is_written else path
            if first != path and first.resolve() != path.resolve():
                fix = "Caption one folder at a time, each into an --output of its own, or rename one of the images."
                problems.append(Problem("caption_shared", f"{first} and {path} would both get {target}.", fix))
            if has_caption:
                existing += 1
            else:
                wanted.append(Wanted(path, target))
    if problems:
        more = f" So would {len(problems) - 1} more." if len(problems) > 1 else ""
        raise UsageError(replace(problems[0], message=problems[0].message + more))
    return wanted, existing, unusable


def _images(folder: Path, number: int) -> tuple[list[FoundImage], dict[Path, str]]:
    """Images below a folder, and the errors of captions that cannot be read.

    `caption` is None where there is none, or where it cannot be read.
    """
    reading = SourceReading(allow_missing_captions=True)
    # A source with a default caption does not fall back on the names of kohya folders.
    section = SourceSection(path=str(folder), default_caption="")
    found = read_source([folder], SourceRequest(number, section, CaptionsSection()), reading)
    if reading.problems:
        raise UsageError(reading.problems)
    unreadable = {each.path: each.message for each in reading.findings if each.path in reading.reported}
    return [each for each in found if each.span is None], unreadable


def caption_images(
    wanted: Sequence[Wanted],
    describe: Describe,
    *,
    batch: int,
    finish: Callable[[str], str] = str,
    journal: OverwriteJournal | None = None,
    watch: Watch | None = None,
) -> Captioned:
    """Caption images and write each text atomically at once, so that a stopped run can continue.

    `finish` makes what is written of each candidate; several are lines of one file. Unreadable images are skipped and
    reported. A batch that does not fit in memory is halved.
    """
    written, existing, done = 0, 0, 0
    silent: list[Path] = []
    broken: list[tuple[Path, str]] = []
    for start in range(0, len(wanted), batch):
        part = wanted[start : start + batch]
        images: list[tuple[Wanted, Image.Image]] = []
        for each in part:
            try:
                images.append((each, load_rgb(each.image)))
            except BrokenImageError as error:
                broken.append((each.image, error.message))
        described = _described([image for _, image in images], describe)
        for (each, _), candidates in zip(images, described, strict=True):
            if not candidates:
                silent.append(each.image)
            elif journal is None and os.path.exists(each.target):  # another process wrote it
                existing += 1
            elif _wrote(each.target, "\n".join(map(finish, candidates))):
                written += 1
                if journal is not None:
                    journal.path.parent.mkdir(parents=True, exist_ok=True)
                    append_text(journal.path, json.dumps(str(each.target)) + "\n")
            else:
                broken.append((each.image, f"has a name too long for its caption ({each.target.name})"))
        done += len(part)
        if watch is not None:
            watch(done, len(wanted))
    if journal is not None:
        journal.path.unlink(missing_ok=True)
    return Captioned(written, existing, tuple(silent), tuple(broken))


@dataclass(frozen=True)
class OverwriteJournal:
    """Which captions a run has overwritten so far, in the user's cache: where it is stopped, the same command continues."""

    path: Path

    @classmethod
    def of_command(cls, *parts: object) -> OverwriteJournal:
        """That of a command with such arguments."""
        name = hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return cls(user_cache_folder() / "captions" / f"{name}.jsonl")

    def read(self) -> set[str]:
        """The files that are done; none where there is no unfinished run."""
        done = set[str]()
        with suppress(FileNotFoundError):
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):  # a damaged line: that file is captioned again
                    done.add(str(json.loads(line)))
        return done


def finisher(prefix: str, trigger_word: str | None, *, several: bool) -> Callable[[str], str]:
    """What a model's text becomes: with a prefix and the trigger word, put where training would put them.

    One of `several` candidates is read with captions.wildcards, where braces mean a choice: they are escaped.
    """
    rules = CaptionsSection(prefix=prefix, trigger_word=trigger_word)

    def finish(text: str) -> str:
        literal = re.sub(r"[{}]", r"\\\g<0>", text) if several else text
        return make_texts(literal, rules).canonical

    return finish


def _wrote(target: Path, text: str) -> bool:
    """Write it; False where the name is too long for the disk. Raises other OSErrors."""
    try:
        write_text(target, text + "\n")
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
    return True


def _described(images: list[Image.Image], describe: Describe) -> list[list[str]]:
    if not images:
        return []
    if len(images) == 1:
        return describe(images)
    with memory_may_run_out():
        return describe(images)
    half = len(images) // 2
    return [*_described(images[:half], describe), *_described(images[half:], describe)]
