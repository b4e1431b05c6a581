"""Where a run's time went: read from its folder `profile` and its metrics, and put into words.

A run without a profile has the time of its steps, the wait for data, and what its GPU shows from outside.
"""

from __future__ import annotations

import shlex
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.io import read_json, write_json
from lora_trainer.monitor.profile_files import BETWEEN_STEPS, OPERATORS, PHASES, PREPARE, PROFILE
from lora_trainer.report.bottleneck import (
    BETWEEN,
    FIRST,
    PARTS_OF_UPDATE,
    UPDATING,
    Advice,
    Bound,
    OperatorFacts,
    TimeFacts,
    advise,
    find_bounds,
    milliseconds,
    percent,
)
from lora_trainer.report.operators import summarize
from lora_trainer.report.read import RunReport, mapping, number, sequence, text, whole
from lora_trainer.report.targets import idle_causes, setup_of

if TYPE_CHECKING:
    from lora_trainer.monitor.idle import IdleCause

LABELS = {
    "data": "waiting for data",
    "copy": "copy to the device",
    "forward": "forward",
    "backward": "backward",
    "all_reduce": "gradient all-reduce",
    "clip": "clipping",
    "optimizer": "optimizer",
    "ema": "EMA",
    "metrics": "metrics",
    "other": "other",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "samples": "sample images",
    "unprofiled": "validation, checkpoints and images",
}
VERSION = 1  # of operators.json
STEADY = 3  # steps of a group that its shares can be taken from
NO_PROFILE = "not known without a profile"


@dataclass(frozen=True)
class PhaseRow:
    """A phase: its share of a step, and its seconds in each."""

    label: str
    share: float
    seconds: float


@dataclass(frozen=True)
class Mfu:
    """Model FLOPs utilization: operations a second over the device's peak. `share` is None where that is not known."""

    share: float | None
    tflops: float
    words: str


@dataclass(frozen=True)
class TimeReport:
    """Where the time of a run went. `operators` have times of one step."""

    folder: Path
    steps: int
    profiled_steps: tuple[int, ...]  # first and last; empty without a profile
    facts: TimeFacts
    slowed: float | None  # time of a profiled step over that of another
    bounds: tuple[Bound, ...]
    causes: tuple[tuple[IdleCause, str], ...]  # of an idle GPU, as seen from outside, and their commands
    answers: tuple[tuple[str, str], ...]
    advice: tuple[tuple[str, str], ...]  # what to try, and its command, which may be empty
    mfu: Mfu | None
    operators: tuple[Mapping[str, Any], ...]
    files: tuple[str, ...]
    profile_command: str  # takes a profile of these settings

    @property
    def is_profiled(self) -> bool:
        return self.facts.operators is not None or bool(self.facts.phases)

    @property
    def phases(self) -> tuple[PhaseRow, ...]:
        """Those of a step, the longest first."""
        shares = sorted(self.facts.phases.items(), key=lambda entry: -entry[1])
        return tuple(PhaseRow(LABELS.get(name, name), share, share * self.facts.step_seconds) for name, share in shares)


def read_times(run: RunReport) -> TimeReport:
    """Where the time of a run went. Raises UsageError for a run without a finished step."""
    seconds = [value for _, value in run.series["seconds"] if value > 0]
    if not seconds:
        message = f"{run.folder} has no finished step: there is no time to describe."
        raise UsageError(
            Problem("no_finished_step", message, "Train it further: `lora-trainer train … --resume --profile`.")
        )
    folder = run.folder / PROFILE
    phases, operators = _document(folder / PHASES), operators_in(folder)
    device = mapping(phases.get("device"))
    facts = facts_of(run, seconds, phases, operators)
    bounds = find_bounds(facts)
    return TimeReport(
        folder=run.folder,
        steps=run.seen_steps,
        profiled_steps=tuple(each for value in sequence(operators.get("steps")) if (each := whole(value)) is not None),
        facts=facts,
        slowed=_slowed(phases),
        bounds=bounds,
        causes=tuple(idle_causes(run, profiled=facts.operators is not None)),
        answers=tuple(answers(facts, bounds)),
        advice=tuple(with_command(each, run.folder) for each in advise(facts, bounds)),
        mfu=mfu_of(facts, operators, device),
        operators=tuple(map(mapping, sequence(operators.get("operators")))),
        files=tuple(sorted(path.name for path in folder.glob("*-step-*"))),
        profile_command=_command(run.folder, "train", "--name", f"{run.folder.resolve().name}-profile", "--profile"),
    )


def operators_in(folder: Path) -> Mapping[str, Any]:
    """The summary of the newest trace, from operators.json, which is written if it is missing; empty without a trace."""
    traces = sorted(folder.glob("trace-step-*.json.gz"))
    if not traces:
        return {}
    newest, written = traces[-1], _document(folder / OPERATORS)
    if written.get("version") == VERSION and written.get("trace") == newest.name:
        return written
    try:
        found = summarize(newest)
        first = int(newest.name.split("-")[2].split(".")[0])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):  # damaged
        return {}
    steps = [first, first + int(found.get("recorded", 1)) - 1]
    summary = {"version": VERSION, "trace": newest.name, "steps": steps, **found}
    with suppress(OSError):  # read again next time
        write_json(folder / OPERATORS, summary)
    return summary


