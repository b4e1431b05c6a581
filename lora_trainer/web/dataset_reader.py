"""The images of a dataset, read as a training would read them into one SQLite file, in a process of its own.

The server answers from that file, so that a dataset of any size takes no memory of it. A line of JSON on the standard input
names the dataset, the allowed roots and the file; lines on the standard output say how far the reading is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_trainer.config.layers import Layer
from lora_trainer.config.schema import Config, SourceSection
from lora_trainer.core.bounded import TextError, read_text
from lora_trainer.core.errors import Problem, UsageError, UserError
from lora_trainer.core.findings import Finding
from lora_trainer.core.io import atomic_path
from lora_trainer.core.json_process import open_streams, send
from lora_trainer.data.images.remote import is_url
from lora_trainer.data.manifest import read_manifest, request_source
from lora_trainer.data.sample import Manifest, Sample
from lora_trainer.data.sources.beside import JSON_ENDING, caption_endings
from lora_trainer.data.sources.found import SourceReading, SourceRequest
from lora_trainer.data.sources.listing import list_folder
from lora_trainer.data.sources.names import SHARDS, TABLES, ending_of, is_image, masks_beside
from lora_trainer.data.sources.places import common_root, places_of
from lora_trainer.data.sources.remote import MOST_INDEX_BYTES, names_in
from lora_trainer.run.inputs import data_in_use, data_sources
from lora_trainer.run.settings import settle
from lora_trainer.web.asked_settings import refuse_outside
from lora_trainer.web.safety import Refusal, allowed

SAY_SECONDS = 0.2
LONGEST_TAG = 100  # letters; what is longer is a sentence
MOST_STAMPED = 10_000  # tables and shards
FORMAT = 2  # of the file
TABLES_OF_FILE = """
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE images (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE, stem TEXT, path BLOB, span_file BLOB, span_offset INTEGER, span_size INTEGER,
    content TEXT, width INTEGER, height INTEGER, source INTEGER, repeats REAL, is_reg INTEGER, mask BLOB, controls TEXT,
    caption TEXT, origin TEXT, caption_file BLOB, caption_stamp TEXT, image_stamp TEXT
);
CREATE INDEX images_stem ON images (stem);
CREATE INDEX images_caption_file ON images (caption_file);
CREATE TABLE findings (image INTEGER, name TEXT, code TEXT, severity TEXT, message TEXT, fix TEXT, task TEXT);
CREATE INDEX findings_image ON findings (image);
CREATE INDEX findings_code ON findings (code);
CREATE TABLE stamps (path BLOB PRIMARY KEY, stamp TEXT, names INTEGER) WITHOUT ROWID;
CREATE TABLE tags (tag TEXT PRIMARY KEY, count INTEGER) WITHOUT ROWID;
CREATE TABLE framings (id INTEGER PRIMARY KEY, key TEXT UNIQUE);
CREATE TABLE fits (
    framing INTEGER, source INTEGER, width INTEGER, height INTEGER, bucket TEXT, crop TEXT,
    PRIMARY KEY (framing, source, width, height)
) WITHOUT ROWID;
"""
NO_STAMP = ""
MOST_SUM = (1 << 60) - 1  # that SQLite can add to


def config_of(path: str, settings: Mapping[str, Mapping[str, Any]]) -> Config:
    """The settings under which a dataset is read or checked: a family's defaults, then those of a kohya dataset TOML.

    Raises UsageError.
    """
    layers = [Layer("page", settings), Layer("--data", {"data": {"sources": [path]}})]
    return settle([], layers, builtin_if_none=False, say=list[str]().append).config


def stamp_of_stat(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns}:{found.st_size}"


def sum_of_names(names: Iterable[str]) -> int:
    """What changes when a name comes or goes, and no more: a folder's time also changes when a file is replaced."""
    return sum(number_of_name(name) for name in names if not name.startswith(".")) & MOST_SUM


def number_of_name(name: str) -> int:
    data = os.fsencode(name)
    return zlib.crc32(data) << 20 ^ zlib.adler32(data)


