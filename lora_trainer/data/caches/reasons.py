"""What was cached for which source, so that rebuilding can be explained.

    FOLDER/index.sqlite      a row of hashes for each entry that a source ever had: about 90 bytes

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
drop table if exists facts;
drop table if exists plans;
create table if not exists known (source blob, hashes blob, primary key (source, hashes)) without rowid;
create table if not exists filled (digest blob primary key) without rowid;
"""


def recall(folder: Path, kind: str, sources: Sequence[str]) -> dict[str, list[bytes]]:
    """All hashes that are remembered of sources. Writes nothing."""
    found: dict[str, list[bytes]] = {}
    path = folder / FILE
    if not sources or not path.exists():
        return found
    with contextlib.suppress(sqlite3.Error), _connected(f"{path.resolve().as_uri()}?mode=ro") as index:
        for start in range(0, len(sources), AT_ONCE):
            named = {_name(kind, source): source for source in sources[start : start + AT_ONCE]}
            holes = ",".join("?" * len(named))
            rows = index.execute(f"select source, hashes from known where source in ({holes})", list(named))
            for name, hashes in rows:
                found.setdefault(named[name], []).append(hashes)
    return found


def remember(folder: Path, kind: str, digest: bytes, described: Iterable[tuple[str, Mapping[str, str]]]) -> None:
    """Keep the hashes of each source's facts, unless this digest says that all of them were kept before."""
    path = folder / FILE
    for _ in range(2):
        try:
            with _connected(f"{path.resolve().as_uri()}?mode=rwc") as index:
                index.execute("pragma journal_mode=wal")
                index.executescript(TABLES)
                if index.execute("select 1 from filled where digest = ?", [digest]).fetchone():
                    return
                rows = ((_name(kind, source), hashes_of(record)) for source, record in described)
                index.executemany("insert or ignore into known values (?, ?)", rows)
                index.execute("insert or ignore into filled values (?)", [digest])
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


def changed(before: Sequence[bytes], record: Mapping[str, str]) -> set[str]:
    """The names whose values differ from what is remembered, of several the most alike; all where nothing is."""
    names, now = sorted(record), hashes_of(record)
    digests = range(0, len(now), HASH)
    differing = [
        {name for name, at in zip(names, digests, strict=True) if each[at : at + HASH] != now[at : at + HASH]}
        for each in before
        if len(each) == len(now)
    ]
    return min(differing, key=len, default=set(names))


def _name(kind: str, source: str) -> bytes:
    return _hash(f"{kind}\0{source}", 16)


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
