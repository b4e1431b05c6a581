"""Captions written beside their images, whole or not at all, with a journal on the disk that takes them back.

A change names what was there before. Where that is not what is on the disk now, somebody else has changed it, and nothing is
written. All texts are written into files of their own first: a disk that is full leaves the captions as they were.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lora_trainer.core.bounded import TextError, read_bounded
from lora_trainer.core.errors import Problem
from lora_trainer.core.io import flush_folder, remove_abandoned, rename_over
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES
from lora_trainer.web.safety import Refusal

MOST_STEPS = 200
MOST_BYTES = 256_000_000  # of all steps' texts
MOST_NAMED = 5  # images of a conflict
FLUSHED_ONE_BY_ONE = 64
NEW_FILE = 0o644
OLD_SECONDS = 7200.0  # no change takes so long
TABLES = """
CREATE TABLE IF NOT EXISTS steps (id INTEGER PRIMARY KEY, title TEXT, at REAL, bytes INTEGER, is_undone INTEGER);
CREATE TABLE IF NOT EXISTS changes (step INTEGER, image TEXT, file BLOB, before BLOB, after BLOB);
CREATE INDEX IF NOT EXISTS changes_step ON changes (step);
"""


@dataclass(frozen=True)
class CaptionChange:
    """A caption file's bytes before and after; None means that there is no file."""

    image: str
    file: Path
    before: bytes | None
    after: bytes | None


@dataclass(frozen=True)
class Step:
    """Changes that were made together."""

    number: int
    title: str


def bytes_of(path: Path) -> bytes | None:
    """What is in a caption file, None where there is none. Raises Refusal for what is no caption file."""
    try:
        return read_bounded(path, MOST_CAPTION_BYTES)
    except TextError as error:
        if not os.path.lexists(path):
            return None
        raise Refusal(
            409, Problem("file_unreadable", f"{path.name} {error}.", "Remove it, or replace it by a short text.")
        ) from None


def write_captions(root: Path, changes: Sequence[CaptionChange]) -> None:
    """Write the files, none where one cannot be.

    Raises OSError, and Refusal for a place outside of `root`, or a caption that somebody else writes at the same time.
    """
    real = os.path.realpath(root)
    folders, are_many = {each.file.parent for each in changes}, len(changes) > FLUSHED_ONE_BY_ONE
    for folder in folders:
        if not Path(os.path.realpath(folder)).is_relative_to(real):
            raise Refusal(
                403, Problem("leads_out_of_data", f"{folder} leads out of the dataset.", "Make a copy of the dataset.")
            )
    staged: list[tuple[str, CaptionChange]] = []
    try:
        for folder in folders if are_many else ():
            remove_abandoned(folder, OLD_SECONDS)  # of a server that was killed while it wrote
        for each in (each for each in changes if each.after is not None):
            temporary = written_beside(each, is_flushed=not are_many)
            staged.append((temporary, each))
        if are_many and hasattr(os, "sync"):
            os.sync()
        put_in_place(staged, [each for each in changes if each.after is None])
        for folder in folders:
            flush_folder(folder)
    finally:
        for temporary, _ in staged:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def put_in_place(staged: list[tuple[str, CaptionChange]], removed: Sequence[CaptionChange]) -> None:
    """Rename what was written over the captions, and remove others; back where one of many cannot be.

    Each is looked at once more just before: to write many takes a while. Raises OSError and Refusal.
    """
    done: list[CaptionChange] = []
    try:
        while staged:
            refuse_changed([staged[-1][1]])
            rename_over(Path(staged[-1][0]), staged[-1][1].file)
            done.append(staged.pop()[1])
        for each in removed:
            refuse_changed([each])
            each.file.unlink(missing_ok=True)
            done.append(each)
    except BaseException:
        for each in filter(is_written, done):
            if each.before is None:
                each.file.unlink(missing_ok=True)
                continue
            back = replace(each, after=each.before)
            temporary = Path(written_beside(back, is_flushed=len(done) <= FLUSHED_ONE_BY_ONE))
            try:
                rename_over(temporary, each.file)
            finally:
                temporary.unlink(missing_ok=True)
        raise


def is_written(change: CaptionChange) -> bool:
    """Whether a caption on the disk is what a change makes of it."""
    try:
        return bytes_of(change.file) == change.after
    except Refusal:
        return False


