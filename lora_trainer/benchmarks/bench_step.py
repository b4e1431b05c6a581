"""`bench step`: the trainer's loop next to other ways of taking the same steps of the same data on the same denoiser.

`bare` is the least that training can be: batches that lie ready, with fixed noise, mean squared error, the same fused
optimizer; no data, clipping or logging. `ours` is the trainer's own loop. `usual` is the step as the field's scripts
do it (`reference_step.py`), encoding in every step where there are encoders; `usual_cached` is the same with everything
encoded beforehand.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import mse_loss

from lora_trainer.adapters.injection import ADAPTER
from lora_trainer.benchmarks import compare_settings
from lora_trainer.benchmarks.bench_model import BenchModel, build_bench_model, public_name
from lora_trainer.benchmarks.compare_settings import compare_all, judge_quality
from lora_trainer.benchmarks.device import allocated_bytes, peak_tflops
from lora_trainer.benchmarks.fastest_settings import export_fastest
from lora_trainer.benchmarks.interleaved import WARM_UP, Timings, Way, time_in_turn
from lora_trainer.benchmarks.measures import (
    COLUMNS,
    NOISY,
    OWN,
    STEPS,
    Column,
    Report,
    RequestedMeasure,
    Row,
    figure,
    time_row,
    too_noisy,
)
from lora_trainer.benchmarks.peak_memory import measure_peak, predict_parts
from lora_trainer.benchmarks.reference_step import REFERENCE, add_reference_adapter, reference_step, use_adapter
from lora_trainer.benchmarks.trainer_loop import TINY_RATE, trainer_loop
from lora_trainer.core.errors import first_line, is_out_of_memory
from lora_trainer.core.hardware import free_memory
from lora_trainer.training.processes import join_processes

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch

PEAK_STEPS = 2  # the first makes the optimizer's state
NOT_COMPILED = (
    "compile.enabled=auto depends on a run's steps: an architecture alone has none and is not compiled; "
    "--set compile.enabled=true measures it on a GPU"
)
ABOUT = {
    "bare": "the least that training can be: batches that lie ready, nothing else",
    "ours": "this trainer's own loop, with all that it does in a step",
    "usual": "the step as other scripts do it, encoding in every step where there are encoders",
    "usual_cached": "the same with everything encoded beforehand",
    "ratio": "time over `bare`, the median of the ratios step by step",
    "CPU ratio": "the same of CPU time, in all threads: what else the machine does changes it less",
    "TFLOP/s": "operations of the step, recomputed ones included, by its time",
    "of floor": "share of what the device can do",
    "peak GiB": "what was held at most: on a GPU by the allocator, on a CPU all storages of a step, counted",
}
STEP_COLUMNS: tuple[Column, ...] = (
    *COLUMNS,
    ("CPU ratio", figure("cpu_ratio", ".3f")),
    ("TFLOP/s", figure("tflops", ".3g")),
    ("of floor", figure("mfu", ".0%")),
    ("peak GiB", figure("peak_gib", ".3f")),
)


def measure(request: RequestedMeasure) -> Report:
    """Time the ways of taking a step, of each model that was requested. Raises UserError."""
    rows, notes = list[Row](), list[str]()
    for subject in request.subjects or (OWN,):
        with tempfile.TemporaryDirectory() as folder:
            model_rows, model_notes = measure_model(request, subject, Path(folder))
        free_memory(join_processes().device)
        rows += model_rows
        notes += model_notes
        config = request.resolved.config
        if config.compile.enabled == "auto" and public_name(config, subject) is not None:
            notes.append(NOT_COMPILED)
    if not request.compare and request.export_preset is None:
        return Report(rows, ABOUT, tuple(dict.fromkeys(notes)), STEP_COLUMNS)
    worse, undecided = judge_quality(rows)
    notes = list(dict.fromkeys([*notes, *undecided]))
    return Report(rows, compare_settings.ABOUT, notes, compare_settings.COMPARE_COLUMNS, worse=worse)


def measure_model(request: RequestedMeasure, subject: str, folder: Path) -> tuple[list[Row], list[str]]:
    steps = request.steps or STEPS
    if request.export_preset is not None:
        return export_fastest(request, request.export_preset, subject, steps, folder)
    if request.compare:
        return compare_all(request, subject, steps, folder)
    model = build_bench_model(request.resolved, folder, tiny=request.tiny, subject=subject)
    return compare_loops(model, steps, folder)


def compare_loops(model: BenchModel, steps: int, folder: Path) -> tuple[list[Row], list[str]]:
    """The rows of one model, and a note for each that could not be measured."""
    context, notes = model.context, list[str]()
    select = partial(select_adapter, model)
    inputs: list[list[MicroBatch]] = []

    def build_bare() -> Way:
        # Not before the trainer's loop is there: on a GPU these batches take room that a run does not need.
        inputs.extend(model.micros(number) for number in range(PEAK_STEPS + WARM_UP + steps))
        return bare_step(model, inputs)

    with ExitStack() as stack:
        builders = {
            "ours": lambda: stack.enter_context(trainer_loop(model.run, folder / "ours")),
            "bare": build_bare,
            "usual_cached": lambda: reference_step(model, add_reference_adapter(context.denoiser), inputs, None),
        }
        ways, peaks = build_one_by_one(model, builders, notes)
        ways = {name: ways[name] for name in ("bare", "ours", "usual_cached") if name in ways}
        timings = time_in_turn(ways, steps, model.device, first=PEAK_STEPS, before=select)
        rows = [replace(step_row(name, model, timings[name], timings["bare"]), peak_gib=peaks[name]) for name in ways]
        if "usual_cached" in ways:
            *others, cached = rows
            rows = [*others, *reference_rows(model, cached, ways["bare"], inputs, steps, notes)]

    tflop = predict_parts(model, inputs[0]).parts.tflop
    rate, source = peak_tflops(model.device, context.dtype)
    for place, row in enumerate(rows):
        tflops = tflop / row["seconds_median"]
        rows[place] = row.with_figures(tflop=tflop, tflops=tflops, mfu=None if rate is None else tflops / rate)
    notes.append(f"floor: {rate:.3g} TFLOP/s, {source}" if rate else f"floor: {source}")
    return rows, [*notes, *too_noisy(rows), *quicker_than_bare(rows)]


def build_one_by_one(
    model: BenchModel, builders: Mapping[str, Callable[[], Way]], notes: list[str]
) -> tuple[dict[str, Way], dict[str, float | None]]:
    """Each way with its first steps taken, and the most that it held, as if it were there alone.

    The usual way may lack memory; that is noted.
    """
    ways, peaks = dict[str, Way](), dict[str, float | None]()
    free_memory(model.device)
    model_bytes = allocated_bytes(model.device)
    for name, build in builders.items():
        others = allocated_bytes(model.device) - model_bytes  # of the ways before it
        try:
            way = build()
            select_adapter(model, name)
            with measure_peak(model.context, others=others, own_optimizer=name == "ours") as peak:
                for number in range(PEAK_STEPS):
                    way(number)
        except Exception as error:
            if not name.startswith(REFERENCE) or not is_out_of_memory(error):
                raise
            notes.append(f"{name}: out of memory ({first_line(error)})")
            continue
        ways[name], peaks[name] = way, peak.gib
    return ways, peaks


def select_adapter(model: BenchModel, name: str) -> None:
    """Let the LoRA of a way work; compiled blocks are for the trainer's own."""
    if model.context.compiled is not None:
        model.context.compiled.on = name == "ours"
    use_adapter(model.context.denoiser, REFERENCE if name.startswith(REFERENCE) else ADAPTER)


