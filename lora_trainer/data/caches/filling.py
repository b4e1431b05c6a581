"""Building what is missing in a cache. The processes of a run divide the list; two runs may build the same entry twice.

Each entry is whole on the disk when its batch is encoded, so a kill loses the batches in hand and nothing else.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lora_trainer.core.disk import CLOSED, what_helps, write_with_retry
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.hardware import available_cpus
from lora_trainer.data.caches.entries import mark_used, write_entries
from lora_trainer.data.caches.files import entry_path

MOST_WORKERS = 8
MOST_AGAIN = 64  # entries that are there and are encoded again for the sake of those beside them
UNWRITABLE = CLOSED | {errno.ENOTDIR, errno.EEXIST}  # EEXIST: a file is there

Prepared = TypeVar("Prepared")
Progress = Callable[[int, int], None]  # (entries done, entries to build)


@dataclass(frozen=True)
class Share:
    """This process among those of a run that fill one folder, and how it waits for what the others build."""

    index: int = 0
    count: int = 1
    wait_until: Callable[[Callable[[], bool]], None] = lambda ready: None


ALONE = Share()


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
    share: Share = ALONE


def usual_workers() -> int:
    """One for each CPU that this process may use, at most eight."""
    return min(MOST_WORKERS, available_cpus())


def build_missing(work: Work[Prepared], progress: Progress | None = None) -> int:
    """Mark what is there as used, and build what is missing, until all of it is there; how many were built here.

    Raises TrainingFailed when the disk refuses or an encoder gives values that are not finite.
    """
    missing = set(work.keys) - mark_used(work.folder, work.kind, set(work.keys))
    if not missing:
        return 0
    show = progress or (lambda done, total: None)
    built = 0
    with closing(_prepared_ahead(work, own_batches(work, missing))) as batches:
        for places, prepared in batches:
            tensors = work.encode(places, prepared)
            rows = [row for row, place in enumerate(places) if work.keys[place] in missing]
            new = [places[row] for row in rows]
            _write(work, new, {name: tensor[rows] for name, tensor in tensors.items()})
            missing -= {work.keys[place] for place in new}
            built += len(new)
            show(built, built + len(missing))
    _wait_for_others(work, missing, built, show)
    return built


def own_batches(work: Work[Prepared], missing: set[str]) -> list[list[int]]:
    """What this process encodes, by the entries' places.

    All processes divide the whole list, with what is there: so it does not matter when each looked what is missing. A
    batch that is there in part, after a kill or damage, is encoded whole, because the last bits of an entry depend on
    those beside it. Where that would be too much work (images were added all over the list), only what is missing is.
    """
    first = {key: place for place, key in reversed(list(enumerate(work.keys)))}
    own = sorted(first.values())[work.share.index :: work.share.count]
    lacking = [batch for batch in _in_batches(work, own) if any(work.keys[place] in missing for place in batch)]
    again = sum(work.keys[place] not in missing for batch in lacking for place in batch)
    if again <= MOST_AGAIN:
        return lacking
    return _in_batches(work, [place for place in own if work.keys[place] in missing])


def _in_batches(work: Work[Prepared], places: Sequence[int]) -> list[list[int]]:
    """Places that may be encoded together, as many as a batch holds."""
    groups: dict[object, list[int]] = defaultdict(list)
    for place in places:
        groups[work.group(place)].append(place)
    return [
        group[start : start + work.batch] for group in groups.values() for start in range(0, len(group), work.batch)
    ]


def _prepared_ahead(
    work: Work[Prepared], batches: Sequence[list[int]]
) -> Generator[tuple[list[int], list[Prepared]], None, None]:
    """Each batch, prepared in threads ahead of its turn."""
    depth = 1 + -(-work.workers // work.batch)
    ahead: deque[tuple[list[int], list[Future[Prepared]]]] = deque()
    left = iter(batches)
    with ThreadPoolExecutor(work.workers, thread_name_prefix="decode") as pool:
        try:
            while True:
                while len(ahead) < depth and (places := next(left, None)) is not None:
                    ahead.append((places, [pool.submit(work.prepare, place) for place in places]))
                if not ahead:
                    return
                places, futures = ahead.popleft()
                yield places, [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _write(work: Work[Prepared], places: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
    """Write the entries of a batch. Raises TrainingFailed."""
    for row, place in enumerate(places):
        if not all(bool(torch.isfinite(tensor[row]).all()) for tensor in tensors.values()):
            message = f"The encoder gave values that are not finite for {work.name(place)}."
            raise TrainingFailed(
                Problem("encoding_not_finite", message, "Set memory.weight_dtype=fp32, or bf16 in place of fp16.")
            )

    size = sum(tensor.nbytes for tensor in tensors.values())
    what = f"{counted(len(places), 'entry', 'entries')} of the cache"
    write = partial(write_entries, work.folder, work.kind, [work.keys[place] for place in places], tensors)
    try:
        write_with_retry(what, work.folder, write, size)
    except OSError as error:
        raise refused(work.folder, error) from error


def _wait_for_others(work: Work[Prepared], missing: set[str], built: int, show: Progress) -> None:
    """Return when the entries are there that other processes of the run build."""
    others = sorted(missing)
    total = built + len(others)

    def are_there() -> bool:
        while others and entry_path(work.folder, work.kind, others[-1]).exists():
            others.pop()
        return not others

    if others:
        work.share.wait_until(are_there)
        show(total, total)


def refuse_unwritable(folder: Path, lacking: str, *, only_looks: bool = False) -> None:
    """Raise UsageError, before any work, for a cache that lacks what a run needs and that may not be written to."""
    try:
        if not only_looks:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
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