def shown_name(text: str) -> str:
    """A name as JSON and SQLite can have it: bytes that are no text are escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def tags_of(caption: str) -> list[str]:
    """The tags of a caption, in their order, each once. Sentences are none."""
    parts = (part.strip() for line in caption.split("\n") for part in line.split(","))
    return list(dict.fromkeys(part for part in parts if 0 < len(part) <= LONGEST_TAG))


@dataclass
class Surroundings:
    """What lies around the images: the names in each folder, and the stamps of what the list was read from."""

    roots: Sequence[Path]
    names: dict[str, frozenset[str]] = field(default_factory=dict)
    stamps: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # stamps of captions, from before they are read
    left_out: int = 0
    _inside: dict[str, bool] = field(default_factory=dict)
    _masks: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def holds(self, sample: Sample) -> bool:
        """Whether a sample is in the allowed roots; shards were looked at before."""
        return sample.span is not None or self.is_inside(str(sample.path))

    def mask_beside(self, image: str | Path) -> Path | None:
        """The mask that lies beside an image, `cat-masklabel.png` of `cat.jpg`."""
        folder, name = os.path.split(image)
        if folder not in self._masks:
            self._masks[folder] = masks_beside(self.names.get(folder, ()))
        found = self._masks[folder].get(name)
        return None if found is None else Path(folder, found[0])

    def is_inside(self, path: str) -> bool:
        """Whether a file is in the allowed roots, links followed. Folders are looked up once."""
        folder = os.path.dirname(path)
        if folder not in self._inside:
            self._inside[folder] = self._is_allowed(folder)
        return self._inside[folder] and (not os.path.islink(path) or self._is_allowed(path))

    def _is_allowed(self, path: str) -> bool:
        try:
            allowed(path, self.roots)
        except Refusal:
            return False
        return True

    def add(self, place: Path, endings: Collection[str]) -> None:
        """A place of a source with all that is below it; captions have one of these endings. Raises UsageError for a table or a shard outside of the roots."""
        tables = [] if place.is_dir() else [str(place)]
        wrong = None if self._is_allowed(str(place)) else str(place)
        if wrong is None and place.is_dir():
            listing = list_folder(place, SourceReading())
            for folder, names in listing.names.items():
                path = str(place / folder) if folder else str(place)
                self.names[path] = frozenset(names)
                for name in (each for each in names if ending_of(each) in endings):
                    with contextlib.suppress(OSError):
                        self.texts[os.path.join(path, name)] = stamp_of_stat(os.stat(os.path.join(path, name)))
                tables += [os.path.join(path, name) for name in names if ending_of(name) in (*TABLES, *SHARDS)]
            # Folders without a file are not in the listing, and may get some.
            parents = (each for path in self.names for each in Path(path).parents if each.is_relative_to(place))
            for path in {str(place), *map(str, parents), *self.names}:
                with contextlib.suppress(OSError):
                    stamp = stamp_of_stat(os.stat(path))
                    self.stamps[path] = stamp, sum_of_names(os.listdir(path))
        if wrong := wrong or next((each for each in tables if not self.is_inside(each)), None):
            raise UsageError(
                Problem(
                    "outside_folders",
                    f"{wrong} leads out of the folders that this server may read.",
                    "Remove the link.",
                )
            )
        for path in tables[:MOST_STAMPED]:
            with contextlib.suppress(OSError):
                self.stamps[path] = stamp_of_stat(os.stat(path)), None


@dataclass(frozen=True)
class DatasetReading:
    """A dataset as it was read: `bases` are what the names of each source's images begin at, `base` that of all."""

    sources: Sequence[SourceSection]
    requests: Sequence[SourceRequest]
    manifest: Manifest
    findings: Sequence[Finding]
    around: Surroundings
    bases: Sequence[Path]
    base: Path


