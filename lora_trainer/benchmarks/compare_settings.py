"""`bench step --compare`: the trainer's own loop without and with a setting, and what that does to the losses.

Both take the same samples with the same noise, in turn in one process, each on a model of its own. Settings that hold
for a whole process, and two models that do not fit the GPU together, are measured one after the other, which is noted.
The losses are also compared over several seeds, each with samples, noise and initial weights of its own: the interval
of these differences decides whether the setting loses quality.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lora_trainer.benchmarks.bench_model import BenchModel, build_bench_model, refuse_uncompiled
from lora_trainer.benchmarks.device import allocated_bytes
from lora_trainer.benchmarks.interleaved import WARM_UP, run_together_or_alone, time_in_turn
from lora_trainer.benchmarks.measures import (
    COLUMNS,
    FIRST,
    Column,
    RequestedMeasure,
    Row,
    change,
    figure,
    interval_figures,
    loss_difference,
    mean_and_interval,
    time_row,
    too_noisy,
)
from lora_trainer.benchmarks.peak_memory import PeakMemory, measure_peak
from lora_trainer.benchmarks.trainer_loop import trainer_loop
from lora_trainer.config.layers import Resolved, flattened
from lora_trainer.core.errors import Problem, UserError, first_line, is_out_of_memory
from lora_trainer.core.hardware import free_memory
from lora_trainer.monitor.trackers import EVENTS, METRICS, read_lines
from lora_trainer.training.processes import join_processes

if TYPE_CHECKING:
    from lora_trainer.benchmarks.interleaved import Way
    from lora_trainer.config.schema import Config

PEAK_STEPS = 2  # the first makes the optimizer's state
SEEDS = 4  # whose losses are compared
LOSS_KEPT = 0.01  # of the losses on average: what rounding may change
PRESET = "preset="  # --compare preset=speed
OF_THE_PROCESS = ("hardware.", "memory.limit_gib", "memory.expandable_segments", "train.deterministic")
# What changes nothing on a CPU.
OF_A_GPU = frozenset(
    (
        *("hardware.tf32", "hardware.cudnn_benchmark", "memory.expandable_segments"),
        *("memory.offload_activations", "memory.limit_gib", "memory.oom_recovery_steps"),
    )
)
ABOUT = {
    "ours": "this trainer's own loop with the settings as they are",
    "ratio": "time over `ours`, the median of the ratios step by step",
    "peak GiB": "what was held at most: on a GPU by the allocator, on a CPU all storages of a step, counted",
    "loss off": f"mean difference of the losses of the first {FIRST} steps from those of `ours`, relative",
    "at most": "the largest of them",
    "loss over seeds": "mean of the later half of the steps over that of `ours`, with the 95 % interval over the seeds; "
    f"the exit code is 5 where the interval lies above {LOSS_KEPT:+.0%}",
}
COMPARE_COLUMNS: tuple[Column, ...] = (
    *COLUMNS,
    ("peak GiB", figure("peak_gib", ".3f")),
    ("loss off", figure("loss_mean", ".2%")),
    ("at most", figure("loss_most", ".2%")),
    ("loss over seeds", mean_and_interval("loss_change", "+.2%")),
)
Losses = Sequence[float | None]  # None of skipped steps


@dataclass(frozen=True)
class Side:
    """What was measured with some settings. `parameters` are trained; `not_run` is why the settings had no effect."""

    model: str
    seconds: Sequence[float]
    losses: Losses = ()
    peak_gib: float | None = None
    parameters: int = 0
    not_run: str | None = None
    compile_seconds: float | None = None


# ---- rows


def compare_all(
    request: RequestedMeasure, subject: str, steps: int, folder: Path, *, skip_failed: bool = False
) -> tuple[list[Row], list[str]]:
    """A row without, and one with each of the settings that were requested; notes. Raises UserError."""
    rows, notes = list[Row](), list[str]()
    with_seeds = not skip_failed and request.seeds != 1
    losses_without = list[Losses]()  # of each seed
    for place, (text, settings) in enumerate(request.compare.items()):
        own = folder / str(place)
        sides = {"ours": request.resolved, text: change(request.resolved, settings, text)}
        try:
            measured, own_notes = measure_sides(request, subject, sides, steps, own)
        except Exception as error:
            if not skip_failed or not (isinstance(error, UserError) or is_out_of_memory(error)):
                raise
            notes.append(f"{text}: {first_line(error)}")
            continue
        notes += [f"{text}: {note}" for note in own_notes]
        base, row = compare_sides(measured)
        if not rows:
            rows.append(base)
        if row["not_run"] is not None:
            notes.append(f"{text}: not run: {row['not_run']}")
        elif text.startswith(PRESET):  # it learns in another way
            row = row.with_figures(loss_mean=None, loss_most=None)
        elif with_seeds:
            count = len(measured[text].losses)
            losses_without = losses_without or train_seeds(request, subject, request.resolved, count, own / "without")
            losses = train_seeds(request, subject, sides[text], count, own / "with")
            row = add_seeds(row, list(zip(losses, losses_without, strict=True)))
        if row["compile_seconds"] is not None:
            notes.append(describe_break_even(row))
        rows.append(row)
    return rows, [*notes, *too_noisy(rows)]


def compare_sides(sides: Mapping[str, Side]) -> list[Row]:
    """The rows of the sides, compared with the first."""
    base = next(iter(sides.values()))
    return [compare_row(name, side, base) for name, side in sides.items()]


def compare_row(name: str, own: Side, base: Side) -> Row:
    """Time, memory and losses of a side compared with the base's; no figures where its settings had no effect."""
    if own.not_run is not None:
        unknown = dict.fromkeys(("loss_mean", "loss_most", "loss_change"))
        return Row(name, base.model, figures={"not_run": own.not_run, **unknown})
    count = min(len(own.seconds), len(base.seconds))
    row = time_row(name, base.model, own.seconds[:count], base.seconds[:count])
    both = zip(own.losses[:FIRST], base.losses[:FIRST], strict=False)
    pairs = [(one, other) for one, other in both if one is not None and other is not None]
    mean, most = loss_difference([one for one, _ in pairs], [other for _, other in pairs]) or (None, None)
    figures: dict[str, Any] = {"loss_mean": mean, "loss_most": most, "seeds": 1, "loss_change": None}
    figures |= {"compile_seconds": None, "pays_from": None}
    if own.compile_seconds is not None and base.compile_seconds is None:
        saved = median(base.seconds[:count]) - median(own.seconds[:count])
        figures["compile_seconds"] = own.compile_seconds
        figures["pays_from"] = ceil(own.compile_seconds / saved) if saved > 0 else None
    return replace(row, peak_gib=own.peak_gib, figures=figures)


