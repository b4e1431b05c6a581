"""Before and after of a setting: the trainer's own loop without and with it, and what that does to the losses.

Both take the same samples with the same noise, in turn in one process, each on a model of its own. Settings that hold
for a whole process, and two models that do not fit the GPU together, are measured one after the other, which is said.
The losses are also compared over several seeds, each with samples, noise and initial weights of its own: whether the
setting loses quality is judged by the interval of these differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from lora_trainer.benchmarks.held import HeldMemory, holding
from lora_trainer.benchmarks.measures import COLUMNS, Column, MeasureRow, RequestedMeasure, figure, row_of, too_noisy
from lora_trainer.benchmarks.own_loop import Way, own_loop
from lora_trainer.benchmarks.split import Split
from lora_trainer.benchmarks.subject import BenchSubject, subject_as_asked, subject_of
from lora_trainer.benchmarks.trials.specs import loss_difference
from lora_trainer.benchmarks.trials.steps import FIRST, changed
from lora_trainer.benchmarks.turns import WARM_UP, timed_in_turn
from lora_trainer.config.layers import Resolved, flattened
from lora_trainer.core.errors import Problem, UserError, first_line, is_out_of_memory
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.intervals import FEWEST_VALUES, mean_interval
from lora_trainer.monitor.trackers import EVENTS, METRICS, read_lines
from lora_trainer.training.processes import join_processes

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config

FIRST_STEPS = 2  # the first makes the optimizer's state
SEEDS = 4  # whose losses are compared
LOSS_KEPT = 0.01  # of the losses on average: what rounding may change
PRESET = "preset="  # --compare preset=speed
OF_THE_PROCESS = ("hardware.", "memory.limit_gib", "memory.expandable_segments", "train.deterministic")


ABOUT = {
    "ours": "this trainer's own loop with the settings as they are",
    "ratio": "time over `ours`, the median of the ratios step by step",
    "peak GiB": "what was held at most: on a GPU by the allocator, on a CPU all storages of a step, counted",
    "loss off": f"mean difference of the losses of the first {FIRST} steps from those of `ours`, relative",
    "at most": "the largest of them",
    "loss over seeds": "mean of the later half of the steps over that of `ours`, with the 95 % interval over the seeds; "
    f"the exit code is 5 where the interval lies above {LOSS_KEPT:+.0%}",
}


@dataclass(frozen=True)
class VersusRow(MeasureRow):
    """`loss_mean` and `loss_most`: how far the losses of the first steps are from those without, relative; 0 is equal.

    `loss_change`: how much higher the losses of the later half of the steps are, the mean over `seeds` with its 95 %
    interval; infinite where the loss is not finite.

    `compile_seconds` is what compiling took, `pays_from` the steps from which a run is faster by it: None where none is.
    """

    loss_mean: float | None = None
    loss_most: float | None = None
    seeds: int = 1
    loss_change: float | None = None
    loss_change_low: float | None = None
    loss_change_high: float | None = None
    compile_seconds: float | None = None
    pays_from: int | None = None


@dataclass(frozen=True)
class NotRun:
    """A setting that did not take effect, and why: a row without figures."""

    name: str
    model: str
    not_run: str
    seconds_median: None = None
    seconds_p10: None = None
    seconds_p90: None = None
    ratio: None = None
    encodes: bool = False
    peak_gib: None = None
    loss_mean: None = None
    loss_most: None = None
    loss_change: None = None


# What changes nothing on a CPU.
OF_A_GPU = (
    *("hardware.tf32", "hardware.cudnn_benchmark", "memory.expandable_segments"),
    *("memory.offload_activations", "memory.limit_gib", "memory.oom_recovery_steps"),
)


VERSUS_COLUMNS: tuple[Column, ...] = (
    *COLUMNS,
    ("peak GiB", figure("peak_gib", ".3f")),
    ("loss off", figure("loss_mean", ".2%")),
    ("at most", figure("loss_most", ".2%")),
    (
        "loss over seeds",
        lambda row: (
            ""
            if row.loss_change is None
            else f"{row.loss_change:+.2%} ({row.loss_change_low:+.2%} to {row.loss_change_high:+.2%})"
        ),
    ),
)


@dataclass(frozen=True)
class Taken:
    """One side: seconds of its timed steps, losses of all, what it held, what its model is called."""

    seconds: list[float]
    losses: list[float | None]  # None of skipped steps
    held: float | None
    model: str
    parameters: int  # trained
    not_run: str | None = None  # why its settings did not take effect
    compile_seconds: float | None = None


def rows_versus(
    asked: RequestedMeasure, named: str, steps: int, folder: Path
) -> tuple[list[VersusRow | NotRun], list[str]]:
    """A row without, and one with each of the settings that were asked for; notes. Raises UserError."""
    rows, notes = list[VersusRow | NotRun](), list[str]()
    seeds = 1 if asked.best is not None else asked.seeds or SEEDS
    without: dict[int, list[float | None]] = {}  # losses of `ours` by the number of the seed
    for place, (text, settings) in enumerate(asked.versus.items()):
        sides = {"ours": asked.resolved, text: changed(asked.resolved, settings, text)}
        together = not any(name.startswith(OF_THE_PROCESS) for name in settings)
        try:
            taken, said = both_taken(asked, named, sides, steps, folder / str(place), together=together)
        except Exception as error:
            if asked.best is None or not (isinstance(error, UserError) or is_out_of_memory(error)):
                raise
            notes.append(f"{text}: {first_line(error)}")  # one of many that are tried
            continue
        notes += [f"{text}: {each}" for each in said]
        found = rows_of(taken)
        notes += [f"{row.name}: not run: {row.not_run}" for row in found if isinstance(row, NotRun)]
        if isinstance(found[1], VersusRow) and found[1].compile_seconds is not None:
            notes.append(break_even_note(found[1]))
        if text.startswith(PRESET) and isinstance(found[1], VersusRow):
            found[1] = replace(found[1], loss_mean=None, loss_most=None)  # it learns in another way
        elif seeds > 1 and isinstance(found[1], VersusRow):
            pairs = []
            for number in range(seeds):
                count, own = len(taken[text].losses), folder / f"{place}-{number}"
                if number not in without:
                    without[number] = losses_of_seed(asked, named, sides["ours"], number, count, own / "ours")
                pairs.append((losses_of_seed(asked, named, sides[text], number, count, own / "with"), without[number]))
            found[1] = with_seeds(found[1], pairs)
        rows += found[1 if rows else 0 :]
    return rows, [*notes, *too_noisy([row for row in rows if isinstance(row, VersusRow)])]


def break_even_note(row: VersusRow) -> str:
    """From how many steps a run is faster with compiled blocks, as measured here."""
    if row.pays_from is None:
        return f"{row.name}: compiling took {row.compile_seconds:.0f} s, and a step is not faster by it: it never pays here"
    pays = (
        f"it pays in runs of {row.pays_from:,} steps or more (compile.enabled=auto, compile.min_steps={row.pays_from})"
    )
    return f"{row.name}: compiling took {row.compile_seconds:.0f} s: {pays}"


def losses_of_seed(
    asked: RequestedMeasure, named: str, side: Resolved, number: int, steps: int, folder: Path
) -> list[float | None]:
    """The losses of so many steps with the seed of that number; 0 is the settings' own.

    Without the warm-up: the loop that is measured has no end, so that its warm-up would have none either.
    """
    folder.mkdir(parents=True)
    seeded = changed(side, {"train.seed": side.config.train.seed + number, "lr_scheduler.warmup_steps": 0})
    subject = subject_of(seeded, folder, tiny=asked.tiny, named=named)
    with own_loop(subject.run, folder, Split(subject.context.device), rate=None) as way:
        for step in range(steps):
            way(step)
    del subject, way
    free_memory(join_processes().device)
    return [row["loss"] for row in read_lines(folder / METRICS)][:steps]


def with_seeds(row: VersusRow, pairs: Sequence[tuple[Sequence[float | None], Sequence[float | None]]]) -> VersusRow:
    """The row with the change of the losses over the seeds, of each the losses with the setting and without it."""
    changes = list[float]()
    for own, base in pairs:
        later = [
            (one, other) for one, other in list(zip(own, base, strict=False))[len(base) // 2 :] if other is not None
        ]
        if any(one is None for one, _ in later):
            return replace(row, seeds=len(pairs), loss_change=inf, loss_change_low=inf, loss_change_high=inf)
        if later:
            changes.append(sum(one or 0.0 for one, _ in later) / max(sum(other for _, other in later), 1e-12) - 1.0)
    if len(changes) < FEWEST_VALUES:
        return row
    mean, reach = mean_interval(changes)
    return replace(
        row, seeds=len(changes), loss_change=mean, loss_change_low=mean - reach, loss_change_high=mean + reach
    )


def quality_of(rows: Sequence[Any]) -> tuple[list[Problem], list[str]]:
    """The rows that lose quality, and a note for those of which the seeds do not decide it."""
    lost, notes = list[Problem](), list[str]()
    for row in rows:
        if row.loss_change is None:
            continue
        interval = f"{row.loss_change_low:+.1%} to {row.loss_change_high:+.1%}, 95 % over {row.seeds} seeds"
        if row.loss_change_low > LOSS_KEPT:
            change = "is not finite" if row.loss_change == inf else f"changes by {row.loss_change:+.1%} ({interval})"
            message = f"{row.name} of {row.model} loses quality: the loss {change}; {LOSS_KEPT:.0%} is allowed."
            lost.append(
                Problem(
                    "quality_lost", message, "Do without the setting, or look at a whole run's validation loss with it."
                )
            )
        elif row.loss_change_high > LOSS_KEPT:
            notes.append(
                f"{row.name}: the losses do not show that quality is kept ({interval}): use more --seeds or --steps"
            )
    return lost, notes


def untaken(settings: Config, base: Config, subject: BenchSubject, folder: Path) -> str | None:
    """Why what differs from `base` did not take effect; None where it did."""
    now, before, on_gpu = flattened(settings), flattened(base), subject.context.device.type == "cuda"
    differs = [name for name in now if now[name] != before[name]]
    if differs and not on_gpu and set(differs) <= set(OF_A_GPU):
        return "it is for GPUs, and there is none"
    compiled = subject.context.compiled
    if "compile.enabled" in differs and settings.compile.enabled is True and (compiled is None or not compiled.on):
        said = [event["message"] for event in read_lines(folder / EVENTS) if event.get("kind") == "compile"]
        reasons = [*(line for line in subject.said if line.startswith("not compiled")), *said]
        return reasons[-1] if reasons else "blocks were not compiled"
    return None


def both_taken(
    asked: RequestedMeasure, named: str, sides: Mapping[str, Resolved], steps: int, folder: Path, *, together: bool
) -> tuple[dict[str, Taken], list[str]]:
    """Both sides, in turn where they can be, and why where not."""
    taken = in_turn(asked, named, sides, steps, folder / "in-turn") if together else None
    if taken is not None:
        return taken, []
    free_memory(join_processes().device)  # nothing refers to the two models any more
    why = "the GPU has no room for both" if together else "it holds for a whole process"
    alone = {
        name: one_alone(asked, named, name, side, steps, folder / str(number))
        for number, (name, side) in enumerate(sides.items())
    }
    return alone, [f"measured after the other, not in turn: {why}"]


def in_turn(
    asked: RequestedMeasure, named: str, sides: Mapping[str, Resolved], steps: int, folder: Path
) -> dict[str, Taken] | None:
    """Both sides step by step; None where memory does not suffice for both."""
    device = join_processes().device
    try:
        with ExitStack() as stack:
            made = {name: made_ready(asked, named, side, folder / name, stack) for name, side in sides.items()}
            ways = {name: way for name, (_, way, _) in made.items()}
            seconds = timed_in_turn(ways, at_least(steps), device, first=FIRST_STEPS)
            return {
                name: taken_of(asked, subject, sides[name], seconds[name].wall, folder / name, held)
                for name, (subject, _, held) in made.items()
            }
    except Exception as error:
        if device.type != "cuda" or not is_out_of_memory(error):
            raise
        return None


def one_alone(asked: RequestedMeasure, named: str, name: str, side: Resolved, steps: int, folder: Path) -> Taken:
    device = join_processes().device
    with ExitStack() as stack:
        subject, way, held = made_ready(asked, named, side, folder, stack)
        seconds = timed_in_turn({name: way}, at_least(steps), device, first=FIRST_STEPS)
        found = taken_of(asked, subject, side, seconds[name].wall, folder, held)
    del subject, way
    free_memory(device)
    return found


def taken_of(
    asked: RequestedMeasure, subject: BenchSubject, side: Resolved, seconds: list[float], folder: Path, held: HeldMemory
) -> Taken:
    why = untaken(side.config, asked.resolved.config, subject, folder)
    losses = [row["loss"] for row in read_lines(folder / METRICS)]
    compiled = subject.context.compiled
    compile_seconds = None if compiled is None else compiled.seconds
    return Taken(seconds, losses, held.gib, subject.name, subject.context.adapter.size, why, compile_seconds)


def made_ready(
    asked: RequestedMeasure, named: str, side: Resolved, folder: Path, stack: ExitStack
) -> tuple[BenchSubject, Way, HeldMemory]:
    """A model of its own with its loop, its first steps taken; what they held."""
    folder.mkdir(parents=True)
    others = torch.cuda.memory_allocated() if join_processes().device.type == "cuda" else 0
    made = subject_as_asked if side is asked.resolved else subject_of  # the other side's row says why not
    subject = made(side, folder, tiny=asked.tiny, named=named)
    way = stack.enter_context(own_loop(subject.run, folder, Split(subject.context.device), rate=None))
    with holding(subject.context, others) as held:
        for number in range(FIRST_STEPS):
            way(number)
    return subject, way, held


def at_least(steps: int) -> int:
    """Timed steps: so many that there are losses of the first `FIRST` steps."""
    return max(steps, FIRST - WARM_UP - FIRST_STEPS)


def rows_of(taken: Mapping[str, Taken]) -> list[VersusRow | NotRun]:
    base = next(iter(taken.values()))
    return [
        NotRun(name, base.model, each.not_run) if each.not_run else row_beside(name, each, base)
        for name, each in taken.items()
    ]


def row_beside(name: str, own: Taken, base: Taken) -> VersusRow:
    count = min(len(own.seconds), len(base.seconds))
    row = row_of(name, base.model, own.seconds[:count], base.seconds[:count])
    both = zip(own.losses[:FIRST], base.losses[:FIRST], strict=False)
    pairs = [(one, other) for one, other in both if one is not None and other is not None]
    found = loss_difference([one for one, _ in pairs], [other for _, other in pairs])
    mean, most = found if found is not None else (None, None)
    values: dict[str, Any] = vars(replace(row, peak_gib=own.held))
    compile_seconds, pays_from = None, None
    if own.compile_seconds is not None and base.compile_seconds is None:
        compile_seconds = own.compile_seconds
        saved = median(base.seconds[:count]) - median(own.seconds[:count])
        pays_from = ceil(compile_seconds / saved) if saved > 0 else None
    return VersusRow(**values, loss_mean=mean, loss_most=most, compile_seconds=compile_seconds, pays_from=pays_from)