def read_samples(path: str, roots: Sequence[Path], say: Callable[[int, int], None]) -> DatasetReading:
    """Read a dataset as a training does, and nothing outside of the roots. Raises UserError with all problems."""
    problems, config = list[Problem](), config_of(path, {})
    refuse_outside([config.model_dump(mode="json")], roots, problems)
    problems += [each for source in data_sources(config) for each in remote_problems(source)]
    if problems:
        raise UsageError(problems)
    # With wildcards the lines of a caption stay: an editor must not lose them.
    whole = config.captions.model_copy(update={"wildcards": True})
    own = [(each, each.captions or whole) for each in data_sources(config)]
    sources = [
        each.model_copy(update={"captions": captions.model_copy(update={"wildcards": True})}) for each, captions in own
    ]
    around = Surroundings(roots)
    requests = [request_source(number, source, whole) for number, source in enumerate(sources)]
    places = [places_of(each, SourceReading()) for each in requests]
    everything = [place for several in places for place in several]
    for place in dict.fromkeys([*everything, *([Path(path)] if os.path.isfile(path) else [])]):
        around.add(place, {ending for each in requests for ending in caption_endings(each)})
    manifest, findings = read_manifest(sources, captions=whole, progress=say)
    bases = [common_root(several) for several in places]
    return DatasetReading(sources, requests, manifest, findings, around, bases, common_root(everything))


def write_index(request: Mapping[str, Any], say: Callable[[int, int], None]) -> None:
    """Read a dataset into the SQLite file `target`. Raises UserError with all problems, OSError and sqlite3.Error."""
    began = time.monotonic()
    with data_in_use():
        found = read_samples(request["path"], [Path(root) for root in request["roots"]], say)
    with atomic_path(Path(request["target"])) as temporary:
        temporary.unlink()
        with contextlib.closing(sqlite3.connect(temporary)) as file, file:
            file.execute("PRAGMA journal_mode = OFF")
            file.execute("PRAGMA synchronous = OFF")
            file.executescript(TABLES_OF_FILE)
            IndexWriter(file, found).write()
            facts = {"format": FORMAT, "base": shown_name(str(found.base)), "version": 1, "task": ""}
            facts |= {"seconds": round(time.monotonic() - began, 3), "notes": json.dumps(found.manifest.notes)}
            facts |= {"left_out": found.around.left_out, "sources": len(found.sources)}
            file.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())


def remote_problems(source: SourceSection) -> list[Problem]:
    """Why a source cannot be shown: its shards are on a server, or an index names some that are."""
    named = [source.path]
    if source.path.lower().endswith(".txt") and os.path.isfile(source.path):
        with contextlib.suppress(TextError):
            named += names_in(read_text(Path(source.path), MOST_INDEX_BYTES))
    if any(is_url(each) for each in named):
        return [
            Problem(
                "image_not_shown",
                "Images on a server are not shown here.",
                "Download the shards; or train on them as they are.",
            )
        ]
    return []