def reference_rows(
    model: BenchModel, cached: Row, bare: Way, inputs: Sequence[list[MicroBatch]], steps: int, notes: list[str]
) -> list[Row]:
    """The usual step that encodes, before the one that does not."""
    if model.session is None:
        notes.append("usual does not encode here: an architecture alone has no encoders")
        return [replace(cached, name=REFERENCE)]
    parameters = [each for name, each in model.context.denoiser.named_parameters() if f".{REFERENCE}." in name]
    try:
        # The encoders come last: what needs them must not take memory from the other rows.
        encoding = reference_step(model, parameters, inputs, model.load_encoders())
        ways = {"bare": bare, REFERENCE: encoding}
        timings = time_in_turn(ways, steps, model.device, before=partial(select_adapter, model))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        notes.append(f"usual: out of memory with its encoders ({first_line(error)})")
        return [cached]
    row = step_row(REFERENCE, model, timings[REFERENCE], timings["bare"])
    return [row.with_figures(encodes=True), cached]


def bare_step(model: BenchModel, inputs: Sequence[list[MicroBatch]]) -> Way:
    """Forward, backward and update on batches that lie ready."""
    context, process = model.context, model.context.process
    ready = [[micro.to(context.device, context.dtype) for micro in micros] for micros in inputs]
    noisy = [[process.add_noise(m.latents, m.noise, m.t).to(context.dtype) for m in micros] for micros in ready]
    target = [[process.target(m.latents, m.noise, m.t) for m in micros] for micros in ready]
    optimizer = torch.optim.AdamW(list(context.adapter.copies.values()), lr=TINY_RATE, fused=True)

    def step(number: int) -> None:
        micros = ready[number]
        for micro, latents, wanted in zip(micros, noisy[number], target[number], strict=True):
            predicted = context.predict(context.denoiser, latents, micro.t, micro.cond, micro.sizes)
            loss = mse_loss(predicted.float(), wanted) / len(micros)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def step_row(name: str, model: BenchModel, own: Timings, base: Timings) -> Row:
    """The row of a way; on a CPU with its CPU time, where the system does not count that in coarse ticks."""
    row = time_row(name, model.name, own.seconds, base.seconds).with_figures(encodes=False)
    if model.device.type != "cpu" or not all(base.cpu_seconds):
        return row.with_figures(cpu_seconds_median=None, cpu_ratio=None)
    ratios = [one / other for one, other in zip(own.cpu_seconds, base.cpu_seconds, strict=True)]
    median = statistics.median(own.cpu_seconds)
    return row.with_figures(cpu_seconds_median=median, cpu_ratio=statistics.median(ratios))


def quicker_than_bare(rows: Sequence[Row]) -> list[str]:
    """A note where something took less time than the least that a step can be."""
    quicker = [row.name for row in rows if row["ratio"] < 1]
    return [f"{', '.join(quicker)}: quicker than bare, which does the least: {NOISY}"] if quicker else []
