"""Measurements side by side: each row's steps alternate in one process, so a machine's moods meet all of them.

All rows take the same steps of the same data on the same denoiser.

`bare` is the least that training can be: resident batches with fixed noise, mean squared
error, the same fused optimizer; no data, clipping or logging.
`ours` is the trainer's own step: batches read from the cache ahead of time, noise by
position, weights, clipping, numbers written.
`usual` is the step as the field's scripts do it (`benchmarks/usual.py`), encoding in every step
where there are encoders; `usual_cached` is the same with everything encoded beforehand.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import mse_loss

from lora_trainer.adapters.injection import ADAPTER
from lora_trainer.benchmarks.best import rows_and_best
from lora_trainer.benchmarks.held import holding
from lora_trainer.benchmarks.measures import (
    COLUMNS,
    NOISY,
    OWN,
    STEPS,
    Column,
    MeasureRow,
    Report,
    RequestedMeasure,
    figure,
    row_of,
    too_noisy,
)
from lora_trainer.benchmarks.own_loop import STILL, Way, own_loop
from lora_trainer.benchmarks.rates import peak_tflops
from lora_trainer.benchmarks.split import PARTS, Split
from lora_trainer.benchmarks.subject import BenchSubject, architecture_named, subject_of
from lora_trainer.benchmarks.turns import SPLIT_STEPS, WARM_UP, Timed, split_of, timed_in_turn
from lora_trainer.benchmarks.usual import USUAL, add_usual_adapter, use_adapter, usual_step
from lora_trainer.benchmarks.versus import ABOUT as VERSUS_ABOUT
from lora_trainer.benchmarks.versus import VERSUS_COLUMNS, NotRun, VersusRow, quality_of, rows_versus
from lora_trainer.core.errors import first_line, is_out_of_memory
from lora_trainer.core.hardware import free_memory
from lora_trainer.memory_plan.profiles import Sizes
from lora_trainer.run.plans.plan import gauge_of
from lora_trainer.training.processes import join_processes

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch

NOT_COMPILED = (
    "compile.enabled=auto depends on a run's steps: an architecture alone has none and is not compiled; "
    "--set compile.enabled=true measures it on a GPU"
)
PEAK_STEPS = 2  # the first makes the optimizer's state
ABOUT = {
    "bare": "the least that training can be: batches that lie ready, nothing else",
    "ours": "this trainer's own loop, with all that it does in a step",
    "usual": "the step as other scripts do it, encoding in every step where there are encoders",
    "usual_cached": "the same with everything encoded beforehand",
    "ratio": "time over `bare`, the median of the ratios step by step",
    "CPU ratio": "the same of CPU time, in all threads: what else the machine does changes it less",
    "optimizer": "clipping, update, and what the loop does beside; of the four parts the medians of other steps, in ms",
    "TFLOP/s": "operations of the step, recomputed ones included, by its time",
    "of floor": "share of what the device can do",
    "peak GiB": "what was held at most: on a GPU by the allocator, on a CPU all storages of a step, counted",
}


@dataclass(frozen=True)
class StepRow(MeasureRow):
    """`split` is seconds of the step's parts; `tflop` its operations, with what checkpointing recomputes.

    `mfu` is the share of the device's rate: one where a step takes no longer than its operations must. On a CPU
    `cpu_ratio` is CPU time over that of the first row: other programs change it less than time by the clock.
    """

    split: Mapping[str, float] | None = None
    tflop: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    cpu_seconds_median: float | None = None
    cpu_ratio: float | None = None


def part_of(part: str) -> Callable[[StepRow], str]:
    return lambda row: "" if row.split is None else f"{1000 * row.split[part]:.1f}"


STEP_COLUMNS: tuple[Column, ...] = (
    *COLUMNS,
    ("CPU ratio", figure("cpu_ratio", ".3f")),
    *((part, part_of(part)) for part in PARTS),
    ("TFLOP/s", figure("tflops", ".3g")),
    ("of floor", figure("mfu", ".0%")),
    ("peak GiB", figure("peak_gib", ".3f")),
)


def measure(asked: RequestedMeasure) -> Report:
    """Time the ways of doing a step, of each model that was asked for. Raises UserError."""
    rows: list[MeasureRow | NotRun] = []
    notes: list[str] = []
    for named in asked.subjects or (OWN,):
        with tempfile.TemporaryDirectory() as folder:
            found, said = bench_model(asked, named, Path(folder))
        free_memory(join_processes().device)
        rows += found
        notes += said
    about, columns = (VERSUS_ABOUT, VERSUS_COLUMNS) if asked.versus or asked.best else (ABOUT, STEP_COLUMNS)
    worse, open_ones = quality_of([row for row in rows if isinstance(row, VersusRow)])
    return Report(rows, about, tuple(dict.fromkeys([*notes, *open_ones])), columns, worse=worse)


def bench_model(asked: RequestedMeasure, named: str, folder: Path) -> tuple[Sequence[MeasureRow | NotRun], list[str]]:
    steps = asked.steps or STEPS
    rows, notes = rows_and_notes(asked, named, steps, folder)
    config = asked.resolved.config
    if config.compile.enabled == "auto" and architecture_named(config, named) is not None:
        notes = [*notes, NOT_COMPILED]
    return rows, notes


def rows_and_notes(
    asked: RequestedMeasure, named: str, steps: int, folder: Path
) -> tuple[Sequence[MeasureRow | NotRun], list[str]]:
    if asked.best is not None:
        return rows_and_best(asked, named, steps, folder)
    if asked.versus:
        return rows_versus(asked, named, steps, folder)
    return bench_step(subject_of(asked.resolved, folder, tiny=asked.tiny, named=named), steps, folder)


def bench_step(subject: BenchSubject, steps: int, folder: Path) -> tuple[list[StepRow], list[str]]:
    """The rows of one model, and a note for each that could not be measured."""
    context, notes = subject.context, list[str]()
    device, split = context.device, Split(context.device)
    watched = range(PEAK_STEPS + WARM_UP + steps, PEAK_STEPS + WARM_UP + steps + SPLIT_STEPS)
    resident: list[list[MicroBatch]] = []

    def bare() -> Way:
        # Not before `ours` is there: on a GPU these batches take room that a run does not need.
        resident.extend(subject.micros(number) for number in range(watched.stop))
        return bare_step(subject, resident, split)

    with ExitStack() as stack:
        make = {
            "ours": lambda: stack.enter_context(own_loop(subject.run, folder / "ours", split)),
            "bare": bare,
            "usual_cached": lambda: usual_step(subject, add_usual_adapter(context.denoiser), resident, None),
        }
        ways, peaks = made_one_by_one(subject, make, notes)
        ways = {name: ways[name] for name in ("bare", "ours", "usual_cached") if name in ways}
        times = timed_in_turn(ways, steps, device, lambda name: use(subject, name), PEAK_STEPS)
        splits = {}
        for name in ("bare", "ours"):
            use(subject, name)
            splits[name] = split_of(ways[name], split, watched)
        rows = [beside(name, subject, times[name], times["bare"]) for name in ways]
        rows = [replace(row, split=splits.get(row.name), peak_gib=peaks.get(row.name)) for row in rows]
        if "usual_cached" in ways:
            rows, said = with_encoding(subject, rows, ways["bare"], resident, steps)
            notes += said
    rows, said = with_rates(subject, rows, resident)
    return rows, [*notes, *said, *too_noisy(rows), *better_than_the_least(rows)]


def better_than_the_least(rows: Sequence[StepRow]) -> list[str]:
    """A note where something took less time than the least that a step can be."""
    found = [row.name for row in rows if row.ratio < 1]
    return [f"{', '.join(found)}: quicker than bare, which does the least: {NOISY}"] if found else []


def made_one_by_one(
    subject: BenchSubject, make: Mapping[str, Callable[[], Way]], notes: list[str]
) -> tuple[dict[str, Way], dict[str, float | None]]:
    """Each way with its first steps taken, and the most that it held, as if it were there alone.

    The usual way may lack memory; that is noted.
    """
    device, ways, peaks = subject.context.device, dict[str, Way](), dict[str, float | None]()
    free_memory(device)
    first = allocated(device)
    for name, make_way in make.items():
        left = allocated(device) - first  # by the ways before it: not its own
        try:
            way = make_way()
            use(subject, name)
            with holding(subject.context, left, own_optimizer=name == "ours") as held:
                for number in range(PEAK_STEPS):
                    way(number)
        except Exception as error:
            if not name.startswith(USUAL) or not is_out_of_memory(error):
                raise
            notes.append(f"{name}: out of memory ({first_line(error)})")
            continue
        ways[name], peaks[name] = way, held.gib
    return ways, peaks


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def use(subject: BenchSubject, name: str) -> None:
    """Let the LoRA of a way work; compiled blocks are for the trainer's own."""
    if subject.context.compiled is not None:
        subject.context.compiled.on = name == "ours"
    use_adapter(subject.context.denoiser, USUAL if name.startswith(USUAL) else ADAPTER)


