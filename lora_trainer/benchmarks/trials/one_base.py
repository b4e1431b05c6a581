"""`bench together`: a step of several runs on one base model (`batch --together`) beside that of a run alone.

The runs of a row share a base, and each has its own seed, adapter, optimizer and micro-batches, which are ready before
anything is timed. A model of its own takes the steps of the run alone. All rows of a model take steps in turn in one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lora_trainer.batch.joint_jobs import settings_against
from lora_trainer.benchmarks.baseline import read_measurement
from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.measures import (
    COLUMNS,
    OWN,
    SMALL,
    Column,
    MeasureRow,
    Report,
    RequestedMeasure,
    figure,
    row_of,
    too_noisy,
)
from lora_trainer.benchmarks.own_loop import Way
from lora_trainer.benchmarks.subject import BenchSubject, subject_of
from lora_trainer.benchmarks.trials.adapters import settings_key
from lora_trainer.benchmarks.trials.steps import changed, inputs_of, own_way
from lora_trainer.benchmarks.turns import timed_in_turn
from lora_trainer.config.layers import Resolved
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.hardware import package_versions
from lora_trainer.core.io import write_json
from lora_trainer.core.taking_turns import Turns
from lora_trainer.evaluation.loading import free_memory
from lora_trainer.training.processes import join_processes
from lora_trainer.training.run_group import Member, RunGroup

BENCH, ALONE = "together", "alone"
STEPS = 8
RUNS = (1, 2, 4, 8)  # on one base
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as set": {},
    "nf4": {"memory.weight_dtype": "nf4"},
    "all blocks swapped": {"memory.blocks_to_swap": 10_000},  # as many as there are
}
ABOUT = {
    "median ms": "a step of one run: of K together, the time of a step of all, over K",
    "ratio": f"that over the row `{ALONE}` of the same model, the median of the ratios step by step: 0.5 is twice as fast",
    "passes": "of the base model in a step of all runs; K runs alone, one after the other, need K times that of `alone`",
}
PASSES: tuple[Column, ...] = (*COLUMNS, ("runs", figure("runs", "d")), ("passes", figure("passes", ".2f")))


@dataclass(frozen=True)
class TogetherRow(MeasureRow):
    """Seconds are those of a step of all `runs`, over their number; so is `ratio`, which is over a run alone."""

    runs: int = 1
    passes: float = 1.0  # of the base in a step of all


@dataclass
class JointRuns:
    """Runs on one base that take their steps when they are asked to."""

    group: RunGroup
    turns: Turns
    lines: list[str] = field(default_factory=list)  # what the runs logged about their passes

    def step(self, number: int) -> None:
        """A step of every run. Steps come in order, whatever number is requested. Raises what ended a run."""
        del number
        self.turns.resume(True)
        if self.turns.has_ended:
            raise self.turns.error or RuntimeError("the runs ended")


def measure(asked: RequestedMeasure) -> Report:
    """Time `asked.steps` steps of each row. Raises UserError."""
    if against := settings_against(asked.resolved.config):
        raise UsageError(Problem(f"With {against} a run trains alone.", "Measure without."))
    wanted = {
        name: (settings, runs)
        for name, settings in VARIANTS.items()
        if (runs := [count for count in RUNS if (asked.only or "") in row_name(name, count)])
    }
    if not wanted:
        known = ", ".join(row_name(name, RUNS[-1]) for name in VARIANTS)
        raise UsageError(Problem(f"No row has {asked.only!r} in its name.", f"There are 1, 2, 4 and 8 of: {known}."))
    rows, notes = list[TogetherRow](), list[str]()
    kept = {} if asked.rows is None or not asked.rows.exists() else kept_rows(asked.rows)
    for named in asked.subjects or (OWN, SMALL):
        for name, (settings, runs) in wanted.items():
            try:
                resolved = changed(asked.resolved, settings)
                place = (device_name(), named, asked.tiny, asked.steps or STEPS, name, runs, settings_key(resolved))
                if (key := str(place)) not in kept:
                    kept[key] = measure_together(asked, resolved, named, name, runs)
            except UsageError as error:
                if not settings or len(wanted) == 1:
                    raise
                notes += [f"{name}: {problem.message}" for problem in error.problems]
                continue
            finally:
                free_memory(join_processes().device)
            if asked.rows is not None:
                keep_rows(asked.rows, kept)
            found, said = kept[key]
            rows += found
            notes += said
    return Report(rows, ABOUT, notes, PASSES, first="runs")


def measure_together(
    asked: RequestedMeasure, resolved: Resolved, named: str, name: str, runs: Sequence[int]
) -> tuple[list[TogetherRow], list[str]]:
    """The rows of one model: a run alone, then each number of runs on one base; notes."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        alone = subject_of(resolved, folder / ALONE, tiny=asked.tiny, named=named)
        inputs = inputs_of(alone)
        ways: dict[str, Way] = {row_name(name): own_way(alone.context, inputs)}
        joint = dict[str, JointRuns]()
        for count in runs:

            def build(number: int, member: Member, count: int = count) -> BenchSubject:
                own = changed(resolved, {"train.seed": resolved.config.train.seed + number})
                folder_of_run = folder / f"{count}-{number}"
                return subject_of(own, folder_of_run, tiny=asked.tiny, named=named, member=member)

            group = RunGroup(count)
            if joint:  # one base for all of them
                first = next(iter(joint.values())).group
                group.bare, group.layout = first.bare, first.layout
            joint[row_name(name, count)] = made = stack.enter_context(joint_runs(group, count, build))
            ways[row_name(name, count)] = made.step
        before = {each: made.group.passes for each, made in joint.items()}
        rounds = 0

        def count_rounds(each: str) -> None:
            nonlocal rounds
            rounds += each == row_name(name)

        times = timed_in_turn(ways, asked.steps or STEPS, alone.context.device, before=count_rounds)
        base = times[row_name(name)].wall
        micros = sum(map(len, (inputs[number % len(inputs)] for number in range(rounds)))) / rounds
        rows = [TogetherRow(**vars(row_of(row_name(name), alone.name, base, base)), passes=micros)]
        for count, (each, made) in zip(runs, joint.items(), strict=True):
            row = row_of(each, alone.name, [seconds / count for seconds in times[each].wall], base)
            rows.append(TogetherRow(**vars(row), runs=count, passes=(made.group.passes - before[each]) / rounds))
        counted = [f"{row.runs} together {row.passes:.3g}, one by one {row.runs * micros:.3g}" for row in rows[1:]]
        swapped = alone.context.built.swapped
        notes = [
            f"{name}: passes of the base in a step: {'; '.join(counted)}",
            *([f"{name}: {swapped} blocks are swapped"] if swapped else []),
            *too_noisy(rows),
        ]
        notes += [f"{each}: {line}" for each, made in joint.items() for line in made.lines]
        if alone.context.compiled is not None:
            notes.append(f"{row_name(name)}: its blocks are compiled, as `train` does; those of runs together are not")
    return rows, [f"{alone.name}: {note}" for note in notes]


