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
from typing import TYPE_CHECKING, Any

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
from lora_trainer.benchmarks.subject import BenchSubject, subject_of
from lora_trainer.benchmarks.trials.adapters import settings_key
from lora_trainer.benchmarks.trials.steps import changed, inputs_of, own_way
from lora_trainer.benchmarks.turns import WARM_UP, timed_in_turn
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.hardware import free_memory, package_versions
from lora_trainer.core.io import write_json
from lora_trainer.core.taking_turns import Turns
from lora_trainer.jobs.joint_jobs import settings_against
from lora_trainer.models.memory.block_swap import BLOCK_SWAP
from lora_trainer.training.processes import join_processes
from lora_trainer.training.run_group import Member, RunGroup

if TYPE_CHECKING:
    from lora_trainer.benchmarks.own_loop import Way
    from lora_trainer.config.layers import Resolved

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
    "passes": "of the base model for a step of one run: of K together, those for a step of all, over K",
    "copied MiB": "of the base model's weights, to the GPU for a step of one run; on a CPU, as if it were a GPU",
}
ROW: tuple[Column, ...] = (
    *COLUMNS,
    ("runs", figure("runs", "d")),
    ("passes", figure("passes", ".3f")),
    ("copied MiB", figure("copied_mib", ".1f")),
)


@dataclass(frozen=True)
class TogetherRow(MeasureRow):
    """Seconds, passes of the base and MiB of its weights are those of a step of all `runs`, over their number.

    `ratio` is of the seconds, over those of a run alone.
    """

    runs: int = 1
    passes: float = 1.0
    copied_mib: float = 0.0


@dataclass
class JointRuns:
    """Runs on one base that take their steps when they are asked to."""

    group: RunGroup
    count: int
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
        raise UsageError(Problem("trains_alone", f"With {against} a run trains alone.", "Measure without."))
    wanted = {
        name: (settings, runs)
        for name, settings in VARIANTS.items()
        if (runs := [count for count in RUNS if (asked.only or "") in row_name(name, count)])
    }
    if not wanted:
        known = ", ".join(row_name(name, RUNS[-1]) for name in VARIANTS)
        raise UsageError(
            Problem(
                "no_row_of_that_name",
                f"No row has {asked.only!r} in its name.",
                f"There are 1, 2, 4 and 8 of: {known}.",
            )
        )
    rows, notes = list[TogetherRow](), list[str]()
    kept: dict[str, dict[str, Any]] = {}
    if asked.rows is not None and asked.rows.exists():
        kept = {each["settings"]: each for each in read_measurement(asked.rows, BENCH)["rows"]}
    for named in asked.subjects or (OWN, SMALL):
        for name, (settings, runs) in wanted.items():
            try:
                resolved = changed(asked.resolved, settings)
                place = (device_name(), named, asked.tiny, asked.steps or STEPS, name, runs, settings_key(resolved))
                if (key := str(place)) not in kept:
                    found, said = measure_together(asked, resolved, named, name, runs)
                    kept[key] = {"settings": key, "rows": [asdict(row) for row in found], "notes": said}
            except UsageError as error:
                if not settings or len(wanted) == 1:
                    raise
                notes += [f"{name}: {problem.message}" for problem in error.problems]
                continue
            finally:
                free_memory(join_processes().device)
            if asked.rows is not None:
                document = {"device": device_name(), "versions": package_versions(), "rows": [*kept.values()]}
                write_json(asked.rows, {"bench": BENCH, **document})
            rows += [TogetherRow(**row) for row in kept[key]["rows"]]
            notes += kept[key]["notes"]
    return Report(rows, ABOUT, notes, ROW, first="runs")


def measure_together(
    asked: RequestedMeasure, resolved: Resolved, named: str, name: str, runs: Sequence[int]
) -> tuple[list[TogetherRow], list[str]]:
    """The rows of one model: a run alone, then each number of runs on one base; notes."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        alone = subject_of(resolved, folder / ALONE, tiny=asked.tiny, named=named)
        inputs = inputs_of(alone)
        context, rounds = alone.context, WARM_UP + (asked.steps or STEPS)
        ways: dict[str, Way] = {row_name(name): own_way(context, inputs)}
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
        copied = dict.fromkeys(ways, 0)
        bases = [context.denoiser, *(made.group.bare for made in joint.values())]
        swaps = {id(swap): swap for base in bases if base is not None and (swap := base.__dict__.get(BLOCK_SWAP))}

        def watched(each: str, way: Way, number: int) -> Any:
            """A step, after which the bytes of weights that it copied are counted."""
            counted = sum(swap.copied for swap in swaps.values())
            result = way(number)
            copied[each] += sum(swap.copied for swap in swaps.values()) - counted
            return result

        steps = {each: partial(watched, each, way) for each, way in ways.items()}
        times = timed_in_turn(steps, rounds - WARM_UP, context.device)
        base = times[row_name(name)].wall
        micros = sum(len(inputs[number % len(inputs)]) for number in range(rounds))
        rows = list[TogetherRow]()
        for each, count, passes in [
            (row_name(name), 1, micros),
            *((each, made.count, made.group.passes - before[each]) for each, made in joint.items()),
        ]:
            row = row_of(each, alone.name, [seconds / count for seconds in times[each].wall], base)
            mib = copied[each] / rounds / count / 2**20
            rows.append(TogetherRow(**vars(row), runs=count, passes=passes / rounds / count, copied_mib=mib))
        swapped = context.built.swapped
        notes = [*([f"{name}: {swapped} blocks are swapped"] if swapped else []), *too_noisy(rows)]
        notes += [f"{each}: {line}" for each, made in joint.items() for line in made.lines]
        if context.compiled is not None:
            notes.append(f"{row_name(name)}: its blocks are compiled, as `train` does; those of runs together are not")
    return rows, [f"{alone.name}: {note}" for note in notes]


@contextmanager
def joint_runs(group: RunGroup, count: int, build: Callable[[int, Member], BenchSubject]) -> Iterator[JointRuns]:
    """So many runs on the group's base, built and ready. Inside the block each `step` is one of all of them."""
    taken, is_open = 0, True

    def work(number: int, member: Member) -> None:
        nonlocal taken, is_open
        try:
            context = (subject := build(number, member)).context
            assert context.is_joined, "the runs have one layout"
            member.say = lambda line: None if line in made.lines else made.lines.append(line)
            way, begin, step = own_way(context, inputs_of(subject)), context.joined.begin_step, -1
            while is_open:
                if step >= 0:
                    begin(step)
                    way(step)
                step, taken = step + 1, taken + 1
                if taken % count == 0 and is_open:  # the last of them
                    is_open = turns.ask("next step")
        finally:
            is_open = False  # nor do the others, if this one failed

    turns = Turns(lambda: group.run({str(number): partial(work, number) for number in range(count)}), f"{count} runs")
    made = JointRuns(group, count, turns)
    made.step(-1)  # builds them
    try:
        yield made
    finally:
        while not turns.has_ended:
            turns.resume(False)


def row_name(variant: str, runs: int | None = None) -> str:
    return f"{variant}, {ALONE if runs is None else f'{runs} together'}"
