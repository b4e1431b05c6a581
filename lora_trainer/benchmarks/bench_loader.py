"""What data costs a step: steps with the loader beside steps on batches that lie ready, in turn in one process.

`resident` is the trainer's step on micro-batches that were made beforehand. `cached` makes them ahead from the
caches, `uncached` from the images, decoded and encoded; their ratio is over `resident`, step by step. In the time of
such a step exactly one step is made ahead, and it ends when both are done: what is read for one row never runs in
another's time. `cached_wait` and `uncached_wait` are what steps waited for their data, their ratio the share of the
step. `cached_alone` and `uncached_alone` make micro-batches and train nothing: seconds a micro-batch, micro-batches a
second, and as ratio their share of a step's time; `decoded_alone` is `uncached_alone` without the encoder.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from lora_trainer.benchmarks.device import synchronize
from lora_trainer.benchmarks.measures import STEPS, MeasureRow, Report, RequestedMeasure, row_of
from lora_trainer.benchmarks.subject import ENDLESS, TINY_NEEDS_A_FAMILY, public_built
from lora_trainer.benchmarks.turns import WARM_UP, timed_in_turn
from lora_trainer.core.errors import UsageError
from lora_trainer.data.buckets import Bucket, ResizeCrop
from lora_trainer.data.caches.entries import Store, write_entries
from lora_trainer.data.fresh import Fresh
from lora_trainer.data.loader import CachedData, prefetch
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import View
from lora_trainer.models.families import FAMILIES
from lora_trainer.run.inputs import read_inputs, trained_resolution
from lora_trainer.run.order import Order
from lora_trainer.run.prepare import prepare
from lora_trainer.run.reading import reading
from lora_trainer.run.session import open_session, with_generated_images
from lora_trainer.run.uncached import fresh_latents
from lora_trainer.training.feed import Feed, make_feed
from lora_trainer.training.loop import READ_AHEAD
from lora_trainer.training.processes import join_processes
from lora_trainer.training.step import StepContext, StepSettings, train_step

if TYPE_CHECKING:
    from lora_trainer.config.layers import Resolved
    from lora_trainer.config.schema import Config
    from lora_trainer.models.family import Architecture, Family
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
RATE = 1e-8
RANDOM_SAMPLES = 16
Step = Callable[[int], float]  # takes the step of that number and says how long it waited for its data


@dataclass(frozen=True)
class Measured:
    """Seconds of each step, and of that what it waited for its data."""

    steps: list[float]
    waits: list[float]


def measure(asked: RequestedMeasure) -> Report:
    """Time steps with and without the loader. Raises UserError."""
    resolved = asked.resolved
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        name, context, feeds = subject_of(resolved, Path(folder), tiny=asked.tiny)
        for feed in feeds.values():
            stack.callback(feed.close)
        numbers = range(WARM_UP + (asked.steps or STEPS))
        resident = [feeds["cached"].micros(number) for number in numbers]
        timed = timed_with_waits(context, resident, feeds)
        if "uncached" in feeds:
            feeds["decoded"] = without_encoder(resolved.config, context, feeds["uncached"])
        alone = {way: made_alone(feed, len(numbers)) for way, feed in feeds.items()}
    return Report(list(rows_of(name, timed, alone)), ABOUT)


def rows_of(model: str, timed: Mapping[str, Measured], alone: Mapping[str, list[float]]) -> Iterator[MeasureRow]:
    base = timed["resident"].steps
    for way, measured in timed.items():
        yield row_of(way, model, measured.steps, base)
    for way, seconds in alone.items():
        if way in timed:
            yield row_of(f"{way}_wait", model, timed[way].waits, timed[way].steps)
        row = row_of(f"{way}_alone", model, seconds, seconds)
        yield replace(
            row, ratio=row.seconds_median / statistics.median(base), per_second=1.0 / max(row.seconds_median, 1e-9)
        )


def timed_with_waits(
    context: StepContext, resident: list[list[MicroBatch]], feeds: Mapping[str, Feed]
) -> dict[str, Measured]:
    """The steps of `resident`, from it and from each feed in turn; those of the warm-up are not timed."""
    waits: dict[str, list[float]] = {way: [] for way in ("resident", *feeds)}
    with ExitStack() as stack:
        ways: dict[str, Step] = {"resident": from_memory(context, resident)}
        for way, feed in feeds.items():
            ways[way] = stack.enter_context(from_feed(context, feed, len(resident)))

        def waiting(way: str, number: int) -> None:
            waits[way].append(ways[way](number))

        own = {way: partial(waiting, way) for way in ways}
        timed = timed_in_turn(own, len(resident) - WARM_UP, context.device)
    return {way: Measured(timed[way].wall, waits[way][WARM_UP:]) for way in ways}


def from_memory(context: StepContext, resident: list[list[MicroBatch]]) -> Step:
    def step(number: int) -> float:
        train(context, resident[number])
        return 0.0

    return step


@contextmanager
def from_feed(context: StepContext, feed: Feed, count: int) -> Iterator[Step]:
    """Steps read ahead as the trainer does; in the time of each exactly one more is made."""
    permits, made = threading.Semaphore(READ_AHEAD), threading.Semaphore(0)

    def source() -> Iterator[list[MicroBatch]]:
        for number in range(count + READ_AHEAD):
            permits.acquire()
            try:
                yield feed.micros(number)
            finally:
                made.release()

    ahead = prefetch(source(), READ_AHEAD)

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


def train(context: StepContext, micros: list[MicroBatch]) -> None:
    train_step(context, micros, sum(len(micro.latents) for micro in micros), StepSettings(RATE))


def made_alone(feed: Feed, count: int) -> list[float]:
    """Seconds of each micro-batch of so many steps, with nothing else running."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        micros = feed.micros(number)
        seconds += [(time.perf_counter() - started) / len(micros)] * len(micros)
    return seconds