def written_beside(change: CaptionChange, *, is_flushed: bool) -> str:
    """A hidden file beside the caption, with what will be in it. Raises OSError, and leaves nothing then."""
    prefix = f".{change.file.name[:32]}."
    descriptor, temporary = tempfile.mkstemp(prefix=prefix, suffix=".part", dir=change.file.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(change.after or b"")
            file.flush()
            if is_flushed:
                os.fsync(file.fileno())
        os.chmod(temporary, NEW_FILE if change.before is None else change.file.stat().st_mode & 0o777)
    except OSError:
        os.unlink(temporary)
        raise
    return temporary


class CaptionJournal:
    """The edits of one dataset, to be taken back and made again. Used by one thread at a time."""

    def __init__(self, file: Path, root: Path) -> None:
        self.file, self.root = file, root

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self.file)) as connection:
            connection.executescript(TABLES)
            with connection:
                yield connection

    def write(self, title: str, changes: Sequence[CaptionChange]) -> None:
        """Write captions that are on the disk as `before` says, and keep how to take it back.

        Raises Refusal where somebody else changed one, and OSError; then nothing was written.
        """
        refuse_changed(changes)
        with self._open() as journal:
            # Kept first: the end of the process between the two leaves nothing that cannot be taken back.
            journal.execute("DELETE FROM changes WHERE step IN (SELECT id FROM steps WHERE is_undone)")
            journal.execute("DELETE FROM steps WHERE is_undone")
            size = sum(len(each.before or b"") + len(each.after or b"") for each in changes)
            insert = "INSERT INTO steps (title, at, bytes, is_undone) VALUES (?, ?, ?, 0)"
            number = journal.execute(insert, (title, time.time(), size)).lastrowid
            rows = ((number, each.image, os.fsencode(each.file), each.before, each.after) for each in changes)
            journal.executemany("INSERT INTO changes VALUES (?, ?, ?, ?, ?)", rows)
            kept = 0
            for place, (step, bytes_) in enumerate(
                journal.execute("SELECT id, bytes FROM steps ORDER BY id DESC").fetchall()
            ):
                kept += bytes_
                if place and (place >= MOST_STEPS or kept > MOST_BYTES):
                    journal.execute("DELETE FROM changes WHERE step = ?", (step,))
                    journal.execute("DELETE FROM steps WHERE id = ?", (step,))
        try:
            write_captions(self.root, changes)
        except BaseException:
            if not any(
                map(is_written, changes)
            ):  # else what cannot be put back, as on a disk that fails, is in the journal
                with self._open() as journal:
                    journal.execute("DELETE FROM changes WHERE step = ?", (number,))
                    journal.execute("DELETE FROM steps WHERE id = ?", (number,))
            raise

    def next(self, *, undone: bool) -> Step | None:
        """The step that would be taken back, or made again where `undone`; None where there is none."""
        if not self.file.is_file():
            return None
        order = "ASC" if undone else "DESC"
        question = f"SELECT id, title FROM steps WHERE is_undone = ? ORDER BY id {order} LIMIT 1"
        with self._open() as journal:
            row = journal.execute(question, (int(undone),)).fetchone()
        return None if row is None else Step(*row)

    def go(self, *, back: bool) -> tuple[Step, list[CaptionChange]]:
        """Take the newest step back, or make the one that was taken back again; the step and what was changed.

        Raises Refusal where there is none, or where somebody changed a caption since, and OSError.
        """
        step = self.next(undone=not back)
        if step is None:
            raise Refusal(
                409,
                Problem(
                    "nothing_to_undo", f"There is nothing to {'undo' if back else 'redo'}.", "Load the page again."
                ),
            )
        with self._open() as journal:
            question = "SELECT image, file, before, after FROM changes WHERE step = ?"
            rows = journal.execute(question, (step.number,)).fetchall()
        changes = []
        for image, file, before, after in rows:
            path, now = Path(os.fsdecode(file)), bytes_of(Path(os.fsdecode(file)))
            wanted, expected = (before, after) if back else (after, before)
            # One that is so already was not written before the process ended.
            changes.append(CaptionChange(image, path, now if now == wanted else expected, wanted))
        refuse_changed(changes)
        write_captions(self.root, [each for each in changes if each.before != each.after])
        with self._open() as journal:
            journal.execute("UPDATE steps SET is_undone = ? WHERE id = ?", (int(back), step.number))
        return step, changes


def refuse_changed(changes: Sequence[CaptionChange]) -> None:
    """Raise Refusal where a caption on the disk is not what a change begins with."""
    wrong = [each for each in changes if bytes_of(each.file) != each.before]
    if wrong:
        named = ", ".join(each.image for each in wrong[:MOST_NAMED]) + (" …" if len(wrong) > MOST_NAMED else "")
        message = f"{len(wrong)} of {len(changes)} captions were changed by somebody else meanwhile: {named}."
        raise Refusal(
            409, Problem("caption_changed_meanwhile", message, "Nothing was written. Load the page again to see them.")
        )
