"""The headers of many images, read side by side and remembered: 100,000 in seconds.

For each image its size as it is seen, its format, its frames and the hash of its bytes,
all from one reading of the file. They are stored in the user's cache folder and read from
there while the file's directory entry is unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import UsageError
from lora_trainer.data.images.images import BrokenImageError
from lora_trainer.data.images.jobs import Facts
from lora_trainer.data.images.measures import MEASURES
from lora_trainer.data.images.remembered import FilePlace, Kept, Remembered, Stamp, remembered, stamp_of
from lora_trainer.data.images.remote import RemoteError, is_pointer, shown_place
from lora_trainer.data.images.workers import Progress, Task, Ticker, run_tasks

if TYPE_CHECKING:
    from lora_trainer.data.sample import Span

KEEP_AT_ONCE = 4000  # headers written together
HEADER_SECONDS = 30.0
REMOTE_SECONDS = 300.0  # with repetitions of a connection that fails
PIXELS_A_BYTE = 4  # of a JPEG, or fewer; a remote image is decoded too, and how large it is is not known before


def read_headers(
    places: Sequence[tuple[Path, Span | None]], progress: Progress | None = None
) -> list[Facts | BrokenImageError]:
    """The facts of every image in order, or why there are none. A span names a part of a larger file.

    Raises UsageError where a server does not send them.
    """
    found: list[Facts | BrokenImageError | None] = [None] * len(places)
    ticker = Ticker(progress, len(places))
    keys = [_key(path, span) for path, span in places]
    with remembered() as store:
        known = store.headers(keys)
        stamps: dict[bytes, Stamp | None] = {}
        for number, key in enumerate(keys):
            if (kept := known.get(key)) is not None and kept.stamp == _stamp(key.path, stamps):
                size = kept.stamp.size if key.length < 0 else key.length
                values = (kept.width, kept.height, kept.format, kept.frames, kept.content, size)
                found[number] = Facts(*values, kept.colors, kept.has_alpha)
        left = [number for number, facts in enumerate(found) if facts is None]
        ticker.step(len(places) - len(left))
        _read(left, keys, found, store, ticker)
    return [facts if facts is not None else lost("crashed") for facts in found]


def _read(
    left: Sequence[int],
    keys: Sequence[FilePlace],
    found: list[Facts | BrokenImageError | None],
    store: Remembered,
    ticker: Ticker,
) -> None:
    """Read what is not remembered into `found`, and remember it. Raises UsageError for a server that is away."""
    fresh: dict[FilePlace, Kept] = {}
    measured: dict[str, str] = {}
    tasks = []
    for number in left:
        path = os.fsdecode(keys[number].path)
        remote = is_pointer(Path(path))
        seconds, pixels = (REMOTE_SECONDS, PIXELS_A_BYTE * keys[number].length) if remote else (HEADER_SECONDS, 0)
        tasks.append(Task([path, *keys[number][1:]], pixels, seconds))
    away: UsageError | None = None
    for number, result in run_tasks("facts", tasks):
        place = left[number]
        if away := not_sent(tasks[number], result):
            break
        found[place] = facts = facts_from(result)
        if isinstance(facts, Facts) and result["stamp"] is not None:
            values = (facts.content, facts.width, facts.height, facts.format, facts.frames)
            fresh[keys[place]] = Kept(Stamp(*result["stamp"]), *values, facts.colors, facts.has_alpha)
        if isinstance(facts, Facts) and "seen" in result:
            measured[facts.content] = result["seen"]
        if len(fresh) >= KEEP_AT_ONCE:
            store.keep_headers(fresh)
            store.keep_measures(measured, MEASURES)
            fresh.clear()
            measured.clear()
        ticker.step()
    store.keep_headers(fresh)
    store.keep_measures(measured, MEASURES)
    if away is not None:
        raise away


def not_sent(task: Task, result: Any) -> UsageError | None:
    """The problem of a source whose server did not send an image; None for any other result of a worker."""
    place = Path(task.what[0])
    if isinstance(result, dict) and "remote" in result:
        return UsageError(RemoteError(*result["remote"]).problem_of(shown_place(place)))
    if result == "hung" and is_pointer(place):
        return UsageError(RemoteError(f"no answer in {task.seconds:.0f} s").problem_of(shown_place(place)))
    return None


def _key(path: Path, span: Span | None) -> FilePlace:
    if span is None:
        return FilePlace(os.fsencode(os.path.abspath(path)), 0, -1)
    return FilePlace(os.fsencode(os.path.abspath(span.file)), span.offset, span.size)


def _stamp(path: bytes, stamps: dict[bytes, Stamp | None]) -> Stamp | None:
    if path not in stamps:
        try:
            stamps[path] = stamp_of(os.stat(path))
        except OSError:
            stamps[path] = None
    return stamps[path]


def facts_from(result: Any) -> Facts | BrokenImageError:
    """Facts, or an error, from a worker's result."""
    if isinstance(result, str):
        return lost(result)
    if "broken" in result:
        return BrokenImageError(*result["broken"])
    return Facts(*result["facts"])


def lost(how: str) -> BrokenImageError:
    """An image that ended its worker process, or kept it busy for too long."""
    what = "takes too long to be read" if how == "hung" else "crashes its decoder"
    return BrokenImageError("unreadable", f"{what}.", "Replace or remove it.")