def subject_of(resolved: Resolved, folder: Path, *, tiny: bool) -> tuple[str, StepContext, dict[str, Feed]]:
    """The model's name, what is trained, and how it can be fed: a run's own, or an architecture with random entries."""
    config = resolved.config
    if config.model.family is not None and config.model.path is None:
        return public_subject(resolved, config.model.family, folder, tiny=tiny)
    if tiny:
        raise UsageError(TINY_NEEDS_A_FAMILY)
    cached = replace(
        resolved, config=config.model_copy(update={"cache": config.cache.model_copy(update={"latents": True})})
    )
    order = Order(cached, folder, Console(stderr=True, soft_wrap=True))
    session, run = prepare(with_generated_images(open_session(order, read_inputs(order.config))), {})
    fresh = fresh_latents(order.config, session.inputs, session.choices, session.processes.world)
    data = replace(run.feed.data, fresh=fresh)
    uncached = make_feed(order.config, data, run.context, session.processes, session.choices.micro, session.steps.total)
    return session.inputs.facts.name, run.context, {"cached": run.feed, "uncached": uncached}


def without_encoder(config: Config, context: StepContext, feed: Feed) -> Feed:
    """The feed of images as they are decoded one after the other, thinned to the size of latents."""
    assert feed.data.fresh is not None
    fresh = Fresh(feed.data.fresh.place, lambda pixels: (pixels[..., ::8, ::8], pixels[..., ::8, ::8]), workers=0)
    return make_feed(config, replace(feed.data, fresh=fresh), context, join_processes(), 1, ENDLESS)


def public_subject(
    resolved: Resolved, named: str, folder: Path, *, tiny: bool
) -> tuple[str, StepContext, dict[str, Feed]]:
    """A published denoiser with random weights, fed from a cache of random entries in `folder`; there are no encoders."""
    name, context, architecture, choices = public_built(resolved, named, tiny=tiny)
    config = resolved.config
    side = trained_resolution(config, architecture.facts)
    data = random_cache(reading(config, FAMILIES[named]), architecture, side, folder)
    feed = make_feed(config, data, context, join_processes(), choices.micro, ENDLESS)
    return name, context, {"cached": feed}


def random_cache(family: Family, architecture: Architecture, side: int, folder: Path) -> CachedData:
    """Samples of one bucket with random latents and texts, cached in `folder`."""
    facts, generator = architecture.facts, torch.Generator().manual_seed(0)
    keys = [f"{number:064x}" for number in range(RANDOM_SAMPLES)]
    shape = (RANDOM_SAMPLES, facts.latent_channels, side // facts.downscale, side // facts.downscale)
    mean = torch.randn(shape, generator=generator)
    write_entries(folder, "latents", keys, {"mean": mean, "spread": torch.full(shape, 0.1)})
    shapes = family.text.cond_shapes(architecture.denoiser).items()
    texts = {name: torch.randn((RANDOM_SAMPLES, *each), generator=generator) for name, each in shapes}
    write_entries(folder, "texts", keys, texts)
    view = View(ResizeCrop(side, side, 0, 0, Bucket(side, side)))
    return CachedData(
        samples=[Sample(Path(f"{key}.png"), key, side, side, key[::-1]) for key in keys],
        views=[(view,)] * RANDOM_SAMPLES,
        latent_keys=[(key,) for key in keys],
        text_keys=[(key,) for key in keys],
        empty_key=keys[0],
        latents=Store(folder, "latents"),
        texts=Store(folder, "texts"),
    )
