"""Measurements side by side: each row's steps alternate in one process, so a machine's moods meet both.

`bare` is the least that training can be: the same injected model, a resident batch with
fixed noise, mean squared error, the same fused optimizer; no data, clipping or logging.
`ours` is the trainer's own step: batches read from the cache ahead of time, noise by
position, weights, clipping, numbers written.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.functional import mse_loss

from lora_trainer.config.layers import Resolved
from lora_trainer.data.loader import prefetch
from lora_trainer.monitor.trackers import append_lines
from lora_trainer.production.inputs import read_inputs
from lora_trainer.production.order import Order
from lora_trainer.production.session import Prepared, open_session, prepare
from lora_trainer.training.micro import Micro
from lora_trainer.training.step import train_step

WARM_UP, STEPS = 5, 30


@dataclass(frozen=True)
class Row:
    """One way of doing the step, in seconds; `ratio` is its median over that of `bare`."""

    name: str
    model: str
    seconds_median: float
    seconds_p10: float
    seconds_p90: float
    ratio: float


def bench_step(resolved: Resolved, steps: int = STEPS) -> list[Row]:
    """Time `bare` and `ours` on a run's own model, data and settings. Raises UserError."""
    inputs = read_inputs(resolved.config)
    with tempfile.TemporaryDirectory() as folder:
        order = Order(resolved, Path(folder), Console(stderr=True, soft_wrap=True))
        prepared = prepare(open_session(order, inputs), {})
        with closing(prefetch(endless(prepared.job.micros), 4)) as source:
            ways = {
                "bare": bare_step(prepared),
                "ours": own_step(prepared, source, Path(folder) / "metrics.jsonl"),
            }
            seconds = timed_in_turn(ways, steps, prepared.job.learner.device)
    base = statistics.median(seconds["bare"])
    return [row(name, inputs.facts.path.name, times, base) for name, times in seconds.items()]


def timed_in_turn(ways: dict[str, Callable[[], None]], steps: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each way's steps, alternating, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(WARM_UP + steps):
        for name, step in ways.items():
            synchronize(device)
            started = time.perf_counter()
            step()
            synchronize(device)
            if index >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def endless(micros: Callable[[int], list[Micro]]) -> Iterator[list[Micro]]:
    step = 0
    while True:
        yield micros(step)
        step += 1


def bare_step(prepared: Prepared) -> Callable[[], None]:
    """Forward, backward and update on one resident step."""
    learner = prepared.job.learner
    micros = [micro.to(learner.device, learner.dtype) for micro in prepared.job.micros(0)]
    copies = list(learner.adapter.copies.values())
    optimizer = torch.optim.AdamW(copies, lr=1e-8, fused=True)
    noisy = [learner.process.add_noise(m.latents, m.noise, m.t).to(learner.dtype) for m in micros]

    def step() -> None:
        for micro, each in zip(micros, noisy, strict=True):
            predicted = learner.predict(learner.denoiser, each, micro.t, micro.cond, micro.sizes)
            (mse_loss(predicted.float(), micro.noise) / len(micros)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def own_step(prepared: Prepared, source: Iterator[list[Micro]], metrics: Path) -> Callable[[], None]:
    """The trainer's step, with its data and its row of numbers."""
    samples = prepared.job.samples_in(0)

    def step() -> None:
        result = train_step(prepared.job.learner, next(source), samples, 1e-8)
        append_lines(metrics, [{"loss": float(result.loss), "grad_norm": float(result.grad_norm)}])

    return step


def row(name: str, model: str, seconds: list[float], base: float) -> Row:
    tenths = statistics.quantiles(seconds, n=10)
    median = statistics.median(seconds)
    return Row(name, model, median, tenths[0], tenths[-1], median / base)


def device_name() -> str:
    """The GPU's name, or what the processor is called."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def to_json(rows: list[Row], device: str, versions: dict[str, str]) -> dict[str, object]:
    """The document of `bench --json`."""
    return {"device": device, "versions": versions, "rows": [asdict(each) for each in rows]}
