"""A cache of image headers and measures, so that the next run need not read or decode them again.

One SQLite file in the user's cache folder, shared by all runs. Headers are kept by the
file's path, size, times and inode, measures by the image's content. It may be deleted at
any time; a damaged one is put aside, and one that cannot be written to costs only time.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lora_trainer.core.io import user_cache_folder

if TYPE_CHECKING:
    from lora_trainer.data.sample import Colors

NAME = "images.sqlite"
LAYOUT = 3  # a file of a newer layout is put aside; of older ones, the measures are kept
AT_ONCE = 400  # names in one question; SQLite takes 999 in its oldest builds
MOST_BYTES = 10**9  # of the file, after `cache prune`
WAIT = 10.0  # seconds for another process that writes

TABLES = """
CREATE TABLE IF NOT EXISTS headers (
    path BLOB NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    size INTEGER NOT NULL, mtime INTEGER NOT NULL, ctime INTEGER NOT NULL, inode INTEGER NOT NULL,
    content BLOB NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL,
    format TEXT NOT NULL, frames INTEGER NOT NULL, colors TEXT NOT NULL, has_alpha INTEGER NOT NULL,
    PRIMARY KEY (path, start, length)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS measures (
    content BLOB NOT NULL, version INTEGER NOT NULL, seen TEXT NOT NULL,
    PRIMARY KEY (content, version)
) WITHOUT ROWID;
"""


class FilePlace(NamedTuple):
    """Where an image's bytes lie: a file's path as the system writes it, and which part; (0, -1) is the whole."""

    path: bytes
    start: int
    length: int


class Stamp(NamedTuple):
    """A file's directory entry, the same while its bytes are the same. Times in nanoseconds."""

    size: int
    mtime: int
    ctime: int
    inode: int


class Kept(NamedTuple):
    """A remembered header."""

    stamp: Stamp
    content: str
    width: int
    height: int
    format: str
    frames: int
    colors: Colors = ""
    has_alpha: bool = False


def stamp_of(found: os.stat_result) -> Stamp:
    """The stamp of a file; the inode as SQLite's signed 64 bits."""
    inode = found.st_ino & (2**64 - 1)
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, inode - 2**64 if inode >= 2**63 else inode)


class Remembered:
    """The open file, or nothing where there can be none: then all is forgotten and nothing kept."""

    def __init__(self, connection: sqlite3.Connection | None, file: Path) -> None:
        self._connection = connection
        self._file = file
        self._is_read_only = connection is not None and not _is_writable(file)

    def headers(self, places: Sequence[FilePlace]) -> dict[FilePlace, Kept]:
        """The stored headers of these places, whether or not the files changed."""
        found: dict[FilePlace, Kept] = {}
        for names in _parts(sorted({place.path for place in places})):
            marks = ",".join("?" * len(names))
            for row in self._query(f"SELECT * FROM headers WHERE path IN ({marks})", names):
                stamp, (content, width, height, kind, frames, colors, has_alpha) = Stamp(*row[3:7]), row[7:]
                kept = Kept(stamp, content.hex(), width, height, kind, frames, colors, bool(has_alpha))
                found[FilePlace(*row[:3])] = kept
        return found

    def keep_headers(self, rows: Mapping[FilePlace, Kept]) -> None:
        values = [
            (*place, *kept.stamp, bytes.fromhex(kept.content), *kept[2:])  # fields after stamp and content
            for place, kept in rows.items()
        ]
        self._write(f"INSERT OR REPLACE INTO headers VALUES ({','.join('?' * 14)})", values)

    def measures(self, contents: Sequence[str], version: int) -> dict[str, str]:
        """The stored measures of these contents."""
        found: dict[str, str] = {}
        for part in _parts(sorted(set(contents))):
            marks = ",".join("?" * len(part))
            question = f"SELECT content, seen FROM measures WHERE version = ? AND content IN ({marks})"
            rows = self._query(question, [version, *(bytes.fromhex(content) for content in part)])
            found.update((content.hex(), seen) for content, seen in rows)
        return found

    @contextlib.contextmanager
    def keeping(self, version: int, together: int) -> Iterator[Callable[[str, str], None]]:
        """A function that keeps the measures of a content: so many are written together, the rest where the block ends, also by an error."""
        fresh: dict[str, str] = {}

        def keep(content: str, measures: str) -> None:
            fresh[content] = measures
            if len(fresh) >= together:
                self.keep_measures(fresh, version)
                fresh.clear()

        try:
            yield keep
        finally:
            self.keep_measures(fresh, version)

    def keep_measures(self, rows: Mapping[str, str], version: int) -> None:
        values = [(bytes.fromhex(content), version, seen) for content, seen in rows.items()]
        self._write("INSERT OR REPLACE INTO measures VALUES (?, ?, ?)", values)

    def _query(self, question: str, values: Sequence[Any]) -> list[Any]:
        if self._connection is None:
            return []
        try:
            return self._connection.execute(question, values).fetchall()
        except sqlite3.Error as error:
            self._fail(error)
            return []

    def _write(self, question: str, values: Sequence[tuple[Any, ...]]) -> None:
        if self._connection is None or self._is_read_only or not values:
            return
        try:
            with self._connection:
                self._connection.executemany(question, values)
        except sqlite3.Error as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Continue without the file; a damaged one is put aside for a new one."""
        self.close()
        if _is_damage(error):
            _put_aside(self._file)

    def prune(self, most: int = MOST_BYTES) -> None:
        """Forget files that are gone and contents that no file has; above `most` bytes the oldest files' too."""
        paths = self._query("SELECT DISTINCT path FROM headers", ())
        self._write("DELETE FROM headers WHERE path = ?", [(path,) for (path,) in paths if not os.path.exists(path)])
        self._shrink()
        while (size := self._bytes()) > most and (count := self._query("SELECT count(*) FROM headers", ())[0][0]):
            oldest = "SELECT path FROM headers ORDER BY ctime LIMIT ?"
            part = max(1, math.ceil(count * (1 - most / size)))
            self._write(f"DELETE FROM headers WHERE path IN ({oldest})", [(part,)])
            self._shrink()

    def _shrink(self) -> None:
        self._write("DELETE FROM measures WHERE content NOT IN (SELECT content FROM headers)", [()])
        self._query("VACUUM", ())

    def _bytes(self) -> int:
        pages, size = (self._query(f"PRAGMA {name}", ()) for name in ("page_count", "page_size"))
        return int(pages[0][0] * size[0][0]) if pages and size else 0

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _parts(names: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE))


