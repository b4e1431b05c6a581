"""What repeats from image to image: overlays at one place, and series of frames."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lora_trainer.core.findings import Finding
from lora_trainer.data.alike import find_series
from lora_trainer.data.images.measures import CELLS_SIDE
from lora_trainer.dataset_check.context import CheckContext, beside

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEWEST_OVERLAID = 12  # distinct images; of fewer some share an edge by chance
MOST_OVERLAID = 400  # images compared
OVERLAY_SHARE = 0.6  # images with an edge there, less those with the opposite one
OVERLAY_CELLS = 8  # connected cells with such an edge; in sets of 12 photographs 2 at most were
EDGE_STEP = 6  # gray levels between two cells that are an edge
REACH = 2  # cells between two that are connected
WHOLE = 0.5  # share of a side from which on it is more than an overlay
ORDER = re.compile(r"(\d+)")


def check_repeated(context: CheckContext) -> list[Finding]:
    """Overlays and series: both are notes, since a background or a subject may be at one place on purpose."""
    return [*_overlays(context), *_series(context)]


def _overlays(context: CheckContext) -> list[Finding]:
    """A watermark, a logo or a program's bars: edges of one sign at the same place of most images.

    In images that show different things, the signs of the steps at one place are as good as random.
    """
    leaders = context.alike.leaders
    maps = {
        sample.content: context.seen[place].cells
        for place, sample in enumerate(context.samples)
        if context.seen[place].cells and leaders.get(place, place) == place and not sample.regularization
    }
    if len(maps) < FEWEST_OVERLAID:
        return []
    chosen = list(maps.values())[:: -(-len(maps) // MOST_OVERLAID)]
    gray = np.frombuffer(b"".join(chosen), dtype=np.uint8).reshape(-1, CELLS_SIDE, CELLS_SIDE).astype(np.int16)
    steps = [np.diff(gray, axis=2, append=gray[:, :, -1:]), np.diff(gray, axis=1, append=gray[:, -1:])]
    # 1 where gray rises from a cell to its right and its lower neighbor [N, 2, 64, 64], -1 where it falls.
    signs = np.stack([np.sign(each) * (np.abs(each) > EDGE_STEP) for each in steps], axis=1).astype(np.int8)
    means = signs.mean(axis=0, dtype=np.float32)
    region = _largest(np.asarray((np.abs(means) >= OVERLAY_SHARE).any(axis=0)))
    if region.sum() < OVERLAY_CELLS:
        return []
    there = (np.abs(means) >= OVERLAY_SHARE) & region
    like = (signs[:, there] == np.sign(means[there])).mean(axis=1) >= 0.5
    rows, columns = (np.flatnonzero(region.any(axis=axis)) for axis in (1, 0))
    height, width = ((np.ptp(each) + 1) / CELLS_SIDE for each in (rows, columns))
    message = (
        f"{int(like.sum())} of {len(signs)} images have the same edges at one place ({_place(rows, columns)}, about "
        f"{width:.0%} x {height:.0%} of the image): "
    )
    if min(width, height) > WHOLE:
        message += "one background, or a subject that is always at the same place."
        return [Finding("repeated_place", "note", message, "Vary the place and the background, or keep it on purpose.")]
    message += "a watermark, a logo, a program's bars, or a subject that is always at the same place."
    fix = "Cut off or retouch a mark: it is learned as part of all images. A subject may stay, or vary its place."
    return [Finding("repeated_overlay", "note", message, fix)]


def _largest(cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The largest group of cells [64, 64] in which each is at most REACH from another."""
    left, best = cells.copy(), np.zeros_like(cells)
    for row, column in np.argwhere(cells).tolist():
        if not left[row, column]:
            continue
        group, waiting = np.zeros_like(cells), [(row, column)]
        left[row, column] = False
        while waiting:
            y, x = waiting.pop()
            group[y, x] = True
            top, start = max(0, y - REACH), max(0, x - REACH)
            window = left[top : y + REACH + 1, start : x + REACH + 1]
            waiting += [(top + down, start + along) for down, along in np.argwhere(window).tolist()]
            window[:] = False
        best = max(best, group, key=np.count_nonzero)
    return best


def _place(rows: NDArray[np.intp], columns: NDArray[np.intp]) -> str:
    """Where the cells are, in words: `bottom right`."""
    down, along = ((each[0] + each[-1] + 1) / 2 / CELLS_SIDE for each in (rows, columns))
    names = (
        "top" if down < 1 / 3 else "bottom" if down > 2 / 3 else "",
        "left" if along < 1 / 3 else "right" if along > 2 / 3 else "",
    )
    return " ".join(filter(None, names)) or "middle"


def _series(context: CheckContext) -> list[Finding]:
    """Frames of one shot, by the order of their names."""
    found = []
    folders: dict[Path, list[int]] = {}
    first_places = {sample.content: place for place, sample in reversed(list(enumerate(context.samples)))}
    for place in sorted(first_places.values()):
        if not context.samples[place].regularization:
            folders.setdefault(context.samples[place].path.parent, []).append(place)
    known = {place: group[0] for group in context.alike.groups for place in group}
    for folder in folders.values():
        places = sorted(folder, key=lambda place: _name_order(context.samples[place].path))
        for run in find_series([context.seen[place] for place in places]):
            series = [places[each] for each in run]
            if len({known.get(place, -1 - place) for place in series}) == 1:
                continue  # named as images that look the same
            first, last = (context.samples[place].path for place in (series[0], series[-1]))
            message = f"begins a series of {len(series)} images that hardly change from one to the next (to {beside(last, first)})."
            fix = "Keep those that differ most: the others are trained as repeats of one image."
            found.append(Finding("series", "note", message, fix, path=first))
    return found


def _name_order(path: Path) -> tuple[tuple[int, str], ...]:
    """By which `frame_9` comes before `frame_10`."""
    parts = ORDER.split(path.name)  # every second one is a number
    return tuple((int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts))
