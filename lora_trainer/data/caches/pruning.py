"""A cache folder described and kept in order: its size, what killed runs left, and what is damaged."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.core.disk import size_words
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.io import user_cache_folder
from lora_trainer.data.caches.entries import is_sound
from lora_trainer.data.caches.files import (
    BESIDE_IMAGES,
    DAMAGED,
    ENTRY,
    IMAGES,
    KINDS,
    PART,
    entry_folders,
    former_files,
    is_cache,
    named,
)
from lora_trainer.data.caches.image_sets import SETS, half_written, list_sets, remove_set
from lora_trainer.data.caches.sharing import CLOCK_STEP, PRUNING, forget_ended, oldest_user, one_at_a_time
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
    damaged: int  # entries that were found damaged
    last_used: float | None


@dataclass(frozen=True)
class CacheStatus:
    """What a cache folder holds. `former` counts the files of earlier versions."""

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
                lines.append(f"  {name}: {size_words(kind.bytes)}, last used {used}")
            if kind.damaged:
                damaged = counted(kind.damaged, "damaged entry", "damaged entries")
                lines.append(f"  {name}: {damaged}; `cache prune` removes them")
        if self.former:
            lines.append(
                f"  {_files(self.former)} of an earlier version, which nothing reads; `cache prune` removes them"
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
    """Count what is there; a folder that does not exist is empty."""
    kinds = {kind: _kind_status(folder, kind) for kind in KINDS}
    unpacked = sum(size for _, size, _ in _unpacked(folder))
    in_use, known = oldest_user(folder) is not None, remembered_bytes(folder)
    sets = tuple(size for _, size, _ in list_sets(folder))
    return CacheStatus(folder, kinds, len(former_files(folder)), in_use, unpacked, known, sets)


def _kind_status(folder: Path, kind: str) -> KindStatus:
    found = [*_entries(folder, kind)]
    sound = [(size, last) for path, size, last in found if path.suffix != DAMAGED]
    last_used = max((last for _, last in sound), default=None)
    return KindStatus(len(sound), sum(size for size, _ in sound), len(found) - len(sound), last_used)


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
            damaged = counted(self.damaged, "damaged entry", "damaged entries")
            lines.append(f"{damaged} removed, to be built again by the next run")
        if self.needed is not None:
            lines.append(
                f"{size_words(self.needed)} are in use, above the limit of {size_words(self.limit)}: they are kept"
            )
        return lines


def cache_clean(folder: Path, limit: int = DEFAULT_LIMIT, *, verify: bool = False) -> Cleaned:
    """Put a cache in order.

    Removes what killed runs left, files of earlier versions, entries that were found damaged, with `verify` each entry
    whose digest differs, then the least recently used entries above `limit` bytes. What a living run uses stays, and
    so do files that this program did not make. Raises UsageError for a folder that is no cache.
    """
    if not folder.is_dir():
        return Cleaned(0, 0, 0, limit)
    if not is_cache(folder):
        if folder == user_cache_folder():
            return Cleaned(0, 0, 0, limit)
        fix = "Name one that was filled by lora-trainer, or none for the user's own; nothing was removed."
        raise UsageError(Problem("not_a_cache", f"{folder} is no cache of lora-trainer.", fix))
    removed, before = 0, _bytes_in(folder)
    with one_at_a_time(folder / PRUNING):
        forget_ended(folder)
        since = oldest_user(folder)
        for blob, _, last in list(_unpacked(folder)):
            if since is None or last < since - CLOCK_STEP:
                removed += remove_unpacked(blob) > 0
        for listing in old_listings(folder, time.time() if since is None else since):
            removed += _unlinked(listing) + _unlinked(listing.with_suffix(ENDING)) > 0
        leavings = [*_abandoned(folder), *former_files(folder)]
        beside = named(folder / UNPACKED, BESIDE_IMAGES)
        leavings += [path for path in beside if not path.with_suffix(".images").exists()]
        if verify:
            _put_damaged_aside(folder)
        damaged = [path for kind in KINDS for path, _, _ in _entries(folder, kind) if path.suffix == DAMAGED]
        removed += sum(map(_unlinked, (*leavings, *damaged)))
    with contextlib.suppress(OSError):
        (folder / "building").rmdir()
    if remembered_bytes(folder):
        with remembered(folder) as store:
            store.prune()
    kept = keep_limit(folder, limit)
    after = _bytes_in(folder)
    return Cleaned(removed + kept.removed, before - after, kept.left_bytes, limit, len(damaged), kept.needed)


def keep_limit(folder: Path, limit: int) -> Cleaned:
    """Remove the least recently used entries, unpacked images and sets of class images above `limit` bytes, but none that a living run uses."""
    removed = removed_bytes = 0
    with one_at_a_time(folder / PRUNING):
        forget_ended(folder)
        since = oldest_user(folder)
        entries = (entry for kind in KINDS for entry in _entries(folder, kind))
        found = [*entries, *_former(folder), *_unpacked(folder), *list_sets(folder)]
        found.sort(key=lambda entry: entry[2])
        left = sum(size for _, size, _ in found)
        used = sum(size for _, size, last in found if since is not None and last >= since - CLOCK_STEP)
        for path, _, last in found:
            if left <= limit or (since is not None and last >= since - CLOCK_STEP):
                break
            if size := _remove(path):
                removed, removed_bytes, left = removed + 1, removed_bytes + size, left - size
    return Cleaned(removed, removed_bytes, left, limit, needed=used if used > limit else None)


def _remove(path: Path) -> int:
    """Remove what the limit counts as one; the bytes that were freed."""
    if path.parent.name == SETS:
        return remove_set(path)
    if IMAGES.fullmatch(path.name):
        return remove_unpacked(path)
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        path.unlink()
        return size
    return 0


def _entries(folder: Path, kind: str) -> Iterator[tuple[Path, int, float]]:
    """(path, bytes, time of last use) of each entry, damaged ones too; those that vanish meanwhile are passed over."""
    for place in entry_folders(folder, kind):
        with contextlib.suppress(OSError), os.scandir(place) as files:
            for file in files:
                if ENTRY.fullmatch(file.name):
                    with contextlib.suppress(OSError):
                        facts = file.stat(follow_symlinks=False)
                        yield place / file.name, facts.st_size, facts.st_mtime


def _former(folder: Path) -> Iterator[tuple[Path, int, float]]:
    for path in former_files(folder):
        with contextlib.suppress(OSError):
            facts = path.stat()
            yield path, facts.st_size, facts.st_mtime


def _put_damaged_aside(folder: Path) -> None:
    """Read every entry; those that are damaged count as such from then on."""
    for kind in KINDS:
        for path, _, _ in _entries(folder, kind):
            if path.suffix != DAMAGED:
                is_sound(folder, kind, path.stem)


def _unpacked(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """(path, bytes, time of last use) of images out of Parquet files, which a run that needs them lays out again."""
    for path in named(folder / UNPACKED, IMAGES):
        with contextlib.suppress(OSError):
            yield path, path.stat().st_size, last_used(path)


def _abandoned(folder: Path) -> list[Path]:
    """Half-written files: all when nobody is at work, else those that are old."""
    idle = oldest_user(folder) is None
    places = [place for kind in KINDS for place in entry_folders(folder, kind)]
    parts = [part for place in (*places, folder / UNPACKED) for part in named(place, PART)]
    found = []
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
        path for place in (*KINDS, UNPACKED, REMOTE, SETS) for path in (folder / place).rglob("*")
    )
    total = remembered_bytes(folder)
    for path in places:
        with contextlib.suppress(OSError):
            if path.is_file():
                total += path.stat().st_size
    return total