def _is_damage(error: Exception) -> bool:
    """A locked file, a full disk and a folder that may not be written to are OperationalErrors; damage is not."""
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)


def _put_aside(file: Path) -> None:
    for name in (file.name, f"{file.name}-wal", f"{file.name}-shm"):
        with contextlib.suppress(OSError):
            os.replace(file.with_name(name), file.with_name(f"{name}.damaged"))


@contextlib.contextmanager
def remembered(folder: Path | None = None) -> Iterator[Remembered]:
    """The file in the user's cache folder, open while the block runs."""
    file = (folder or user_cache_folder()) / NAME
    store = Remembered(_open(file), file)
    try:
        yield store
    finally:
        store.close()


def remembered_bytes(folder: Path) -> int:
    """What the file of a cache folder takes on the disk; 0 where there is none."""
    total = 0
    for name in (NAME, f"{NAME}-wal"):
        with contextlib.suppress(OSError):
            total += (folder / name).stat().st_size
    return total


def _is_writable(file: Path) -> bool:
    return os.access(file.parent, os.W_OK) and (not file.exists() or os.access(file, os.W_OK))


def _open_read_only(file: Path) -> sqlite3.Connection | None:
    """The file of a folder in which SQLite may not write its log; None where there is none, or one that is not whole."""
    connection = None
    try:
        log = file.with_name(f"{file.name}-wal")
        if file.is_file() and (not log.exists() or log.stat().st_size == 0):
            connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
            if connection.execute("PRAGMA user_version").fetchone()[0] == LAYOUT:
                return connection
    except (OSError, sqlite3.Error):
        pass  # it costs only time
    if connection is not None:
        connection.close()
    return None


def _open(file: Path) -> sqlite3.Connection | None:
    if file.parent.exists() and not _is_writable(file):
        return _open_read_only(file)
    for _ in range(2):
        connection = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(file, timeout=WAIT, isolation_level="DEFERRED")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            layout = connection.execute("PRAGMA user_version").fetchone()[0]
            if layout > LAYOUT:
                raise sqlite3.DatabaseError(f"layout {layout}")
            if layout < LAYOUT:
                # Headers of the first layout do not say how an image's colors are stored, those of the second have sizes
                # turned by XMP. Measures have numbers of their own.
                make = f"DROP TABLE IF EXISTS headers; {TABLES} PRAGMA user_version = {LAYOUT};"
                connection.executescript(f"BEGIN IMMEDIATE; {make} COMMIT;")
            return connection
        except (OSError, sqlite3.Error) as error:
            if connection is not None:
                connection.close()
            if not _is_damage(error):
                return None
            _put_aside(file)
    return None