def with_encoding(
    subject: BenchSubject, rows: Sequence[StepRow], bare: Way, resident: list[list[MicroBatch]], steps: int
) -> tuple[list[StepRow], list[str]]:
    """The rows with that of the usual step which encodes, and a note where there is none."""
    *others, cached = rows
    if subject.load_encode is None:
        note = "usual does not encode here: an architecture alone has no encoders"
        return [*others, replace(cached, name=USUAL)], [note]
    # The encoders come last: what needs them must not take memory from the rows above.
    try:
        parameters = [each for name, each in subject.context.denoiser.named_parameters() if f".{USUAL}." in name]
        usual = usual_step(subject, parameters, resident, subject.load_encode())
        ways = {"bare": bare, USUAL: usual}
        times = timed_in_turn(ways, steps, subject.context.device, lambda name: use(subject, name))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return list(rows), [f"usual: out of memory with its encoders ({first_line(error)})"]
    return [*others, replace(beside(USUAL, subject, times[USUAL], times["bare"]), encodes=True), cached], []


def bare_step(subject: BenchSubject, resident: list[list[MicroBatch]], split: Split) -> Way:
    """Forward, backward and update on batches that lie ready."""
    context = subject.context
    ready = [[micro.to(context.device, context.dtype) for micro in micros] for micros in resident]
    noisy = [[context.process.add_noise(m.latents, m.noise, m.t).to(context.dtype) for m in micros] for micros in ready]
    target = [[context.process.target(m.latents, m.noise, m.t) for m in micros] for micros in ready]
    optimizer = torch.optim.AdamW(list(context.adapter.copies.values()), lr=STILL, fused=True)

    def step(number: int) -> None:
        micros = ready[number]
        for micro, each, wanted in zip(micros, noisy[number], target[number], strict=True):
            split.mark("forward")
            predicted = context.predict(context.denoiser, each, micro.t, micro.cond, micro.sizes)
            loss = mse_loss(predicted.float(), wanted) / len(micros)
            split.mark("backward")
            loss.backward()
        split.mark("optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def beside(name: str, subject: BenchSubject, own: Timed, base: Timed) -> StepRow:
    row = StepRow(**asdict(row_of(name, subject.name, own.wall, base.wall)))
    if subject.context.device.type != "cpu" or not all(base.cpu):  # some systems count CPU time in coarse ticks
        return row
    ratio = statistics.median(one / other for one, other in zip(own.cpu, base.cpu, strict=True))
    return replace(row, cpu_seconds_median=statistics.median(own.cpu), cpu_ratio=ratio)


def with_rates(
    subject: BenchSubject, rows: Sequence[StepRow], resident: Sequence[list[MicroBatch]]
) -> tuple[list[StepRow], list[str]]:
    """The rows with operations and rates, and where the device's rate is from."""
    tflop = tflop_of(subject, resident)
    rate, source = peak_tflops(subject.context.device, subject.context.dtype)
    found = []
    for row in rows:
        tflops = tflop / row.seconds_median
        found.append(replace(row, tflop=tflop, tflops=tflops, mfu=None if rate is None else tflops / rate))
    return found, [f"floor: {rate:.3g} TFLOP/s, {source}" if rate else f"floor: {source}"]


def tflop_of(subject: BenchSubject, resident: Sequence[list[MicroBatch]]) -> float:
    """Operations of a step on average, in TFLOP: of the commonest micro-batch as the plan has it, of others by their size."""
    shapes = Counter(tuple(micro.latents.shape) for micros in resident for micro in micros)
    (samples, _, height, width), _ = shapes.most_common(1)[0]
    config = subject.run.config
    memory_model = gauge_of(subject.family, subject.architecture, config)
    sizes = Sizes(config.lora.rank, samples, height * width, subject.run.planned.checkpointed or 0)
    flops = memory_model.footprint(sizes, subject.precision).flops
    numbers = sum(math.prod(shape) * count for shape, count in shapes.items())
    of_one = samples * next(iter(shapes))[1] * height * width
    return flops * numbers / of_one / len(resident) / 1e12
