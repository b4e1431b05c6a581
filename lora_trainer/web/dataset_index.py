"""The list of a dataset's images as the server has it: a file that another process writes, asked for a page at a time.

It is read again when a folder or a table of it changes, never because somebody scrolls. A page that is shown looks at the
files of its own images, so that what another program wrote into them is seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.config.schema import Config
from lora_trainer.core.bounded import TextError, read_text
from lora_trainer.core.errors import Problem
from lora_trainer.core.json_process import JsonProcess
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES, tidy
from lora_trainer.data.views import Framing, plain_fits
from lora_trainer.models.published import public_architecture
from lora_trainer.run.inputs import read_model, trained_framings
from lora_trainer.web.caption_journal import CaptionJournal
from lora_trainer.web.dataset_reader import (
    FORMAT,
    NO_STAMP,
    config_of,
    stamp_of_stat,
    sum_of_names,
    tags_of,
)
from lora_trainer.web.safety import Refusal

LOOKED_SECONDS = 2.0  # how long the stamps of the folders count
MOST_OPEN = 8  # lists that stay open
MOST_KEPT = 64  # lists on the disk
MOST_FRAMINGS = 6
AT_ONCE = 2  # lists that are read at the same time
MOST_TAGS = 400
MOST_COUNTS = 16
OF_CAPTIONS = ("missing_caption", "empty_caption", "unreadable_caption", "two_captions", "orphan_caption")
SORTS = {
    "order": "images.id",
    "name": "images.name",
    "newest": "images.image_stamp DESC, images.id",
    "short": "length(images.caption), images.id",
    "long": "length(images.caption) DESC, images.id",
    "small": "images.width * images.height, images.id",
    "large": "images.width * images.height DESC, images.id",
}
BUILTIN = "builtin"  # the built-in base model, where a family is named
reading_now = threading.BoundedSemaphore(AT_ONCE)


@dataclass(frozen=True)
class Framed:
    """What images are trained at: a family's buckets at one resolution, or a kohya TOML's own."""

    key: str
    framings: tuple[Framing, ...]

    @property
    def resolution(self) -> int:
        return max(framing.resolutions[0] for framing in self.framings)


@dataclass(frozen=True)
class WantedImages:
    """Which images are asked for; all that are set must hold."""

    search: str = ""
    tag: str = ""
    finding: str = ""
    bucket: str = ""
    names: tuple[str, ...] | None = None


class IndexReading:
    """A process that reads a dataset."""

    def __init__(self, path: Path, roots: Sequence[Path], target: Path) -> None:
        self.target, self.done, self.total, self.problems = target, 0, 0, list[Problem]()
        self.ended = threading.Event()
        self.request = {"path": str(path), "roots": list(map(str, roots)), "target": str(target)}
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            with reading_now:
                last = self.read()
        except (OSError, ValueError):
            last = {}
        if "problems" in last:
            self.problems = [Problem(*each) for each in last["problems"]]
        else:
            message = "The list of images was not made: its process ended."
            self.problems = [
                Problem("process_lost", message, "Try again, or use `lora-trainer check --quick` in a terminal.")
            ]
        self.ended.set()

    def read(self) -> dict[str, Any]:
        """The last answer of the process, once it has ended. Raises OSError and ValueError."""
        last: dict[str, Any] = {}
        for last in JsonProcess("lora_trainer.web.dataset_reader", is_apart=True).answers(self.request):
            self.done, self.total = last.get("done", self.done), last.get("total", self.total)
        return last


class DatasetIndex:
    """The list of one dataset. Its methods are called with `lock` held, unless they say otherwise."""

    def __init__(self, path: Path, roots: Sequence[Path], folder: Path) -> None:
        self.path, self.roots, self.folder = path, roots, folder
        self.lock = threading.RLock()
        self.reading: IndexReading | None = None
        self._edits = self._edits_before = 0  # written here, and of these before the reading began
        self._file: sqlite3.Connection | None = None
        self._looked = 0.0
        self._framed: dict[tuple[str, int | None], Framed] = {}
        self._counts: OrderedDict[Any, Any] = OrderedDict()  # of one version each

    @property
    def target(self) -> Path:
        return self.folder / "index.sqlite"

    def settle(self, seconds: float) -> None:
        """Read what is new, and wait so long for it. Takes the lock. Raises Refusal for what cannot be read."""
        with self.lock:
            self._take()
            if self.reading is None and not self._is_fresh():
                self.reading = self._read()
            reading = self.reading
        if reading is not None:
            reading.ended.wait(seconds)
            with self.lock:
                self._take()

    def _take(self) -> None:
        """Use the list that a process has finished. Raises Refusal with its problems."""
        reading = self.reading
        if reading is None or not reading.ended.is_set():
            return
        self.reading = None
        if reading.problems:
            raise Refusal(422, reading.problems)
        if self._edits != self._edits_before:  # it may have captions from before them
            self.reading = self._read()
            return
        self.close()
        os.replace(reading.target, self.target)
        self.set_fact("version", str(time.time_ns() // 1_000_000))
        self._looked = time.monotonic()
        found = []
        for path in self.folder.parent.glob(f"*/{self.target.name}"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path))
        for _, path in sorted(found)[:-MOST_KEPT]:
            path.unlink(missing_ok=True)

    def _is_fresh(self) -> bool:
        if not self.is_there:
            return False
        if time.monotonic() - self._looked < LOOKED_SECONDS:
            return True
        for path, stamp, names in self.file.execute("SELECT path, stamp, names FROM stamps").fetchall():
            try:
                now = stamp_of_stat(os.stat(path))
                if now != stamp:
                    if names is None or sum_of_names(os.listdir(os.fsdecode(path))) != names:
                        return False
                    with self.file:  # a caption was replaced by one of the same name
                        self.file.execute("UPDATE stamps SET stamp = ? WHERE path = ?", (now, path))
            except OSError:
                return False
        self._looked = time.monotonic()
        return True

    def read_again(self) -> None:
        """Let the next question read the dataset again. Takes the lock."""
        with self.lock:
            if self.reading is None:
                self.reading = self._read()

    def _read(self) -> IndexReading:
        self._edits_before = self._edits
        return IndexReading(self.path, self.roots, self.target.with_name("next.sqlite"))

    @property
    def is_there(self) -> bool:
        """Whether there is a list, which may be old."""
        try:
            return self.target.is_file() and self.fact("format") == str(FORMAT)
        except sqlite3.Error:
            return False

    @property
    def file(self) -> sqlite3.Connection:
        if self._file is None:
            self._file = sqlite3.connect(self.target, check_same_thread=False)
            self._file.execute("PRAGMA synchronous = OFF")  # it can be made again
            self._file.create_function("holds", 3, holds, deterministic=True)
            self._file.create_function("has_tag", 2, lambda caption, tag: tag in tags_of(caption), deterministic=True)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._framed.clear()
        self._counts.clear()

    def fact(self, key: str) -> str:
        found = self.file.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return "" if found is None else str(found[0])

    def set_fact(self, key: str, value: str) -> None:
        with self.file:
            self.file.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, value))

    @property
    def version(self) -> int:
        """Rises with every change of what the list says."""
        return int(self.fact("version") or 0)

    def changed(self, *, here: bool = False) -> None:
        """Something in the list is new. Where captions were written `here`, what is being read meanwhile does not count."""
        self._edits += here
        self.set_fact("version", str(self.version + 1))

    # Sizes

    def framed(self, family: str, resolution: int | None) -> Framed:
        """The buckets of a family, at its own resolution or another. Raises UsageError, and Refusal for no family."""
        if (family, resolution) not in self._framed:
            data = {} if resolution is None else {"data": {"resolution": resolution}}
            config = config_of(str(self.path), {**({} if family == BUILTIN else {"model": {"family": family}}), **data})
            facts = read_model(Config(), weights=False)[1] if family == BUILTIN else public_architecture(family).facts
            framings = trained_framings(config, facts)
            self._framed[family, resolution] = Framed(repr(framings), framings[: len(config.data.sources)])
        return self._framed[family, resolution]

    def fits(self, framed: Framed) -> int:
        """The number under which the buckets of all sizes are kept; they are computed the first time."""
        known = self.file.execute("SELECT id FROM framings WHERE key = ?", (framed.key,)).fetchone()
        if known is not None:
            return int(known[0])
        with self.file:
            old = "SELECT id FROM framings ORDER BY id DESC LIMIT -1 OFFSET ?"
            for (number,) in self.file.execute(old, (MOST_FRAMINGS - 1,)).fetchall():
                self.file.execute("DELETE FROM fits WHERE framing = ?", (number,))
                self.file.execute("DELETE FROM framings WHERE id = ?", (number,))
            number = int(self.file.execute("INSERT INTO framings (key) VALUES (?)", (framed.key,)).lastrowid or 0)
            sizes = "SELECT DISTINCT source, width, height FROM images WHERE width IS NOT NULL"
            rows = self.file.execute(sizes).fetchall()
            found = []
            for source, width, height in rows:
                fit = plain_fits(width, height, framed.framings[min(source, len(framed.framings) - 1)])[0]
                across, down = fit.resized_width, fit.resized_height
                # What the crop keeps: left, top, width and height as shares of the image.
                box = (fit.left / across, fit.top / down, fit.bucket.width / across, fit.bucket.height / down)
                crop = json.dumps([round(each, 5) for each in box])
                found.append((number, source, width, height, str(fit.bucket), crop))
            self.file.executemany("INSERT INTO fits VALUES (?, ?, ?, ?, ?, ?)", found)
        return number

    # Questions

    def count(self, wanted: WantedImages, fits: int) -> int:
        """How many images are wanted."""
        where, values = conditions(wanted, fits)
        question = f"SELECT count(*) FROM images WHERE {where}"
        return int(self._kept((wanted, fits), lambda: self.file.execute(question, values).fetchone()[0]))

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, which is kept until the list changes."""
        key = self.version, key
        if key not in self._counts:
            self._counts[key] = make()
            while len(self._counts) > MOST_COUNTS:
                self._counts.popitem(last=False)
        return self._counts[key]

    def select(self, wanted: WantedImages, fits: int, sort: str, part: tuple[int, int]) -> list[dict[str, Any]]:
        """The rows of `part` (limit, offset) of the wanted images, as they are in the file."""
        where, values = conditions(wanted, fits)
        if wanted == WantedImages() and sort == "order":  # without walking over what is before
            where, values, part = "images.id >= ?", [part[1]], (part[0], 0)
        join = "LEFT JOIN fits ON framing = ? AND fits.source = images.source AND fits.width = images.width"
        columns = f"images.*, bucket, crop FROM images {join} AND fits.height = images.height"
        question = f"SELECT {columns} WHERE {where} ORDER BY {SORTS[sort]} LIMIT ? OFFSET ?"
        cursor = self.file.execute(question, [fits, *values, *part])
        keys = [each[0] for each in cursor.description]
        return [dict(zip(keys, row, strict=True)) for row in cursor]

    def each(self, wanted: WantedImages, fits: int) -> Iterator[dict[str, Any]]:
        """The wanted images one after the other, in the order of their training."""
        where, values = conditions(wanted, fits)
        cursor = self.file.execute(f"SELECT * FROM images WHERE {where} ORDER BY id", values)
        keys = [each[0] for each in cursor.description]
        return (dict(zip(keys, row, strict=True)) for row in cursor)

    def shared(self, column: str) -> set[Any]:
        """The caption files, or the names without endings, of more than one image."""
        assert column in ("caption_file", "stem")
        question = f"SELECT {column} FROM images WHERE {column} IS NOT NULL GROUP BY 1 HAVING count(*) > 1"
        return {row[0] for row in self.file.execute(question)}

    def names(self, wanted: WantedImages, fits: int, sort: str, part: tuple[int, int]) -> list[str]:
        """The names of the wanted images."""
        where, values = conditions(wanted, fits)
        question = f"SELECT name FROM images WHERE {where} ORDER BY {SORTS[sort]} LIMIT ? OFFSET ?"
        return [row[0] for row in self.file.execute(question, [*values, *part])]

    def row(self, name: str) -> dict[str, Any]:
        """The row of one image. Raises Refusal where there is none."""
        cursor = self.file.execute("SELECT * FROM images WHERE name = ?", (name.encode("utf-8", "replace").decode(),))
        found = cursor.fetchone()
        if found is None:
            raise Refusal(
                404, Problem("image_missing", f"The dataset has no image {name[:200]}.", "Load the page again.")
            )
        return dict(zip([each[0] for each in cursor.description], found, strict=True))

    def fresh(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows with captions as they are on the disk now. A changed image lets the whole be read again."""
        found, changed = [], False
        for row in rows:
            if row["span_file"] is None and row["image_stamp"] != stamp_or_none(row["path"]) and row["image_stamp"]:
                changed = True
            if row["caption_file"] is not None and row["origin"] == "text":
                stamp = stamp_or_none(row["caption_file"]) or NO_STAMP
                if stamp != row["caption_stamp"] and os.path.islink(row["caption_file"]):
                    changed = True  # where it leads is looked at again
                elif stamp != row["caption_stamp"]:
                    with self.file:
                        # As the manifest has it, its lines kept; nothing where it is no text.
                        caption: str | None = ""
                        with contextlib.suppress(TextError):
                            text = read_text(os.fsdecode(row["caption_file"]), MOST_CAPTION_BYTES)
                            caption = tidy(text, keep_lines=True)
                        gone = not os.path.lexists(row["caption_file"])
                        self.set_caption(row, None if gone else caption, stamp)
                    self.changed()
            found.append(row)
        if changed and self.reading is None:
            self.reading = self._read()
        return found

    def set_caption(self, row: dict[str, Any], caption: str | None, stamp: str) -> None:
        """Put a caption into the list, as text beside the image; None where that file is gone. `row` is changed too.

        The caller commits.
        """
        before, after = set(tags_of(row["caption"])), set(tags_of(caption or ""))
        row |= {"caption": caption or "", "caption_stamp": stamp, "origin": "text" if caption is not None else "none"}
        values = (row["caption"], row["origin"], stamp, row["caption_file"], row["id"])
        columns = "caption = ?, origin = ?, caption_stamp = ?, caption_file = ?"
        self.file.execute(f"UPDATE images SET {columns} WHERE id = ?", values)
        gone = "UPDATE tags SET count = count - 1 WHERE tag = ?"
        self.file.executemany(gone, [(tag,) for tag in before - after])
        more = "INSERT INTO tags VALUES (?, 1) ON CONFLICT (tag) DO UPDATE SET count = count + 1"
        self.file.executemany(more, [(tag,) for tag in after - before])
        old = "DELETE FROM findings WHERE image = ? AND code IN (?, ?, ?)"
        self.file.execute(old, (row["id"], *OF_CAPTIONS[:3]))
        if not row["caption"]:
            code, word = ("missing_caption", "no") if caption is None else ("empty_caption", "an empty")
            finding = (row["id"], row["name"], code, "error", f"has {word} caption.", "Write one.", "")
            self.file.execute("INSERT INTO findings VALUES (?, ?, ?, ?, ?, ?, ?)", finding)

    def findings_of(self, ids: Sequence[int]) -> dict[int, list[dict[str, str]]]:
        """The findings of images by their numbers."""
        marks = ", ".join("?" * len(ids))
        question = f"SELECT image, code, severity, message, fix, task FROM findings WHERE image IN ({marks})"
        found: dict[int, list[dict[str, str]]] = {}
        for image, *rest in self.file.execute(question, list(ids)):
            found.setdefault(image, []).append(
                dict(zip(("code", "severity", "message", "fix", "task"), rest, strict=True))
            )
        return found

    def take_findings(self, task: str, document: Mapping[str, Any]) -> None:
        """Put the findings of a check into the list, in place of those of another one."""
        if self.fact("task") == task:
            return
        ids = {os.fsdecode(path): number for number, path in self.file.execute("SELECT id, path FROM images")}
        shown = {path.encode("utf-8", "backslashreplace").decode(): number for path, number in ids.items()}

        def rows() -> Iterator[tuple[Any, ...]]:
            for file in document.get("files", ()):
                path = str(file["path"])
                number = ids.get(path, shown.get(path))
                for each in file["findings"]:
                    if each["code"] not in OF_CAPTIONS:
                        yield number, os.path.basename(path), *(each[key] for key in FINDING), task
            for each in document.get("findings", ()):
                yield None, "", *(each[key] for key in FINDING), task

        with self.file:
            self.file.execute("DELETE FROM findings WHERE task != ''")
            self.file.executemany("INSERT INTO findings VALUES (?, ?, ?, ?, ?, ?, ?)", rows())
            twice = "SELECT 1 FROM findings AS own WHERE own.task = '' AND own.code = findings.code AND own.image IS findings.image"
            self.file.execute(f"DELETE FROM findings WHERE task != '' AND EXISTS ({twice})")
        self.set_fact("task", task)
        self.changed()

    def summary(self, framed: Framed, fits: int) -> dict[str, Any]:
        """What is said of the dataset as a whole."""
        found: dict[str, Any] = self._kept((framed, fits), lambda: self._summary(framed, fits))
        return found

    def _summary(self, framed: Framed, fits: int) -> dict[str, Any]:
        buckets = self.file.execute(
            "SELECT bucket, count(*) FROM images JOIN fits ON framing = ? AND fits.source = images.source "
            "AND fits.width = images.width AND fits.height = images.height GROUP BY bucket ORDER BY 2 DESC, 1",
            (fits,),
        )
        tags = self.file.execute("SELECT tag, count FROM tags WHERE count > 0 ORDER BY 2 DESC, 1 LIMIT ?", (MOST_TAGS,))
        findings = self.file.execute(
            "SELECT code, severity, count(DISTINCT image), count(*), count(DISTINCT fix), min(name), message, fix FROM findings "
            "GROUP BY code, severity ORDER BY CASE severity WHEN 'error' THEN 0 WHEN 'warning' THEN 1 ELSE 2 END, 3 DESC, 1"
        )
        keys = ("code", "severity", "images", "count", "fixes", "name", "message", "fix")
        origins = dict(self.file.execute("SELECT origin, count(*) FROM images GROUP BY origin").fetchall())
        return {
            "count": self.count(WantedImages(), fits),
            "base": self.fact("base"),
            "resolution": framed.resolution,
            "buckets": [{"bucket": bucket, "count": count} for bucket, count in buckets],
            "tags": [{"tag": tag, "count": count} for tag, count in tags],
            "findings": [dict(zip(keys, row, strict=True)) for row in findings],
            "captions": origins,
            "notes": json.loads(self.fact("notes") or "[]"),
            "left_out": int(self.fact("left_out") or 0),
            "masks": self.file.execute("SELECT count(*) FROM images WHERE mask IS NOT NULL").fetchone()[0],
        }


FINDING = ("code", "severity", "message", "fix")


def conditions(wanted: WantedImages, fits: int) -> tuple[str, list[Any]]:
    """The wanted images as a condition of SQL, with its values."""
    found, values = ["1"], list[Any]()
    if wanted.search:
        found.append("holds(images.caption, images.name, ?)")
        values.append(wanted.search.casefold())
    if wanted.tag:
        found.append("instr(images.caption, ?) AND has_tag(images.caption, ?)")  # the first is quick
        values += [wanted.tag, wanted.tag]
    if wanted.finding:
        is_any = wanted.finding == "any"
        found.append(f"images.id IN (SELECT image FROM findings{'' if is_any else ' WHERE code = ?'})")
        values += [] if is_any else [wanted.finding]
    if wanted.bucket:
        sizes = "SELECT source, width, height FROM fits WHERE framing = ? AND bucket = ?"
        found.append(f"(images.source, images.width, images.height) IN ({sizes})")
        values += [fits, wanted.bucket]
    if wanted.names is not None:
        found.append("images.name IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(wanted.names))
    return " AND ".join(found), values


def holds(caption: str, name: str, text: str) -> bool:
    """Whether a caption or a name holds a text, in any case."""
    return text in caption.casefold() or text in name.casefold()


def stamp_or_none(path: bytes) -> str | None:
    try:
        return stamp_of_stat(os.stat(path))
    except OSError:
        return None


class DatasetIndexes:
    """The lists that were asked for. Any thread may call its methods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, tuple[Path, ...]], DatasetIndex] = OrderedDict()

    def of(self, path: Path, roots: tuple[Path, ...]) -> DatasetIndex:
        """The list of a dataset, which may not be there yet."""
        with self._lock:
            key = str(path), roots
            if key not in self._open:
                self._open[key] = DatasetIndex(path, roots, self.folder / name_of_index(path, roots))
            self._open.move_to_end(key)
            for oldest, index in list(self._open.items())[:-MOST_OPEN]:
                if index.lock.acquire(blocking=False):  # else it is in use, maybe for long
                    index.close()
                    index.lock.release()
                    del self._open[oldest]
            return self._open[key]

    def journal(self, path: Path) -> CaptionJournal:
        """The edits of a dataset's captions, whatever roots the server has."""
        return CaptionJournal(self.folder / name_of_index(path, ()) / "journal.sqlite", path)


def name_of_index(path: Path, roots: Sequence[Path]) -> str:
    """Lists of other roots are others: what is outside of them is in none."""
    return hashlib.sha256(os.fsencode("\0".join(map(str, (path, *roots))))).hexdigest()[:32]
