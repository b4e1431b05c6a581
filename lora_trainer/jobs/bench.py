"""Measurements side by side: each row's steps alternate in one process, so a machine's moods meet all of them.

All rows take the same steps of the same data on the same denoiser.

`bare` is the least that training can be: resident batches with fixed noise, mean squared
error, the same fused optimizer; no data, clipping or logging.
`ours` is the trainer's own step: batches read from the cache ahead of time, noise by
position, weights, clipping, numbers written.
`usual` is the step as the field's scripts do it (`jobs/usual.py`), encoding in every step
where there are encoders; `usual_cached` is the same with everything encoded beforehand.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

from lora_trainer.core.errors import first_line, is_out_of_memory
from lora_trainer.data.loader import prefetch
from lora_trainer.jobs.device import synchronize
from lora_trainer.jobs.measures import STEPS, Asked, Report, Row, row_of
from lora_trainer.jobs.subject import Subject, subject_of
from lora_trainer.jobs.usual import USUAL, add_usual_adapter, use_adapter, usual_step
from lora_trainer.models.lora import ADAPTER
from lora_trainer.monitor.trackers import append_lines
from lora_trainer.training.micro import Micro
from lora_trainer.training.step import train_step

WARM_UP = 5
ABOUT = {
    "bare": "the least that training can be: batches that lie ready, nothing else",
    "ours": "this trainer's step, with all that it does",
    "usual": "the step as other scripts do it, encoding in every step where there are encoders",
    "usual_cached": "the same with everything encoded beforehand",
    "ratio": "time over `bare`, the median of the ratios step by step",
}
Way = Callable[[int], None]  # does the step of that number


def measure(asked: Asked) -> Report:
    """Time the ways of doing a step. Raises UserError."""
    rows, notes = bench_step(asked, asked.steps or STEPS)
    return Report(rows, ABOUT, notes)


def bench_step(asked: Asked, steps: int) -> tuple[list[Row], list[str]]:
    """The rows of one model, and a note for each that could not be measured."""
    with tempfile.TemporaryDirectory() as folder:
        subject = subject_of(asked.resolved, Path(folder), tiny=asked.tiny)
        numbers = range(WARM_UP + steps)
        with closing(prefetch((subject.micros(number) for number in (*range(WARM_UP), *numbers)), 4)) as source:
            ours = own_step(subject, source, Path(folder) / "metrics.jsonl")
            peak = peak_of(ours, subject.learner.device)
            resident = [subject.micros(number) for number in numbers]
            bare = bare_step(subject, resident)
            parameters = add_usual_adapter(subject.learner.denoiser)
            usual = usual_step(subject, parameters, resident, None)
            ready = timed_in_turn(subject, {"bare": bare, "ours": ours, "usual_cached": usual}, steps)
        rows = [row_of(name, subject.name, times, ready["bare"]) for name, times in ready.items()]
        rows[1] = replace(rows[1], peak_gib=peak)
        if subject.load_encode is None:
            note = "usual does not encode here: an architecture alone has no encoders"
            return [*rows[:2], replace(rows[2], name=USUAL)], [note]
        # The encoders come last: what needs them must not take memory from the rows above.
        try:
            usual = usual_step(subject, parameters, resident, subject.load_encode())
            encoding = timed_in_turn(subject, {"bare": bare, USUAL: usual}, steps)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return rows, [f"usual: out of memory with its encoders ({first_line(error)})"]
    last = replace(row_of(USUAL, subject.name, encoding[USUAL], encoding["bare"]), encodes=True)
    return [*rows[:2], last, rows[2]], []


def timed_in_turn(subject: Subject, ways: Mapping[str, Way], steps: int) -> dict[str, list[float]]:
    """Seconds of each way's steps, alternating, after a warm-up."""
    learner = subject.learner
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP + steps):
        for name, step in ways.items():
            use_adapter(learner.denoiser, USUAL if name.startswith(USUAL) else ADAPTER)
            synchronize(learner.device)
            started = time.perf_counter()
            step(number)
            synchronize(learner.device)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def peak_of(step: Way, device: torch.device) -> float | None:
    """The most that torch held on the card in the warm-up's steps, in GiB; None without a card."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(WARM_UP):
        step(number)
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def bare_step(subject: Subject, resident: list[list[Micro]]) -> Way:
    """Forward, backward and update on batches that lie ready."""
    learner = subject.learner
    ready = [[micro.to(learner.device, learner.dtype) for micro in micros] for micros in resident]
    noisy = [[learner.process.add_noise(m.latents, m.noise, m.t).to(learner.dtype) for m in micros] for micros in ready]
    optimizer = torch.optim.AdamW(list(learner.adapter.copies.values()), lr=1e-8, fused=True)

    def step(number: int) -> None:
        micros = ready[number]
        for micro, each in zip(micros, noisy[number], strict=True):
            predicted = learner.predict(learner.denoiser, each, micro.t, micro.cond, micro.sizes)
            (mse_loss(predicted.float(), micro.noise) / len(micros)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def own_step(subject: Subject, source: Iterator[list[Micro]], metrics: Path) -> Way:
    """The trainer's step, with its data and its row of numbers."""

    def step(number: int) -> None:
        micros = next(source)
        samples = sum(len(micro.latents) for micro in micros)
        result = train_step(subject.learner, micros, samples, 1e-8)
        append_lines(metrics, [{"loss": float(result.loss), "grad_norm": float(result.grad_norm)}])

    return step