def describe_break_even(row: Row) -> str:
    """From how many steps a run is faster with compiled blocks, as measured here."""
    compiling = f"{row.name}: compiling took {row['compile_seconds']:.0f} s"
    pays_from = row["pays_from"]
    if pays_from is None:
        return f"{compiling}, and a step is not faster by it: it never pays here"
    setting = f"compile.enabled=auto, compile.min_steps={pays_from}"
    return f"{compiling}: it pays in runs of {pays_from:,} steps or more ({setting})"


# ---- quality


def train_seeds(request: RequestedMeasure, subject: str, side: Resolved, steps: int, folder: Path) -> list[Losses]:
    """The losses of so many steps with each seed, the settings' own first.

    Without the learning rate's warm-up: the loop that is measured has no end, so that its warm-up would have none either.
    """
    found = list[Losses]()
    for number in range(request.seeds or SEEDS):
        own = folder / str(number)
        own.mkdir(parents=True)
        seeded = change(side, {"train.seed": side.config.train.seed + number, "lr_scheduler.warmup_steps": 0})
        model = build_bench_model(seeded, own, tiny=request.tiny, subject=subject)
        with trainer_loop(model.run, own, learning_rate=None) as way:
            for step in range(steps):
                way(step)
        del model, way
        free_memory(join_processes().device)
        found.append([row["loss"] for row in read_lines(own / METRICS)][:steps])
    return found


def add_seeds(row: Row, pairs: Sequence[tuple[Losses, Losses]]) -> Row:
    """The row with the change of the losses over the seeds, of each the losses with the setting and without it."""
    changes = [later_change(own, base) for own, base in pairs]
    known = [each for each in changes if each is not None]
    return row.with_figures(seeds=len(known), **interval_figures("loss_change", known))