@contextmanager
def joint_runs(group: RunGroup, count: int, build: Callable[[int, Member], BenchSubject]) -> Iterator[JointRuns]:
    """So many runs on the group's base, built and ready. Inside the block each `step` is one of all of them."""
    taken, goes_on = 0, True

    def work(number: int, member: Member) -> None:
        nonlocal taken, goes_on
        try:
            context = (subject := build(number, member)).context
            assert context.joined is not None, "the runs have one layout"
            member.say = lambda line: None if line in made.lines else made.lines.append(line)
            way, begin, step = own_way(context, inputs_of(subject)), context.joined.begin_step, -1
            while goes_on:
                if step >= 0:
                    begin(step)
                    way(step)
                step, taken = step + 1, taken + 1
                if taken % count == 0 and goes_on:  # the last of them
                    goes_on = turns.ask("next step")
        finally:
            goes_on = False  # nor do the others, if this one failed

    turns = Turns(lambda: group.run({str(number): partial(work, number) for number in range(count)}), f"{count} runs")
    made = JointRuns(group, turns)
    made.step(-1)  # builds them
    try:
        yield made
    finally:
        while not turns.has_ended:
            turns.resume(False)


def row_name(variant: str, runs: int | None = None) -> str:
    return f"{variant}, {ALONE if runs is None else f'{runs} together'}"


def kept_rows(path: Path) -> dict[str, tuple[list[TogetherRow], list[str]]]:
    """What a file has already, by its model and settings. Raises UsageError for a file of something else."""
    found = read_measurement(path, BENCH)["rows"]
    return {each["settings"]: ([TogetherRow(**row) for row in each["rows"]], each["notes"]) for each in found}


def keep_rows(path: Path, kept: Mapping[str, tuple[list[TogetherRow], list[str]]]) -> None:
    rows = [
        {"settings": key, "rows": [asdict(row) for row in found], "notes": notes}
        for key, (found, notes) in kept.items()
    ]
    write_json(path, {"bench": BENCH, "device": device_name(), "versions": package_versions(), "rows": rows})
