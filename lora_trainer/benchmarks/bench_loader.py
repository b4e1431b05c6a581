"""`bench loader`: what data costs a step: steps with the loader next to steps on batches that lie ready.

`resident` is the trainer's step on micro-batches that were made beforehand. `cached` makes them ahead from the
caches, `uncached` from the images, decoded and encoded. In the time of such a step exactly one step is made ahead, and
it ends when both are done: what is read for one row never runs in another's time. The rows `_wait` are what steps
waited for their data. The rows `_alone` make micro-batches and train nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.benchmarks.bench_model import ENDLESS, BenchModel, build_bench_model
from lora_trainer.benchmarks.device import synchronize
from lora_trainer.benchmarks.interleaved import WARM_UP, Timings, Way, time_in_turn
from lora_trainer.benchmarks.measures import STEPS, Report, RequestedMeasure, Row, change, time_row
from lora_trainer.benchmarks.trainer_loop import TINY_RATE
from lora_trainer.data.fresh import Fresh
from lora_trainer.data.loader import prefetch
from lora_trainer.run.uncached import fresh_latents
from lora_trainer.training.feed import Feed, make_feed
from lora_trainer.training.loop import READ_AHEAD
from lora_trainer.training.step import StepContext, StepSettings, train_step

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch

ABOUT = {
    "resident": "steps on batches that lie ready: what training alone takes",
    "cached": "steps on batches read ahead from the caches",
    "uncached": "steps on images decoded and encoded ahead (cache.latents=false)",
    "cached_wait": "what steps of `cached` waited for their data",
    "uncached_wait": "what steps of `uncached` waited for their data",
    "cached_alone": "making a micro-batch from the caches, training nothing",
    "uncached_alone": "making a micro-batch from images, training nothing",
    "decoded_alone": "the same without the encoder",
    "ratio": "time over `resident`, the median step by step; of a wait: its share of that row's step; "
    "of a row alone: its share of a step of `resident`",
}


def measure(request: RequestedMeasure) -> Report:
    """Time steps with and without the loader. Raises UserError."""
    steps = request.steps or STEPS
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        resolved = change(request.resolved, {"cache.latents": True})
        model = build_bench_model(resolved, Path(folder), tiny=request.tiny)
        feeds = make_feeds(model)
        for feed in feeds.values():
            stack.callback(feed.close)
        timings = time_with_waits(model, feeds, steps)
        if "uncached" in feeds:
            feeds["decoded"] = decode_only(model, feeds["uncached"])
        alone = {way: time_alone(feed, WARM_UP + steps) for way, feed in feeds.items()}
    return Report(loader_rows(model.name, timings, alone), ABOUT)


def loader_rows(model: str, timings: Mapping[str, Timings], alone: Mapping[str, list[float]]) -> list[Row]:
    base = timings["resident"].seconds
    rows = [time_row(way, model, own.seconds, base) for way, own in timings.items()]
    for way, seconds in alone.items():
        if way in timings:
            own = timings[way]
            waits = own.results[-len(own.seconds) :]  # without those of the warm-up
            rows.append(time_row(f"{way}_wait", model, waits, own.seconds))
        row = time_row(f"{way}_alone", model, seconds)
        median = row["seconds_median"]
        row = replace(row, ratio=median / statistics.median(base))
        rows.append(row.with_figures(per_second=1.0 / max(median, 1e-9)))
    return rows


# ---- steps


def time_with_waits(model: BenchModel, feeds: Mapping[str, Feed], steps: int) -> dict[str, Timings]:
    """Steps from memory and from each feed in turn; their results are the seconds that each waited for its data."""
    count = WARM_UP + steps
    resident = [feeds["cached"].micros(number) for number in range(count)]

    def step_from_memory(number: int) -> float:
        train(model.context, resident[number])
        return 0.0

    with ExitStack() as stack:
        ways: dict[str, Way] = {"resident": step_from_memory}
        for way, feed in feeds.items():
            ways[way] = stack.enter_context(step_from_feed(model.context, feed, count))
        return time_in_turn(ways, steps, model.device)


@contextmanager
def step_from_feed(context: StepContext, feed: Feed, count: int) -> Iterator[Way]:
    """Steps read ahead as the trainer does; in the time of each exactly one more is made."""
    permits, made = threading.Semaphore(READ_AHEAD), threading.Semaphore(0)

    def read_steps() -> Iterator[list[MicroBatch]]:
        for number in range(count + READ_AHEAD):
            permits.acquire()
            try:
                yield feed.micros(number)
            finally:
                made.release()

    ahead = prefetch(read_steps(), READ_AHEAD)

    def step(number: int) -> float:
        permits.release()
        started = time.perf_counter()
        micros = next(ahead)
        waited = time.perf_counter() - started
        train(context, micros)
        synchronize(context.device)
        started = time.perf_counter()
        for _ in range(1 if number else 1 + READ_AHEAD):
            made.acquire()
        return waited + time.perf_counter() - started

    try:
        yield step
    finally:
        permits.release()  # its thread may be waiting for one
        ahead.close()


def train(context: StepContext, micros: Sequence[MicroBatch]) -> None:
    train_step(context, micros, sum(len(micro.latents) for micro in micros), StepSettings(TINY_RATE))


def time_alone(feed: Feed, count: int) -> list[float]:
    """Seconds of each micro-batch of so many steps, with nothing else running."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        micros = feed.micros(number)
        seconds += [(time.perf_counter() - started) / len(micros)] * len(micros)
    return seconds


# ---- feeds


def make_feeds(model: BenchModel) -> dict[str, Feed]:
    """How the model can be fed: from its caches, and from its images where there are any."""
    config, context, session = model.run.config, model.context, model.session
    processes, micro = model.run.processes, model.choices.micro
    if session is None:
        return {"cached": model.run.feed}
    fresh = fresh_latents(config, session.inputs, session.choices, session.processes.world)
    data = replace(model.run.feed.data, fresh=fresh)
    uncached = make_feed(config, data, context, processes, micro, session.steps.total)
    return {"cached": model.run.feed, "uncached": uncached}


def decode_only(model: BenchModel, feed: Feed) -> Feed:
    """The feed of images as they are decoded one after the other, thinned to the size of latents, and not encoded."""
    assert feed.data.fresh is not None
    fresh = Fresh(feed.data.fresh.place, lambda pixels: (pixels[..., ::8, ::8], pixels[..., ::8, ::8]), workers=0)
    data = replace(feed.data, fresh=fresh)
    return make_feed(model.run.config, data, model.context, model.run.processes, 1, ENDLESS)