def later_change(own: Losses, base: Losses) -> float | None:
    """How much higher the losses of the later half of the steps are, relative; infinite where one is not finite."""
    pairs = list(zip(own, base, strict=False))[len(base) // 2 :]
    total = total_base = 0.0
    for one, other in pairs:
        if other is None:
            continue
        if one is None:
            return inf
        total += one
        total_base += other
    return total / total_base - 1.0 if total_base else None


def judge_quality(rows: Sequence[Row]) -> tuple[list[Problem], list[str]]:
    """The rows that lose quality, and a note for those of which the seeds do not decide it."""
    lost, notes = list[Problem](), list[str]()
    for row in rows:
        change_of_loss = row["loss_change"]
        if change_of_loss is None:
            continue
        interval = f"{row['loss_change_low']:+.1%} to {row['loss_change_high']:+.1%}, 95 % over {row['seeds']} seeds"
        if row["loss_change_low"] > LOSS_KEPT:
            text = "is not finite" if change_of_loss == inf else f"changes by {change_of_loss:+.1%} ({interval})"
            message = f"{row.name} of {row.model} loses quality: the loss {text}; {LOSS_KEPT:.0%} is allowed."
            fix = "Do without the setting, or look at a whole run's validation loss with it."
            lost.append(Problem("quality_lost", message, fix))
        elif row["loss_change_high"] > LOSS_KEPT:
            notes.append(
                f"{row.name}: the losses do not show that quality is kept ({interval}): use more --seeds or --steps"
            )
    return lost, notes


# ---- sides


def measure_sides(
    request: RequestedMeasure, subject: str, sides: Mapping[str, Resolved], steps: int, folder: Path
) -> tuple[dict[str, Side], list[str]]:
    """The trainer's loop with the settings of each side, compared with those of the first; notes. Raises UserError."""
    base = next(iter(sides.values()))
    differing = {name for side in sides.values() for name in differing_settings(side.config, base.config)}

    def run(names: Sequence[str]) -> dict[str, Side]:
        own = Path(tempfile.mkdtemp(dir=folder))
        loops = dict[str, StartedLoop]()
        with ExitStack() as stack:
            for name in names:
                loops[name] = start_loop(request, subject, sides[name], own / name, stack)
                if sides[name] is base:  # the row of another side says why not
                    refuse_uncompiled(loops[name].model)
            ways = {name: loop.way for name, loop in loops.items()}
            # At least so many steps that there are losses of the first `FIRST`.
            count = max(steps, FIRST - WARM_UP - PEAK_STEPS)
            timings = time_in_turn(ways, count, join_processes().device, first=PEAK_STEPS)
            return {name: loop.finish(timings[name].seconds, base.config) for name, loop in loops.items()}

    folder.mkdir(parents=True, exist_ok=True)
    together = not any(name.startswith(OF_THE_PROCESS) for name in differing)
    return run_together_or_alone(list(sides), run, together=together)


@dataclass(frozen=True)
class StartedLoop:
    """A model of its own with its loop, its first steps taken: what they held, and the folder of their numbers."""

    model: BenchModel
    way: Way
    peak: PeakMemory
    folder: Path

    def finish(self, seconds: Sequence[float], base: Config) -> Side:
        context, compiled = self.model.context, self.model.context.compiled
        return Side(
            model=self.model.name,
            seconds=seconds,
            losses=[row["loss"] for row in read_lines(self.folder / METRICS)],
            peak_gib=self.peak.gib,
            parameters=context.adapter.size,
            not_run=explain_no_effect(self.model, base, self.folder),
            compile_seconds=None if compiled is None else compiled.seconds,
        )


def start_loop(request: RequestedMeasure, subject: str, side: Resolved, folder: Path, stack: ExitStack) -> StartedLoop:
    folder.mkdir(parents=True)
    others = allocated_bytes(join_processes().device)
    model = build_bench_model(side, folder, tiny=request.tiny, subject=subject)
    way = stack.enter_context(trainer_loop(model.run, folder, learning_rate=None))
    with measure_peak(model.context, others=others) as peak:
        for number in range(PEAK_STEPS):
            way(number)
    return StartedLoop(model, way, peak, folder)


def differing_settings(settings: Config, base: Config) -> list[str]:
    own, before = flattened(settings), flattened(base)
    return [name for name in own if own[name] != before[name]]


def explain_no_effect(model: BenchModel, base: Config, folder: Path) -> str | None:
    """Why what differs from `base` did not take effect; None where it did."""
    settings, compiled = model.resolved.config, model.context.compiled
    differing = differing_settings(settings, base)
    if differing and model.device.type != "cuda" and OF_A_GPU.issuperset(differing):
        return "it is for GPUs, and there is none"
    if "compile.enabled" not in differing or settings.compile.enabled is not True:
        return None
    if compiled is not None and compiled.on:
        return None
    reasons = [line for line in model.context.built.notes if line.startswith("not compiled")]
    reasons += [event["message"] for event in read_lines(folder / EVENTS) if event.get("kind") == "compile"]
    return reasons[-1] if reasons else "blocks were not compiled"
