"""A cache folder described and kept in order: its size, what killed runs left, and what is damaged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.core.disk import size_words
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.io import user_cache_folder
from lora_trainer.data.caches.claims import CLOCK_STEP, forget_dead, oldest_user, upkeep
from lora_trainer.data.caches.image_sets import SETS, half_written, list_sets, remove_set
from lora_trainer.data.caches.ours import (
    DAMAGE,
    FORMER,
    FORMER_FOLDER,
    FORMER_INDEX,
    IMAGES,
    IMAGES_INDEX,
    PART,
    SHARD,
    is_cache,
    named,
)
from lora_trainer.data.caches.packing import pack, remove, rewrite
from lora_trainer.data.caches.shards import is_foreign
from lora_trainer.data.caches.store import KINDS, MARK, Shelf
from lora_trainer.data.images.remembered import remembered, remembered_bytes
from lora_trainer.data.images.remote import ENDING
from lora_trainer.data.sources.parquet import UNPACKED, last_used, remove_unpacked
from lora_trainer.data.sources.remote import FOLDER as REMOTE
from lora_trainer.data.sources.remote import old_listings

DEFAULT_LIMIT = 50 * 10**9  # bytes on disk
ABANDONED_AFTER = 3600.0  # seconds until a half-written file may be removed although a run is using the cache


@dataclass(frozen=True)
class KindStatus:
    """Entries of one kind. `last_used` in seconds since 1970, None where there are none."""

    entries: int
    bytes: int
    shards: int
    damaged: int  # shards whose header is damaged
    last_used: float | None


@dataclass(frozen=True)
class CacheStatus:
    """What a cache folder holds. `former` counts the files of the layout with one file for each entry."""

    folder: Path
    kinds: dict[str, KindStatus]
    former: int
    in_use: bool
    unpacked: int = 0  # bytes of images out of Parquet files
    remembered: int = 0  # bytes of what is known of images that were read before
    class_images: tuple[int, ...] = ()  # bytes of each set

    @property
    def bytes(self) -> int:
        return sum(kind.bytes for kind in self.kinds.values())

    @property
    def counts(self) -> dict[str, int]:
        return {name: kind.entries for name, kind in self.kinds.items()}

    @property
    def lines(self) -> list[str]:
        listed = ", ".join(counted(count, kind.removesuffix("s")) for kind, count in self.counts.items())
        lines = [f"{self.folder}: {listed}, {size_words(self.bytes)}"]
        for name, kind in self.kinds.items():
            if kind.last_used is not None:
                used = time.strftime("%Y-%m-%d %H:%M", time.localtime(kind.last_used))
                lines.append(f"  {name}: {size_words(kind.bytes)} in {_files(kind.shards)}, last used {used}")
            if kind.damaged:
                lines.append(f"  {name}: {_files(kind.damaged)} cannot be read; `cache prune` removes them")
        if self.former:
            lines.append(
                f"  {_files(self.former)} of a former version, which nothing reads; `cache prune` removes them"
            )
        if self.unpacked:
            lines.append(f"  {size_words(self.unpacked)} of images out of Parquet files; `cache prune` removes them")
        if self.class_images:
            sets = counted(len(self.class_images), "set")
            lines.append(f"  {size_words(sum(self.class_images))} of class images in {sets}")
        if self.remembered:
            lines.append(f"  {size_words(self.remembered)} about images that were read before")
        if self.in_use:
            lines.append("  in use by a run now")
        return lines

    def to_json(self) -> dict[str, object]:
        kinds = {name: vars(kind) for name, kind in self.kinds.items()}
        return {
            "folder": str(self.folder),
            "counts": self.counts,
            "bytes": self.bytes,
            "kinds": kinds,
            "former": self.former,
            "in_use": self.in_use,
            "unpacked_bytes": self.unpacked,
            "remembered_bytes": self.remembered,
            "class_image_sets": len(self.class_images),
            "class_image_bytes": sum(self.class_images),
        }


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def cache_status(folder: Path) -> CacheStatus:
    """Count what is there, from the shards' headers; a folder that does not exist is empty."""
    kinds = {}
    for kind in KINDS:
        shelf = Shelf(folder, kind)
        shards = shelf.shards()
        used = max((shard.used for shard in shards), default=None)
        total = sum(shard.bytes for shard in shards)
        kinds[kind] = KindStatus(len(shelf), total, len(shards), len(shelf.damaged), used)
    unpacked = sum(size for _, size, _ in _unpacked(folder))
    in_use, known = oldest_user(folder) is not None, remembered_bytes(folder)
    sets = tuple(size for _, size, _ in list_sets(folder))
    return CacheStatus(folder, kinds, len(list(_former(folder))), in_use, unpacked, known, sets)


