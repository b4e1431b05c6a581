"""Building what is missing, by as many processes and runs as like to, each entry once.

A key is claimed before it is built, and looked for again after it was claimed, so that
nothing is built that somebody published meanwhile. What others have claimed is left for
later and waited for; if its owner dies, its claim is free and it is built here. Each batch
is durable when it is encoded, so a kill loses the batches in hand and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lora_trainer.core.disk import what_helps, write_with_retry
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.hardware import available_cpus
from lora_trainer.data.caches.claims import Claims, in_use, pauses, upkeep
from lora_trainer.data.caches.packing import SMALL, pack
from lora_trainer.data.caches.shards import Layout, layout_of
from lora_trainer.data.caches.store import Shelf, write_entries

MOST_WORKERS = 8
UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}

Prepared = TypeVar("Prepared")
Progress = Callable[[int, int], None]  # (entries done, entries to build)


@dataclass(frozen=True)
class Work(Generic[Prepared]):
    """What is built and how. Entries are named by their place in `keys`.

    `group` tells which of them may be encoded together. `prepare` is called in `workers`
    threads, ahead of `encode`, which gives tensors with B first.
    """

    folder: Path
    kind: str
    keys: Sequence[str]
    group: Callable[[int], object]
    prepare: Callable[[int], Prepared]
    encode: Callable[[list[int], list[Prepared]], Mapping[str, Tensor]]
    name: Callable[[int], str]  # for messages
    batch: int
    workers: int = 1
    start: float = 0.0  # share of the way at which this process begins, so that several seldom meet


def usual_workers() -> int:
    """One for each CPU that this process may use, at most eight."""
    return min(MOST_WORKERS, available_cpus())


def build_missing(work: Work[Prepared], progress: Progress | None = None) -> int:
    """Build what is missing until all of it is there, whoever builds it; how many were built here.

    Raises TrainingFailed when the disk refuses or an encoder gives values that are not finite.
    """
    shelf = mark_used(work)
    first = {key: place for place, key in reversed(list(enumerate(work.keys)))}
    places = sorted(place for key, place in first.items() if key not in shelf)
    if not places:
        return 0
    del shelf
    try:
        claims = Claims(work.folder)
    except OSError as error:
        raise refused(work.folder, error) from error
    with in_use(work.folder), claims:
        filling = _Filling(work, claims, places)
        try:
            filling.run(progress)
        finally:
            filling.pool.shutdown(wait=True, cancel_futures=True)
        pack(work.folder, work.kind, [shard.path for shard in Shelf(work.folder, work.kind, work.keys).used()])
        return filling.built


def mark_used(work: Work[Prepared]) -> Shelf:
    """Mark the shards of a run as used now, so that nobody removes them; what of them is there."""
    if not (work.folder / work.kind).is_dir():
        return Shelf(work.folder, work.kind, work.keys)
    with contextlib.ExitStack() as turn:
        with contextlib.suppress(OSError):  # a cache that may not be written to
            turn.enter_context(upkeep(work.folder))
        shelf = Shelf(work.folder, work.kind, work.keys)
        for shard in shelf.used():
            with contextlib.suppress(OSError):
                os.utime(shard.path)
    return shelf


def refuse_unwritable(folder: Path, lacking: str, *, only_looks: bool = False) -> None:
    """Raise UsageError, before any work, for a cache that lacks what a run needs and that may not be written to."""
    try:
        if not only_looks:
            with Claims(folder):
                return
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise refused(folder, error) from error
        reason = (error.strerror or str(error)).lower()
        message = f"The cache {folder} lacks {lacking} and cannot be written to ({reason})."
        fix = (
            "Set cache.dir to a folder that can be written to, or fill this cache where it can be: lora-trainer cache."
        )
        raise UsageError(Problem("cache_not_writable", message, fix)) from error


def refused(folder: Path, error: OSError) -> TrainingFailed:
    """The disk's no."""
    message = f"The cache {folder} cannot be written ({(error.strerror or str(error)).lower()})."
    return TrainingFailed(
        Problem("cache_not_writable", message, f"{what_helps(error)}, or set cache.dir to another disk.")
    )


