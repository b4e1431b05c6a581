"""Decode every image in full, by worker processes on all CPUs, and measure it.

The memory is flat: few large images or many small ones are decoded at once. Measures are
kept by content, so no image is decoded twice for this, wherever it lies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.data.images.measures import MASK_MEASURES, MEASURES, Seen, seen_broken, seen_from_json
from lora_trainer.data.images.remembered import Remembered, remembered
from lora_trainer.data.images.remote import is_pointer
from lora_trainer.data.images.scan import REMOTE_SECONDS, lost, not_sent
from lora_trainer.data.images.workers import Progress, Task, Ticker, run_tasks

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample

SECONDS = 60.0  # after which a decoder hangs, and one more for every PIXELS_A_SECOND
PIXELS_A_SECOND = 1_000_000
AT_ONCE = 2000  # measures read or written together


def measure_images(
    samples: Sequence[Sample], progress: Progress | None = None, *, are_masks: bool = False
) -> tuple[Seen, ...]:
    """The measures of each sample's image after a full decode, in order; broken ones say why.

    Of masks, those of the gray that training uses. Raises UsageError where a server does not send them.
    """
    version = MASK_MEASURES if are_masks else MEASURES
    first: dict[str, Sample] = {}
    for sample in samples:
        first.setdefault(sample.content, sample)
    ticker = Ticker(progress, len(first))
    with remembered() as store:
        seen = _known(first, version, store, ticker)
        left = [sample for content, sample in first.items() if content not in seen]
        with store.keeping(version, AT_ONCE) as keep:
            for sample, result in _decoded(left, "mask_seen" if are_masks else "seen"):
                seen[sample.content] = found = seen_from_json(result)
                if found.broken is None:
                    keep(sample.content, result)
                ticker.step()
    return tuple(seen[sample.content] for sample in samples)


def _known(samples: Mapping[str, Sample], version: int, store: Remembered, ticker: Ticker) -> dict[str, Seen]:
    """The measures of earlier runs, by content; a row that cannot be read counts as none."""
    known: dict[str, Seen] = {}
    contents = list(samples)
    for start in range(0, len(contents), AT_ONCE):
        for content, text in store.measures(contents[start : start + AT_ONCE], version).items():
            try:
                seen = seen_from_json(text)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            # An image that was measured before its colors were converted, or its transparency measured, is measured again.
            sample = samples[content]
            is_same = seen.colors == sample.colors and (seen.alpha is not None or not sample.has_alpha)
            if is_same or version == MASK_MEASURES:
                known[content] = seen
                ticker.step()
    return known


def _decoded(samples: Sequence[Sample], job: str) -> Iterator[tuple[Sample, str]]:
    tasks = []
    for sample in samples:
        start, length = (0, -1) if sample.span is None else (sample.span.offset, sample.span.size)
        path = os.path.abspath(sample.path if sample.span is None else sample.span.file)
        pixels = sample.width * sample.height
        seconds = REMOTE_SECONDS if is_pointer(Path(path)) else SECONDS
        tasks.append(Task([path, start, length, sample.content], pixels, seconds + pixels / PIXELS_A_SECOND))
    for number, result in run_tasks(job, tasks):
        if away := not_sent(tasks[number], result):
            raise away
        lone = result in ("crashed", "hung")
        yield samples[number], seen_broken(lost(result)).to_json() if lone else result