@dataclass(frozen=True)
class Cleaned:
    """What was removed and left. `needed` is what living runs use, where that alone is above the limit."""

    removed: int
    removed_bytes: int
    left_bytes: int
    limit: int
    damaged: int = 0  # entries that were found damaged
    needed: int | None = None

    @property
    def lines(self) -> list[str]:
        removed = f"{_files(self.removed)} removed ({size_words(self.removed_bytes)})"
        lines = [f"{removed}, {size_words(self.left_bytes)} left"]
        if self.damaged:
            lines.append(f"{self.damaged} damaged entries removed; the next run builds them anew")
        if self.needed is not None:
            lines.append(
                f"{size_words(self.needed)} are in use, above the limit of {size_words(self.limit)}: they are kept"
            )
        return lines


def cache_clean(folder: Path, limit: int = DEFAULT_LIMIT, *, verify: bool = False) -> Cleaned:
    """Put a cache in order.

    Removes what killed runs left, shards that cannot be read, files of the former layout,
    with `verify` each entry whose checksum differs, then the least recently used shards
    above `limit` bytes. What a living run uses stays. Packs small shards. Files that this
    program did not make stay too. Raises UsageError for a folder that is no cache.
    """
    if not folder.is_dir():
        return Cleaned(0, 0, 0, limit)
    if not is_cache(folder):
        if folder == user_cache_folder():
            return Cleaned(0, 0, 0, limit)
        fix = "Name one that was filled by lora-trainer, or none for the user's own; nothing was removed."
        raise UsageError(Problem("not_a_cache", f"{folder} is no cache of lora-trainer.", fix))
    removed, damaged = 0, 0
    before = _bytes_in(folder)
    with upkeep(folder):
        forget_dead(folder)
        since = oldest_user(folder)
        leavings = [*_abandoned(folder), *_former(folder)]
        for blob, _, last in list(_unpacked(folder)):
            if since is None or last < since - CLOCK_STEP:
                removed += remove_unpacked(blob) > 0
        for listing in old_listings(folder, time.time() if since is None else since):
            removed += _unlinked(listing) + _unlinked(listing.with_suffix(ENDING)) > 0
        places = folder / UNPACKED
        leavings += [path for path in named(places, IMAGES_INDEX) if not path.with_suffix(".images").exists()]
        for kind in KINDS:
            leavings += [folder / kind / name for name in Shelf(folder, kind).damaged]
            leavings += _stray_marks(folder / kind)
        removed += sum(_unlinked(path) for path in leavings)
        for kind in KINDS:
            damaged += _without_damage(folder, kind, verify=verify)
    for emptied in (*(path for kind in KINDS for path in _former_folders(folder / kind)), folder / "index"):
        with contextlib.suppress(OSError):
            emptied.rmdir()
    for kind in KINDS:
        pack(folder, kind, [shard.path for shard in Shelf(folder, kind).shards()])
    if remembered_bytes(folder):
        with remembered(folder) as store:
            store.prune()
    kept = keep_limit(folder, limit)
    after = _bytes_in(folder)
    return Cleaned(removed + kept.removed, before - after, kept.left_bytes, limit, damaged, kept.needed)