def facts_of(
    run: RunReport, seconds: Sequence[float], phases: Mapping[str, Any], operators: Mapping[str, Any]
) -> TimeFacts:
    """The numbers of a run; `phases` and `operators` are empty where it has no profile."""
    waits = [value for _, value in run.series["data_seconds"] if value >= 0]
    usual = median(seconds)
    steady = slice(STEADY, None) if len(seconds) > 2 * STEADY else slice(None)
    hardware, ahead = run.record.hardware, mapping(phases.get(PREPARE))
    of_step = _shares_of_step(phases)
    prepared = number(ahead.get("seconds")) or 0.0
    return TimeFacts(
        step_seconds=usual,
        waiting=of_step.get("data", sum(waits[steady]) / max(sum(seconds[steady]), 1e-9)),
        phases=of_step,
        between=_shares_between(run, sum(seconds), phases),
        first=sum(max(0.0, each - usual) for each in seconds[:STEADY]) / max(sum(seconds), 1e-9),
        prepare_seconds=prepared / (whole(ahead.get("steps")) or 1) or None,
        operators=_operators_of(operators, phases),
        steps=run.seen_steps,
        on_gpu=run.on_gpu,
        cpus=whole(hardware.get("cpus")),
        threads=whole(hardware.get("threads")),
        setup=setup_of(run),
        settings={
            f"{section}.{key}": value
            for section, values in run.record.config.items()
            for key, value in mapping(values).items()
        },
    )


def answers(facts: TimeFacts, bounds: Sequence[Bound]) -> list[tuple[str, str]]:
    """The questions that `torch.utils.bottleneck` was asked, and others, each with its answer."""
    operators, phases, reasons = facts.operators, facts.phases, {bound.name: bound.why for bound in bounds}

    def answer(yes: bool, what: str) -> str:
        return f"yes: {what}" if yes else f"no: {what}"

    waits = f"a step waits {percent(facts.waiting)} of its time for it"
    rows = [("Is it the data?", answer("data-bound" in reasons, reasons.get("data-bound", waits)))]
    if operators is None:
        rows.append(("Is it Python and the CPU?", NO_PROFILE))
    elif operators.kernels is None:
        between = f"{percent(operators.idle)} of a step is between operators"
        rows.append(("Is it Python?", answer(operators.is_held_up, between)))
    else:
        idle = f"the GPU computes nothing in {percent(operators.idle)} of a step"
        busy = f"it computes in {percent(1 - operators.idle)} of a step"
        rows.append(("Is it Python and the CPU?", answer("launch-bound" in reasons, idle)))
        rows.append(("Is it the GPU?", answer(not operators.is_held_up, busy)))
    if phases:
        longest_first = sorted(("forward", "backward"), key=lambda name: -phases.get(name, 0.0))
        both = ", ".join(f"{name} {percent(phases.get(name, 0.0))}" for name in longest_first)
        updating = sum(phases.get(name, 0.0) for name in PARTS_OF_UPDATE)
        update = f"clipping and update take {percent(updating)}"
        rows += [("Forward or backward?", both), ("Is it the optimizer?", answer(updating >= UPDATING, update))]
    else:
        rows.append(("Forward or backward?", NO_PROFILE))
    is_between = any(share >= BETWEEN.get(name, 0.1) for name, share in facts.between.items())
    shares = ", ".join(f"{LABELS[name]} {percent(share)}" for name, share in facts.between.items()) or "nothing"
    start = f"beyond the usual time, the first steps take {percent(facts.first)}"
    rows.append(("Is it between the steps?", answer(is_between, f"{shares} of the training's time")))
    rows.append(("Is it the start?", answer(facts.first >= FIRST, start)))
    return rows


