"""Small shards into large ones, so that a million entries are few files.

Each batch that is encoded is a small shard at once. Packing writes the large one before it
removes the small ones: a process that is killed in between leaves duplicate keys.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lora_trainer.core.io import flush_folder
from lora_trainer.data.caches.claims import upkeep
from lora_trainer.data.caches.ours import KEY_BYTES
from lora_trainer.data.caches.shards import ENDING, DamagedError, Layout, Rows, Shard, write_shard
from lora_trainer.data.caches.store import MARK

SMALL = 64 * 2**20  # bytes; shards below this are packed together
LARGE = 2 * SMALL  # bytes; a packed shard is filled up to here


def pack(folder: Path, kind: str, paths: Iterable[Path]) -> int:
    """Pack the shards below SMALL among `paths`, those of one layout together; how many files this saved.

    Damaged rows and second copies stay behind. A disk that refuses leaves everything as it was.
    """
    saved = 0
    with contextlib.suppress(OSError), upkeep(folder):
        by_layout: dict[Layout, list[Path]] = defaultdict(list)
        for path in sorted(set(paths)):
            with contextlib.suppress(OSError, DamagedError):
                if path.stat().st_size < SMALL:
                    by_layout[Shard(path).layout].append(path)
        for layout, found in by_layout.items():
            for group in _together(found):
                with contextlib.suppress(OSError, DamagedError):
                    saved += rewrite(folder / kind, layout, group)
    return saved


def _together(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Groups of at least two that fill a large shard."""
    group: list[Path] = []
    size = 0
    for path in paths:
        group.append(path)
        size += path.stat().st_size
        if size >= SMALL:
            if len(group) > 1:
                yield group
            group, size = [], 0
    if len(group) > 1:
        yield group


def rewrite(folder: Path, layout: Layout, paths: Sequence[Path]) -> int:
    """Replace shards of one layout by one with their sound rows, each key once. Raises OSError, DamagedError."""
    seen: set[bytes] = set()
    parts: list[Rows] = []
    used = 0.0
    for path in paths:
        shard = Shard(path)
        used = max(used, shard.used)
        fresh = []
        for row in shard.sound_rows():
            if (key := shard.keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]) not in seen:
                seen.add(key)
                fresh.append(row)
        if fresh:
            parts.append(shard.rows(fresh))
    if parts:
        os.utime(write_shard(folder, layout, parts), (used, used))
    parts.clear()  # Windows removes no file that is mapped
    for path in paths:
        remove(path)
    flush_folder(folder)
    return len(paths) - 1


def remove(path: Path) -> int:
    """Remove a shard with its marks; the bytes that this freed."""
    size = 0
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        path.unlink()
    for mark in path.parent.glob(path.name.removesuffix(ENDING) + MARK + "*"):
        with contextlib.suppress(OSError):
            mark.unlink()
    return size
