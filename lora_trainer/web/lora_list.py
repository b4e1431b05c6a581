"""The LoRA files of the runs, of the library and of folders that the user named, as rows; read again only where a file changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import read_json, write_json
from lora_trainer.models.lora_facts import LoraFacts, read_lora_facts
from lora_trainer.web.run_list import SAMPLE, file_url
from lora_trainer.web.safety import Refusal, allowed

LIBRARY = "library"  # the folder inside of that of the runs, of what the tools write
FACTS, FOLDERS = "loras.json", "lora_folders.json"  # inside of the server's own folder
ENDING, DIFFUSERS = ".safetensors", ".diffusers.safetensors"
TOKENS = ".embedding-"  # in the names of learned tokens beside a LoRA
PREVIEWS = (".preview.png", ".png", ".jpg", ".jpeg", ".webp")  # images beside a file, as other programs put them there
OF_A_STEP = re.compile(r"-step-(\d+)\.safetensors$")
DEEPEST, MOST_FILES, MOST_FOLDERS = 4, 20_000, 50
AT_ONCE_SECONDS = 1.5  # for headers that were never read; a request that needs longer answers with what is read so far
VERSION = 2  # of the kept facts
WHEN_READ = ("is_damaged", "problem", *LoraFacts.__dataclass_fields__)


@dataclass(frozen=True)
class FoundFile:
    """A file that may be a LoRA: `place` is the run's folder, the library's or the named one, `beside` an image beside it."""

    path: Path
    place: Path
    size: int
    changed: float
    stamp: tuple[int, int, int]
    beside: Path | None = None

    @property
    def id(self) -> str:
        return id_of_lora(self.path)


def id_of_lora(path: Path) -> str:
    """What a file is called in addresses: its path says too much, and an id that is not in the list names nothing."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


class LoraList:
    """The files below `output` and in the folders that `own` remembers. Any thread may call its methods."""

    def __init__(
        self, output: Path, own: Path, roots: Sequence[Path], runs: Callable[[], list[dict[str, Any]]]
    ) -> None:
        self.output, self.own, self.roots, self._runs = output, own, roots, runs
        self._lock = threading.Lock()
        self._facts: dict[str, dict[str, Any]] | None = None  # by path, with their stamps

    @property
    def library(self) -> Path:
        return self.output / LIBRARY

    def rows(self) -> tuple[list[dict[str, Any]], int]:
        """A row for each LoRA file, newest first, and how many of the rows are still without facts."""
        runs = {Path(row["folder"]): row for row in self._runs()}
        found = {file.path: file for file in self._files(runs)}
        with self._lock:
            facts = self._read(found)
        rows = [self._row(file, runs.get(file.place), facts.get(str(path))) for path, file in found.items()]
        rows = [row for row in rows if row["is_damaged"] or row["is_pending"] or row["kind"] is not None]
        ids = {row["path"]: row["id"] for row in rows}
        begun = {str(row["started"]): row["preview"] for row in runs.values() if row["started"]}
        for row in rows:
            stem = row["path"].removesuffix(DIFFUSERS).removesuffix(ENDING)
            other = f"{stem}{ENDING if row['path'].endswith(DIFFUSERS) else DIFFUSERS}"
            row["other_format"] = ids.get(other)
            if row["from"] != "run" and row["preview"] is None and not row["made_of"]:
                row["preview"] = begun.get(row["started"] or "")  # a converted or resized file of that run
        rows.sort(key=lambda row: (-row["changed"], row["path"]))
        return rows, sum(row["is_pending"] for row in rows)

    def row(self, name: str) -> dict[str, Any]:
        """The row of a file. Raises Refusal where there is none."""
        found = next((row for row in self.rows()[0] if row["id"] == name), None)
        if found is None:
            raise Refusal(404, Problem("lora_missing", f"There is no LoRA {name[:100]}.", "GET /api/loras lists them."))
        allowed(found["path"], self.roots)  # a link may have changed
        return found

    def folders(self) -> list[str]:
        """The folders that the user named."""
        try:
            kept = read_json(self.own / FOLDERS)
        except (OSError, ValueError):
            return []
        return [each for each in kept if isinstance(each, str)][:MOST_FOLDERS] if isinstance(kept, list) else []

    def add_folder(self, named: str) -> Path:
        """Remember a folder. Raises Refusal for one outside of the allowed roots, a hidden one, and what is none."""
        folder = allowed(named, self.roots)
        roots = [Path(os.path.realpath(root)) for root in self.roots]
        root = max((each for each in roots if folder.is_relative_to(each)), key=lambda each: len(each.parts))
        if any(part.startswith(".") for part in folder.relative_to(root).parts):
            raise Refusal(
                403, Problem("folder_hidden", f"{folder} is a hidden folder.", "Start the server with it as --root.")
            )
        if not folder.is_dir():
            raise Refusal(422, Problem("folder_missing", f"{folder} is not a folder.", "Name a folder of LoRA files."))
        with self._lock:
            kept = self.folders()
            if str(folder) not in kept:
                if len(kept) >= MOST_FOLDERS:
                    raise Refusal(
                        409,
                        Problem("too_many_folders", f"{len(kept)} folders are listed already.", "Remove one of them."),
                    )
                write_json(self.own / FOLDERS, [*kept, str(folder)])
        return folder

    def remove_folder(self, named: str) -> None:
        """Forget a folder; its files stay. Raises Refusal for one that is not remembered."""
        with self._lock:
            kept = self.folders()
            if named not in kept:
                raise Refusal(
                    404,
                    Problem("folder_not_listed", f"{named[:300]} is not listed.", "GET /api/loras lists the folders."),
                )
            write_json(self.own / FOLDERS, [each for each in kept if each != named])

    def _files(self, runs: Mapping[Path, Any]) -> Iterator[FoundFile]:
        places = [(self.library, self.library, 1)]
        for run in runs:
            places += [(run, run, 1), (run / "weights", run, 1)]
        for named in self.folders():
            with contextlib.suppress(Refusal):  # the server was started with other roots
                places.append((allowed(named, self.roots), Path(named), DEEPEST))
        left = MOST_FILES
        for folder, place, deep in places:
            for file in files_in(folder, place, deep, self.roots):
                yield file
                if not (left := left - 1):
                    return

    def _read(self, found: Mapping[Path, FoundFile]) -> dict[str, dict[str, Any]]:
        """The facts of the files by path; those that were never read as far as the time reaches."""
        if self._facts is None:
            self._facts = {}
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                kept = read_json(self.own / FACTS)
                self._facts = dict(kept["files"]) if kept.get("version") == VERSION else {}
        now = {str(path): file for path, file in found.items()}
        known = {name: facts for name, facts in self._facts.items() if name in now}
        new = [name for name, file in now.items() if known.get(name, {}).get("stamp") != list(file.stamp)]
        end = time.monotonic() + AT_ONCE_SECONDS
        for at, name in enumerate(new):
            if at and time.monotonic() > end:
                for late in new[at:]:
                    known.pop(late, None)
                break
            known[name] = {"stamp": list(now[name].stamp), **facts_of(now[name].path)}
        if new or len(known) != len(self._facts):
            with contextlib.suppress(OSError):  # a full disk; they are read again
                write_json(self.own / FACTS, {"version": VERSION, "files": known})
        self._facts = known
        return known

    def _row(self, file: FoundFile, run: Mapping[str, Any] | None, facts: Mapping[str, Any] | None) -> dict[str, Any]:
        step = OF_A_STEP.search(file.path.name) if run is not None else None
        is_final = run is not None and step is None
        name, preview = file.id, None if run is None else run["preview"]
        if run is not None and step is not None:
            preview = sample_of_step(file.place / "samples", run["id"], int(step[1]))
        return {
            "id": name,
            "name": file.path.name,
            "path": str(file.path),
            "folder": str(file.place),
            "size": file.size,
            "changed": file.changed,
            "from": "run" if run is not None else LIBRARY if file.place == self.library else "folder",
            "run": None if run is None else run["id"],
            "run_name": None if run is None else run["name"],
            "step": int(step[1]) if step else None,
            "score": run["scores"]["lora"] if run is not None and is_final else None,
            "outcome": run["outcome"] if run is not None and is_final else None,
            "preview": f"/api/loras/{name}/preview" if file.beside else preview,
            "can_delete": file.place == self.library,
            "stamp": "-".join(map(str, file.stamp[:2])),
            **(dict.fromkeys(WHEN_READ) if facts is None else {key: facts.get(key) for key in WHEN_READ}),
            "is_pending": facts is None,
        }