def keep_limit(folder: Path, limit: int) -> Cleaned:
    """Remove the least recently used shards, unpacked images and sets of class images above `limit` bytes, but none that a living run uses."""
    removed = removed_bytes = 0
    with upkeep(folder):
        forget_dead(folder)
        since = oldest_user(folder)
        shards = sorted([*_shards(folder), *_unpacked(folder), *list_sets(folder)], key=lambda entry: entry[2])
        left = sum(size for _, size, _ in shards)
        used = sum(size for _, size, last in shards if since is not None and last >= since - CLOCK_STEP)
        for path, _, last in shards:
            if left <= limit or (since is not None and last >= since - CLOCK_STEP):
                break
            if size := _remove(path):
                removed, removed_bytes, left = removed + 1, removed_bytes + size, left - size
    return Cleaned(removed, removed_bytes, left, limit, needed=used if used > limit else None)


def _remove(path: Path) -> int:
    """Remove what the limit counts as one; the bytes that were freed."""
    if path.parent.name == SETS:
        return remove_set(path)
    return remove_unpacked(path) if IMAGES.fullmatch(path.name) else remove(path)


def _shards(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """(path, bytes, time of last use) of each shard; those that vanish meanwhile are passed over."""
    for kind in KINDS:
        for path in named(folder / kind, SHARD):
            with contextlib.suppress(OSError):
                if is_foreign(path):
                    continue
                facts = path.stat()
                yield path, facts.st_size, facts.st_mtime


def _without_damage(folder: Path, kind: str, *, verify: bool) -> int:
    """Rewrite shards without their damaged rows; how many rows. Known ones only, unless all are read."""
    found = 0
    for shard in Shelf(folder, kind).shards():
        marks = list(shard.path.parent.glob(shard.path.stem + MARK + "*"))
        if not marks and not verify:
            continue
        with contextlib.suppress(OSError):
            lost = shard.count - len(shard.sound_rows())
            if lost:
                found += lost
                path, layout = shard.path, shard.layout
                del shard
                rewrite(folder / kind, layout, [path])
            else:
                sum(_unlinked(mark) for mark in marks)  # a read error that did not repeat
    return found


def _stray_marks(folder: Path) -> list[Path]:
    return [
        mark for mark in named(folder, DAMAGE) if not (folder / (mark.name.split(MARK)[0] + ".safetensors")).exists()
    ]


def _former(folder: Path) -> Iterator[Path]:
    """Files of the layout that had one file for each entry."""
    for kind in KINDS:
        for place in _former_folders(folder / kind):
            yield from named(place, FORMER)
    yield from named(folder / "index", FORMER_INDEX)


def _former_folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("??") if FORMER_FOLDER.fullmatch(path.name) and path.is_dir()]


def _unpacked(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """(path, bytes, time of last use) of images out of Parquet files, which a run that needs them lays out again."""
    for path in named(folder / UNPACKED, IMAGES):
        with contextlib.suppress(OSError):
            yield path, path.stat().st_size, last_used(path)


def _abandoned(folder: Path) -> list[Path]:
    """Half-written files: all when nobody is at work, else those that are old."""
    idle = oldest_user(folder) is None
    found = []
    parts = [part for place in (*KINDS, UNPACKED) for part in named(folder / place, PART)]
    for part in [*parts, *half_written(folder)]:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > (CLOCK_STEP if idle else ABANDONED_AFTER):
                found.append(part)
    return found


def _unlinked(path: Path) -> int:
    try:
        path.unlink()
    except OSError:
        return 0
    return 1


def _bytes_in(folder: Path) -> int:
    """Bytes of what this keeps in order: a cache folder may hold other things too."""
    places: Iterable[Path] = (
        path for place in (*KINDS, "index", UNPACKED, REMOTE, SETS) for path in (folder / place).rglob("*")
    )
    total = remembered_bytes(folder)
    for path in places:
        with contextlib.suppress(OSError):
            if path.is_file():
                total += path.stat().st_size
    return total
