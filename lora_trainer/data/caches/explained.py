"""What was cached for which source, so that rebuilding can be explained.

    FOLDER/index.sqlite      a row of hashes for each source: about 90 bytes

It only explains: a missing, damaged or locked index counts as an empty one.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

FILE = "index.sqlite"
PATIENCE = 5.0  # seconds to wait for another writer
AT_ONCE = 500
HASH = 8  # bytes kept of each value

TABLES = """
create table if not exists facts (source blob primary key, hashes blob not null) without rowid;
create table if not exists plans (digest blob primary key) without rowid;
"""


def recall(folder: Path, kind: str, sources: Sequence[str]) -> dict[str, bytes]:
    """The hashes that are remembered of sources. Writes nothing."""
    found: dict[str, bytes] = {}
    path = folder / FILE
    if not sources or not path.exists():
        return found
    with contextlib.suppress(sqlite3.Error), _connected(f"{path.resolve().as_uri()}?mode=ro") as index:
        for start in range(0, len(sources), AT_ONCE):
            named = {_name(kind, source): source for source in sources[start : start + AT_ONCE]}
            holes = ",".join("?" * len(named))
            rows = index.execute(f"select source, hashes from facts where source in ({holes})", list(named))
            found |= {named[name]: hashes for name, hashes in rows}
    return found


def remember(folder: Path, kind: str, digest: bytes, described: Iterable[tuple[str, Mapping[str, str]]]) -> None:
    """Keep the hashes of each source's facts, unless all of them were kept before under this digest."""
    path = folder / FILE
    for _ in range(2):
        try:
            with _connected(f"{path.resolve().as_uri()}?mode=rwc") as index:
                index.execute("pragma journal_mode=wal")
                index.executescript(TABLES)
                if index.execute("select 1 from plans where digest = ?", [digest]).fetchone():
                    return
                rows = ((_name(kind, source), hashes_of(record)) for source, record in described)
                index.executemany("insert or replace into facts values (?, ?)", rows)
                index.execute("insert or ignore into plans values (?)", [digest])
                index.commit()
        except sqlite3.OperationalError:  # locked, or the disk refuses: explaining is not worth waiting longer
            return
        except sqlite3.DatabaseError:  # damaged: begin a new one
            for ending in ("", "-wal", "-shm"):
                path.with_name(FILE + ending).unlink(missing_ok=True)
            continue
        return


@contextlib.contextmanager
def _connected(address: str) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(address, timeout=PATIENCE, uri=True)
    try:
        yield connection
    finally:
        connection.close()


def hashes_of(record: Mapping[str, str]) -> bytes:
    """Eight bytes for each value, in the order of the names."""
    return b"".join(_hash(value, HASH) for _, value in sorted(record.items()))


def changed(before: bytes, record: Mapping[str, str]) -> set[str]:
    """The names whose values differ from those that were remembered; all of them if others were kept."""
    names = sorted(record)
    if len(before) != HASH * len(names):
        return set(names)
    now = hashes_of(record)
    pieces = range(0, len(now), HASH)
    return {name for name, at in zip(names, pieces, strict=True) if before[at : at + HASH] != now[at : at + HASH]}


def _name(kind: str, source: str) -> bytes:
    return _hash(f"{kind}\0{source}", 16)


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