def sample_of_step(folder: Path, run: str, step: int) -> str | None:
    """Where the first image with the LoRA is that a run drew at a step."""
    names = sorted(each.name for each in folder.glob(f"step-{step:06d}_*") if SAMPLE.fullmatch(each.name))
    return file_url(run, f"samples/{names[0]}") if names else None


def facts_of(path: Path) -> dict[str, Any]:
    """What the header shows, and what is wrong with the file."""
    try:
        return {"is_damaged": False, "problem": None, **asdict(read_lora_facts(path)[0])}
    except UsageError as error:
        # Without the folder: the row has the path.
        problem = error.problems[0].message.replace(str(path), path.name)
        return {**asdict(LoraFacts(None)), "is_damaged": True, "problem": problem}


def files_in(folder: Path, place: Path, deep: int, roots: Sequence[Path]) -> Iterator[FoundFile]:
    """The safetensors files in a folder and `deep - 1` below it. Hidden ones, folders that are links, and links that lead
    out of the allowed roots are skipped."""
    if folder.is_symlink():
        return
    try:
        with os.scandir(folder) as listed:
            entries = [each for each in listed if not each.name.startswith(".") and each.name.isprintable()]
    except OSError:  # missing, or not readable
        return
    names = {each.name for each in entries}
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if deep > 1:
                    yield from files_in(Path(entry.path), place, deep - 1, roots)
                continue
            if not entry.name.endswith(ENDING) or TOKENS in entry.name:
                continue
            if entry.is_symlink():
                allowed(entry.path, roots)
            about = entry.stat()
        except (OSError, Refusal):
            continue
        if not stat.S_ISREG(about.st_mode):
            continue
        stem = entry.name.removesuffix(ENDING)
        beside = next((folder / f"{stem}{each}" for each in PREVIEWS if f"{stem}{each}" in names), None)
        stamp = (about.st_mtime_ns, about.st_size, about.st_ino)
        yield FoundFile(Path(entry.path), place, about.st_size, about.st_mtime, stamp, beside)


def preview_beside(path: Path, roots: Sequence[Path]) -> Path | None:
    """The image beside a LoRA file."""
    stem = path.name.removesuffix(ENDING)
    for each in PREVIEWS:
        with contextlib.suppress(Refusal, OSError):
            found = allowed(path.with_name(f"{stem}{each}"), roots)
            if stat.S_ISREG(found.stat().st_mode):
                return found
    return None
