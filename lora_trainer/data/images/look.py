"""Every image decoded in full, by worker processes on all CPUs, and measured.

The memory is flat: few large images or many small ones are in hand at once. What was
measured is kept by content, so no image is decoded for this twice, wherever it lies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from lora_trainer.data.images.measures import MEASURES, Seen, seen_broken, seen_from_json
from lora_trainer.data.images.remembered import Remembered, remembered
from lora_trainer.data.images.scan import lost
from lora_trainer.data.images.workers import Progress, Task, Ticker, answers
from lora_trainer.data.sample import Sample

SECONDS = 60.0  # after which a decoder hangs, and one more for every PIXELS_A_SECOND
PIXELS_A_SECOND = 1_000_000
AT_ONCE = 2000  # measures read or written together


def look_at(samples: Sequence[Sample], progress: Progress | None = None) -> tuple[Seen, ...]:
    """What a full decode of each sample's image shows, in order; broken ones say why."""
    first: dict[str, Sample] = {}
    for sample in samples:
        first.setdefault(sample.content, sample)
    ticker = Ticker(progress, len(first))
    with remembered() as store:
        seen = _known(list(first), store, ticker)
        left = [sample for content, sample in first.items() if content not in seen]
        fresh: dict[str, str] = {}
        for sample, answer in _decoded(left):
            seen[sample.content] = found = seen_from_json(answer)
            if found.broken is None:
                fresh[sample.content] = answer
            if len(fresh) >= AT_ONCE:
                store.keep_measures(fresh, MEASURES)
                fresh.clear()
            ticker.step()
        store.keep_measures(fresh, MEASURES)
    return tuple(seen[sample.content] for sample in samples)


def _known(contents: Sequence[str], store: Remembered, ticker: Ticker) -> dict[str, Seen]:
    """What earlier runs have seen; a row that cannot be read counts as none."""
    known: dict[str, Seen] = {}
    for start in range(0, len(contents), AT_ONCE):
        for content, text in store.measures(contents[start : start + AT_ONCE], MEASURES).items():
            try:
                known[content] = seen_from_json(text)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            ticker.step()
    return known


def _decoded(samples: Sequence[Sample]) -> Iterator[tuple[Sample, str]]:
    tasks = []
    for sample in samples:
        start, length = (0, -1) if sample.span is None else (sample.span.offset, sample.span.size)
        path = os.path.abspath(sample.path if sample.span is None else sample.span.file)
        pixels = sample.width * sample.height
        tasks.append(Task([path, start, length, sample.content], pixels, SECONDS + pixels / PIXELS_A_SECOND))
    for number, answer in answers("seen", tasks):
        lone = answer in ("crashed", "hung")
        yield samples[number], seen_broken(lost(answer)).to_json() if lone else answer