class _Filling(Generic[Prepared]):
    """One process at work."""

    def __init__(self, work: Work[Prepared], claims: Claims, places: Sequence[int]) -> None:
        self.work = work
        self.claims = claims
        self.total = len(places)
        self.built = self.done = 0
        self.pool = ThreadPoolExecutor(work.workers, thread_name_prefix="decode")
        self.shelf = Shelf(work.folder, work.kind, [work.keys[place] for place in places])
        self.pending = _turned(_grouped(places, work.group), work.start)
        self.later: list[int] = []
        self.own: dict[Layout, list[Path]] = defaultdict(list)
        self.own_bytes: dict[Layout, int] = defaultdict(int)

    def run(self, progress: Progress | None) -> None:
        depth = 1 + -(-self.work.workers // self.work.batch)
        ahead: deque[tuple[list[int], list[Future[Prepared]]]] = deque()
        reported, waits = -1, pauses()
        while True:
            while len(ahead) < depth and (places := self.next_places()):
                ahead.append((places, [self.pool.submit(self.work.prepare, place) for place in places]))
            if ahead:
                places, futures = ahead.popleft()
                self.publish(places, self.work.encode(places, [future.result() for future in futures]))
                waits = pauses()
            elif self.later:
                time.sleep(next(waits))
                self.shelf.refresh()
                self.pending, self.later = _grouped(self.later, self.work.group), []
            if progress is not None and self.done != reported:
                reported = self.done
                progress(self.done, self.total)
            if not ahead and not self.pending and not self.later:
                return

    def next_places(self) -> list[int]:
        """The next batch, claimed; empty when nothing is left that nobody else builds."""
        keys = self.work.keys
        while self.pending:
            group = self.pending[0]
            mine: list[int] = []
            while group and len(mine) < self.work.batch:
                place = group.popleft()
                if keys[place] in self.shelf:
                    self.done += 1
                elif self.claims.take(keys[place]):
                    mine.append(place)
                else:
                    self.later.append(place)
            if not group:
                self.pending.popleft()
            if mine:
                self.shelf.refresh()  # somebody may have published it just before this claim
            for place in [place for place in mine if keys[place] in self.shelf]:
                self.claims.free(keys[place])
                mine.remove(place)
                self.done += 1
            if mine:
                return mine
        return []

    def publish(self, places: list[int], tensors: Mapping[str, Tensor]) -> None:
        """Make a batch durable, then free its claims."""
        work = self.work
        for row, place in enumerate(places):
            if not all(bool(torch.isfinite(tensor[row]).all()) for tensor in tensors.values()):
                message = f"The encoder gave values that are not finite for {work.name(place)}."
                raise TrainingFailed(
                    Problem("encoding_not_finite", message, "Set memory.weight_dtype=fp32, or bf16 in place of fp16.")
                )
        layout, keys = layout_of(tensors), [work.keys[place] for place in places]
        try:
            size = sum(tensor.nbytes for tensor in tensors.values())
            what = f"{len(keys)} {'entry' if len(keys) == 1 else 'entries'} of the cache"
            write = partial(write_entries, work.folder, work.kind, keys, tensors)
            path = write_with_retry(what, work.folder, write, size)
        except OSError as error:
            raise refused(work.folder, error) from error
        for key in keys:
            self.claims.free(key)
        self.built += len(places)
        self.done += len(places)
        self.own[layout].append(path)
        self.own_bytes[layout] += path.stat().st_size
        if self.own_bytes[layout] >= SMALL:
            pack(work.folder, work.kind, self.own.pop(layout))
            del self.own_bytes[layout]


def _grouped(places: Sequence[int], group: Callable[[int], object]) -> deque[deque[int]]:
    groups: dict[object, deque[int]] = defaultdict(deque)
    for place in places:
        groups[group(place)].append(place)
    return deque(groups.values())


def _turned(groups: deque[deque[int]], start: float) -> deque[deque[int]]:
    """The same entries, beginning at a share of the way."""
    skip = int(sum(map(len, groups)) * start)
    before: list[deque[int]] = []
    after: list[deque[int]] = []
    for group in groups:
        cut = min(skip, len(group))
        skip -= cut
        before.append(deque(_first(group, cut)))
        after.append(group)
    return deque(group for group in (*after, *before) if group)


def _first(group: deque[int], count: int) -> Iterator[int]:
    for _ in range(count):
        yield group.popleft()