class IndexWriter:
    """Writes the images of a dataset, with where their captions are, into an open file."""

    def __init__(self, file: sqlite3.Connection, found: DatasetReading) -> None:
        self.file, self.found, self.around, self.base = file, found, found.around, f"{found.base}{os.sep}"
        self.ids: dict[str, int] = {}
        self.names: set[str] = set()
        self.tags: Counter[str] = Counter()

    def write(self) -> None:
        columns = ", ".join(f":{name}" for name in COLUMNS)
        insert = f"INSERT INTO images ({', '.join(COLUMNS)}) VALUES ({columns})"
        self.file.executemany(insert, self._rows())
        findings = self.found.findings
        broken = {str(each.path) for each in findings if each.path is not None and is_image(each.path.name)}
        broken = {path for path in broken if path not in self.ids and self.around.is_inside(path)}
        self.file.executemany(insert, (self._row(path) for path in sorted(broken)))
        rows = (
            (self.ids.get(str(each.path)), shown_name(self._name(str(each.path))), *each.to_json().values(), "")
            for each in findings
        )
        self.file.executemany("INSERT INTO findings VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        self.file.executemany("INSERT INTO tags VALUES (?, ?)", self.tags.items())
        stamps = ((os.fsencode(path), *stamp) for path, stamp in self.around.stamps.items())
        self.file.executemany("INSERT INTO stamps VALUES (?, ?, ?)", stamps)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for sample in self.found.manifest.samples:
            if self.around.holds(sample):
                yield self._row(str(sample.path), sample)
            else:
                self.around.left_out += 1

    def _row(self, path: str, sample: Sample | None = None) -> dict[str, Any]:
        number = len(self.names)
        self.ids.setdefault(path, number)
        name, copy = self._name(path), 2
        while name in self.names:  # an image that several sources train
            name, copy = f"{self._name(path)}#{copy}", copy + 1
        self.names.add(name)
        row: dict[str, Any] = {
            **dict.fromkeys(COLUMNS),
            "id": number,
            "name": shown_name(name),
            "path": os.fsencode(path),
        }
        row |= {"stem": shown_name(os.path.splitext(path)[0]), "origin": "none", "caption": "", "source": 0}
        row |= {"repeats": 1, "is_reg": 0, "controls": "[]"}
        if sample is None:
            return row
        row |= {"content": sample.content, "width": sample.width, "height": sample.height, "source": sample.source}
        row |= {"repeats": sample.repeats, "is_reg": int(sample.regularization), "caption": sample.caption}
        row["controls"] = json.dumps([os.fsdecode(os.fsencode(each.path)) for each in sample.controls])
        row["origin"] = ("table" if sample.own_caption else "folder") if sample.caption else "none"
        if sample.mask is not None:
            row["mask"] = os.fsencode(sample.mask.path or sample.path)
        if sample.span is not None:
            row |= {"span_file": os.fsencode(sample.span.file), "span_offset": sample.span.offset}
            row |= {"span_size": sample.span.size, "origin": "shard" if sample.caption else "none"}
        else:
            self._beside(sample, row)
        self.tags.update(tags_of(row["caption"]))
        return row

    def _beside(self, sample: Sample, row: dict[str, Any]) -> None:
        """Where the caption and the mask of a file are. A caption outside of the roots is not shown."""
        path = str(sample.path)
        with contextlib.suppress(OSError):
            row["image_stamp"] = stamp_of_stat(os.stat(path))
        if sample.caption_file:
            place = os.path.join(os.path.dirname(path), sample.caption_file)
            # What a JSON holds is not the text of the file itself.
            origin = "table" if ending_of(place) == JSON_ENDING else "text"
            row |= {"origin": origin, "caption_file": os.fsencode(place)}
            row["caption_stamp"] = self.around.texts.get(place, NO_STAMP)
            if not self.around.is_inside(place):
                row |= {"caption": "", "origin": "none"}
        if row["mask"] is None and (mask := self.around.mask_beside(path)) is not None:
            row["mask"] = os.fsencode(mask)

    def _name(self, path: str) -> str:
        """The image's name below the dataset; its whole path elsewhere."""
        return path.removeprefix(self.base).replace(os.sep, "/")


COLUMNS = (
    *("id", "name", "stem", "path", "span_file", "span_offset", "span_size", "content", "width", "height", "source"),
    *("repeats", "is_reg", "mask", "controls", "caption", "origin", "caption_file", "caption_stamp", "image_stamp"),
)


def main() -> None:
    """Read the dataset that the request names; the last answer is the result."""
    from lora_trainer.core.imports import OPTIONAL, hide, own_process

    own_process()
    hide(OPTIONAL)
    (requests, answers), last = open_streams(), 0.0

    def say(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > SAY_SECONDS:
            last = time.monotonic()
            send(answers, {"done": done, "total": total})

    problems = list[tuple[str, str, str]]()
    try:
        write_index(json.loads(requests.readline()), say)
    except UserError as error:
        problems = [(each.code, each.message, each.fix) for each in error.problems]
    except (OSError, sqlite3.Error) as error:
        fix = "Check the disk of the server's folder of runs."
        problems = [("data_unreadable", f"The list of images could not be written: {error}.", fix)]
    send(answers, {"problems": problems})