def mfu_of(facts: TimeFacts, operators: Mapping[str, Any], device: Mapping[str, Any]) -> Mfu | None:
    """Model FLOPs utilization (arXiv:2204.02311, appendix B): the model's operations of a step, without those that
    gradient checkpointing repeats, over the step's time and the device's peak. None without a profile.
    """
    tflop, source = number(device.get("tflop_per_step")), "as `plan` counts them"
    if not tflop:
        tflop, source = (number(operators.get("flop")) or 0.0) / 1e12, "counted in the recorded operators"
    if not tflop:
        return None
    dtype, name = text(device.get("dtype")), text(device.get("name")) or "this CPU"
    tflops = tflop / facts.step_seconds
    did = f"{1000 * tflop:.3g} GFLOP a step ({source}) in {milliseconds(facts.step_seconds)} are {tflops:.3g} TFLOP/s"
    peak, here = number(device.get("peak_tflops")), number(device.get("matmul_tflops"))
    if facts.on_gpu and peak:
        return Mfu(tflops / peak, tflops, f"{percent(tflops / peak)}: {did}, of the {peak:g} of {name} in {dtype}")
    if here and not facts.on_gpu:
        threads = counted(whole(device.get("threads")) or 1, "thread")
        reached = f"of the {here:.3g} that a large {dtype} matmul reached in this run ({threads})"
        return Mfu(tflops / here, tflops, f"{percent(tflops / here)}: {did}, {reached}")
    words = f"not known, since the peak of {name} in {dtype} is not: {did}"
    if here:
        words += f"; of the {here:.3g} that a large matmul reaches here it is {percent(tflops / here)}"
    return Mfu(None, tflops, words)


def with_command(advice: Advice, folder: Path) -> tuple[str, str]:
    """What to try, and the command to copy: a measurement beside the run's settings, or a new run with one changed."""
    if not advice.command:
        return advice.text, ""
    if advice.command == "train":
        name = f"{folder.resolve().name}-2"
        return advice.text, _command(folder, "train", "--name", name, "--set", advice.setting)
    if advice.setting:
        return advice.text, _command(folder, advice.command, "--compare", advice.setting)
    return advice.text, _command(folder, advice.command)


def _command(folder: Path, name: str, *arguments: str) -> str:
    return shlex.join(["lora-trainer", *name.split(), "--config", str(folder / "config.toml"), *arguments])


def _document(path: Path) -> Mapping[str, Any]:
    """The contents of a JSON file; empty where it is missing or cannot be read."""
    try:
        return mapping(read_json(path))
    except (OSError, ValueError):
        return {}


def _slowed(phases: Mapping[str, Any]) -> float | None:
    """The CPU time of a profiled step over that of another; None where there are too few of them."""
    step_times = []
    for group in (mapping(phases.get(name)) for name in ("profiled", "rest")):
        steps, seconds = whole(group.get("steps")) or 0, number(group.get("cpu_seconds"))
        if steps < STEADY or not seconds:
            return None
        step_times.append(seconds / steps)
    return step_times[0] / step_times[1]


def _shares_of_step(phases: Mapping[str, Any]) -> dict[str, float]:
    """The share of each phase in a step: of steps that the profiler did not slow, where there are enough of them."""
    for group in (mapping(phases.get(name)) for name in ("rest", "profiled")):
        times = {name: number(value) or 0.0 for name, value in mapping(group.get("phases")).items()}
        in_steps = (number(group.get("seconds")) or 0.0) - sum(times.pop(name, 0.0) for name in BETWEEN_STEPS)
        if (whole(group.get("steps")) or 0) >= STEADY and in_steps > 0:
            shares = {name: value / in_steps for name, value in times.items()}
            return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}
    return {}


def _shares_between(run: RunReport, in_steps: float, phases: Mapping[str, Any]) -> dict[str, float]:
    """The shares of validation, checkpoints and images in the training's time; together where there is no profile."""
    groups = [mapping(phases.get(name)) for name in ("first", "profiled", "rest")]
    if total := sum(number(group.get("seconds")) or 0.0 for group in groups):
        times = {
            name: sum(number(mapping(group.get("phases")).get(name)) or 0.0 for group in groups)
            for name in BETWEEN_STEPS
        }
        return {name: seconds / total for name, seconds in times.items()}
    trained = number(run.record.training.get("seconds"))
    return {"unprofiled": max(0.0, 1.0 - in_steps / trained)} if trained else {}


def _operators_of(operators: Mapping[str, Any], phases: Mapping[str, Any]) -> OperatorFacts | None:
    """The numbers of operators.json and the device's rates; None where one that is needed is missing.

    What the profiler adds to a step is taken from the CPU's time outside of the operators, where nearly all of it is.
    """
    needed = ("seconds", "compute_seconds", "memory_seconds", "outside_seconds", "waiting_seconds")
    found = [number(operators.get(name)) for name in (*needed, "calls", "flop", "bytes")]
    known = [value for value in found if value is not None]
    if len(known) < len(found):
        return None
    seconds, compute, memory, outside, waiting, calls, flop, moved = known
    device = mapping(phases.get("device"))
    added = min(outside, seconds * (1 - 1 / max(_slowed(phases) or 1.0, 1.0)))
    return OperatorFacts(
        seconds=seconds - added,
        compute=compute,
        memory=memory,
        outside=outside - added,
        waiting=waiting,
        calls=calls,
        flop=flop,
        bytes=moved,
        matmul_tflops=number(device.get("matmul_tflops")),
        copy_gb_per_second=number(device.get("copy_gb_per_second")),
        kernels=number(operators.get("kernel_seconds")),
        launched=number(operators.get("kernels")),
        copies=number(operators.get("copy_seconds")) or 0.0,
    )
