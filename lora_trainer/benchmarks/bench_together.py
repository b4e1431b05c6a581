"""`bench together`: a step of several runs on one base model (`batch --together`) beside that of a run alone.

The runs of a row share a base, and each has its own seed, adapter, optimizer and micro-batches, which are ready before
anything is timed. A model of its own takes the steps of the run alone. All rows of a model take steps in turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lora_trainer.benchmarks.baseline import SavedRows
from lora_trainer.benchmarks.bench_adapters import settings_key
from lora_trainer.benchmarks.bench_model import BenchModel, build_bench_model
from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.interleaved import WARM_UP, Way, time_in_turn
from lora_trainer.benchmarks.measures import (
    COLUMNS,
    OWN,
    SMALL,
    Column,
    Report,
    RequestedMeasure,
    Row,
    change,
    figure,
    time_row,
    too_noisy,
)
from lora_trainer.benchmarks.peak_memory import make_inputs, trainer_step
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.taking_turns import Turns
from lora_trainer.jobs.joint_jobs import settings_against
from lora_trainer.training.processes import join_processes
from lora_trainer.training.run_group import Member, RunGroup

STEPS = 8
RUNS = (1, 2, 4, 8)  # on one base
ALONE = "alone"
ABOUT = {
    "median ms": "a step of one run: of K together, the time of a step of all, over K",
    "ratio": "that over the row `alone` of the same model, the median of the ratios step by step: 0.5 is twice as fast",
    "passes": "of the base model for a step of one run: of K together, those for a step of all, over K",
}
TOGETHER_COLUMNS: tuple[Column, ...] = (
    *COLUMNS,
    ("runs", figure("runs", "d")),
    ("passes", figure("passes", ".3f")),
)


def measure(request: RequestedMeasure) -> Report:
    """Time `request.steps` steps of each row. Raises UserError."""
    if against := settings_against(request.resolved.config):
        raise UsageError(Problem("trains_alone", f"With {against} a run trains alone.", "Measure without."))
    names = request.filter(f"{count} together" for count in RUNS)
    runs = [count for count in RUNS if f"{count} together" in names]
    saved = SavedRows.read(request.rows, "together", device_name())
    rows, notes = list[Row](), list[str]()
    for subject in request.subjects or (OWN, SMALL):
        key = str((subject, request.tiny, request.steps or STEPS, runs, settings_key(request.resolved)))
        if key not in saved.rows:
            found, found_notes = compare_runs(request, subject, runs)
            saved.save(key, {"rows": [row.to_json() for row in found], "notes": found_notes})
            free_memory(join_processes().device)
        rows += [Row.from_json(row) for row in saved.rows[key]["rows"]]
        notes += saved.rows[key]["notes"]
    return Report(rows, ABOUT, notes, TOGETHER_COLUMNS, first="runs")


def compare_runs(request: RequestedMeasure, subject: str, runs: Sequence[int]) -> tuple[list[Row], list[str]]:
    """The rows of one model: a run alone, then each number of runs on one base; notes."""
    resolved, steps = request.resolved, request.steps or STEPS
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:

        def build(folder: str, number: int = 0, member: Member | None = None) -> BenchModel:
            """The run of that number, with a seed of its own."""
            seeded = change(resolved, {"train.seed": resolved.config.train.seed + number})
            own = Path(place) / folder / str(number)
            return build_bench_model(seeded, own, tiny=request.tiny, subject=subject, member=member)

        alone = build(ALONE)
        inputs = make_inputs(alone)
        joint, base = dict[str, JointRuns](), None
        for count in runs:
            group = RunGroup(count)
            if base is not None:  # one for all of them
                group.bare, group.layout = base.bare, base.layout
            base = group
            name = f"{count} together"
            joint[name] = stack.enter_context(start_joint_runs(group, count, partial(build, name)))
        ways: dict[str, Way] = {ALONE: trainer_step(alone.context, inputs)}
        ways |= {name: each.step for name, each in joint.items()}
        before = {name: each.group.passes for name, each in joint.items()}
        timings = time_in_turn(ways, steps, alone.device)

        # Of all steps, those of the warm-up too; a run alone has a pass for each micro-batch.
        count_of = {ALONE: 1} | {name: each.count for name, each in joint.items()}
        passes = {name: each.group.passes - before[name] for name, each in joint.items()}
        passes[ALONE] = sum(len(inputs[number % len(inputs)]) for number in range(WARM_UP + steps))
        rows = []
        for name, count in count_of.items():
            seconds = [each / count for each in timings[name].seconds]  # of a step of one run
            row = time_row(name, alone.name, seconds, timings[ALONE].seconds)
            rows.append(row.with_figures(runs=count, passes=passes[name] / (WARM_UP + steps) / count))
        notes = too_noisy(rows) + [f"{name}: {line}" for name, each in joint.items() for line in each.lines]
        if alone.context.compiled is not None:
            notes.append(f"{ALONE}: its blocks are compiled, as `train` does; those of runs together are not")
    return rows, [f"{alone.name}: {note}" for note in notes]


# ---- several runs as one way


@dataclass
class JointRuns:
    """Runs on one base that take their steps when they are called."""

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

    def log(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)


@contextmanager
def start_joint_runs(group: RunGroup, count: int, build: Callable[[int, Member], BenchModel]) -> Iterator[JointRuns]:
    """So many runs on the group's base, built and ready. Inside the block each `step` is one of all of them."""
    taken, is_open = 0, True

    def work(number: int, member: Member) -> None:
        nonlocal taken, is_open
        try:
            model = build(number, member)
            context = model.context
            assert context.is_joined, "the runs have one layout"
            member.say = made.log
            way, begin, step = trainer_step(context, make_inputs(model)), context.joined.begin_step, -1
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
