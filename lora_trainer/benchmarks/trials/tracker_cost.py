"""What it costs a step that a run is watched: the trainer's own loop with everything on, beside it with nothing on.

The loops take blocks of steps in turn, on one model. Trackers are opened before the first block and ended after the last
one, and their threads and processes live all the time. A block ends when the threads have nothing left to do: what a
tracker does beside the next step counts as if the step had waited for it. What happens now and then (sample images, a
validation with the sizes of updates, measurements of the machine) is timed apart in each round, and added as often as
the settings do it. The JSON lines are written by all.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from PIL import Image

from lora_trainer.benchmarks.measures import (
    OWN,
    TIMES,
    Column,
    MeasureRow,
    Report,
    RequestedMeasure,
    row_of,
)
from lora_trainer.benchmarks.own_loop import Way, own_loop
from lora_trainer.benchmarks.split import Split
from lora_trainer.benchmarks.subject import BenchSubject, subject_of
from lora_trainer.benchmarks.turns import WARM_UP, Timed, timed_in_turn
from lora_trainer.evaluation.loading import free_memory
from lora_trainer.monitor.gpu import open_gpus
from lora_trainer.monitor.system import HostMeter
from lora_trainer.monitor.tracker_kinds import TRACKERS, missing_libraries
from lora_trainer.monitor.tracker_kinds.interface import RunEnding, ShownImage, TrackedRun
from lora_trainer.monitor.tracker_thread import TrackerThreads
from lora_trainer.monitor.trackers import Trackers
from lora_trainer.monitor.watches import Watches
from lora_trainer.training.processes import join_processes
from lora_trainer.training.run import Run
from lora_trainer.training.update_sizes import UpdateSizes

BLOCK, ROUNDS = 3, 45  # steps
SIDE = 512  # pixels of the sample images
LONGEST = 60.0  # seconds that a block waits for the trackers
NORMAL_95 = 1.96
AMPLIFIED = 1000  # a range costs too little to be timed once
OFF, RANGES, EACH_STEP, ALL = "nothing", "profiler off", "each step", "everything"
SAMPLES, VALIDATION, SYSTEM = "samples", "validation", "system"
ABOUT = {
    OFF: "no trackers and no watches: the JSON lines alone",
    RANGES: f"the phases' ranges while nothing is profiled, opened {AMPLIFIED} times each and the difference divided by that",
    EACH_STEP: "all trackers with the numbers of each step, and the watches of memory and speed",
    ALL: "that, and what happens now and then, as often as the settings do it",
    "ratio": f"time of a block of {BLOCK} steps over `{OFF}`, the median of the rounds",
    "95 % interval": "of that median: 1 within it means that no cost was found",
    "CPU ratio": "the same of CPU time, in all threads of this process: what else the machine does changes it less",
}


@dataclass(frozen=True)
class TrackerRow(MeasureRow):
    """Seconds are of a step. The intervals are those of the medians, at 95 %."""

    ratio_low: float | None = None
    ratio_high: float | None = None
    cpu_ratio: float | None = None
    cpu_low: float | None = None
    cpu_high: float | None = None


def interval_of(low: str, high: str) -> Callable[[TrackerRow], str]:
    def text(row: TrackerRow) -> str:
        ends = getattr(row, low), getattr(row, high)
        return "" if None in ends else f"{ends[0]:.4f} to {ends[1]:.4f}"

    return text


COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("ratio", lambda row: f"{row.ratio:.4f}"),
    ("95 % interval", interval_of("ratio_low", "ratio_high")),
    ("CPU ratio", lambda row: "" if row.cpu_ratio is None else f"{row.cpu_ratio:.4f}"),
    ("95 % interval of it", interval_of("cpu_low", "cpu_high")),
)


def measure(asked: RequestedMeasure) -> Report:
    """Time the loop with and without trackers, `asked.steps` rounds. Raises UserError."""
    rows, notes = list[TrackerRow](), list[str]()
    for named in asked.subjects or (OWN,):
        with tempfile.TemporaryDirectory() as folder:
            subject = subject_of(asked.resolved, Path(folder), tiny=asked.tiny, named=named)
            found, said = measure_subject(subject, asked.steps or ROUNDS, Path(folder))
        free_memory(join_processes().device)
        rows += found
        notes += said
    return Report(rows, ABOUT, tuple(dict.fromkeys(notes)), COLUMNS, first="trackers")


def measure_subject(subject: BenchSubject, rounds: int, folder: Path) -> tuple[list[TrackerRow], list[str]]:
    """The rows of one model; notes name what is not installed and what other processes did."""
    run, device = subject.run, subject.context.device
    names = [name for name in TRACKERS if not missing_libraries([name])]
    notes = [f"{name}: not installed ({kind.requirement})" for name, kind in TRACKERS.items() if name not in names]
    amplified = replace(run, context=replace(run.context, phase=opened_often))
    children = ChildrenTime()
    with ExitStack() as stack:
        ways: dict[str, Way] = {
            OFF: blocks_of(stack.enter_context(unwatched(run, folder / "nothing"))),
            RANGES: stack.enter_context(unwatched(amplified, folder / "ranges")),
        }
        ways |= stack.enter_context(watched(run, names, folder / "watched"))
        times = timed_in_turn(ways, rounds, device, before=children.belong_to)
    often = times_per_step(run, statistics.median(times[OFF].wall) / BLOCK)
    notes.append(
        f"{ALL}: {', '.join(names)}; " + ", ".join(f"{name} every {1 / often[name]:.0f} steps" for name in often)
    )
    # Seconds of a block, and of what happens now and then in its share.
    shares = {EACH_STEP: 1.0} | {name: BLOCK * count for name, count in often.items()}
    notes += children.notes(shares, BLOCK * (WARM_UP + rounds))
    times[RANGES] = weighted({OFF: 1 - 1 / AMPLIFIED, RANGES: BLOCK / AMPLIFIED}, times)  # one step, not a block
    times[ALL] = weighted(shares, times)
    return [tracker_row(name, subject.name, times[name], times[OFF]) for name in (OFF, RANGES, EACH_STEP, ALL)], notes


@contextmanager
def unwatched(run: Run, folder: Path) -> Iterator[Way]:
    """A way that takes a step with nothing on."""
    with own_loop(run, folder, Split(run.context.device), trackers=Trackers(folder, resume_step=-1)) as step:
        yield step


@contextmanager
def watched(run: Run, names: Sequence[str], folder: Path) -> Iterator[Mapping[str, Way]]:
    """Ways with these trackers: a block of steps, and each thing that happens now and then, once."""
    image, weights = folder / "sample.png", run.context.adapter.masters
    folder.mkdir(parents=True)
    Image.effect_noise((SIDE, SIDE), 64).convert("RGB").save(image)
    shown = [ShownImage(f"samples/{number}", image, "a sample") for number in range(shown_at_once(run))]
    sizes, host = UpdateSizes(weights), HostMeter()
    gpus, _ = open_gpus([run.context.device])
    tracked = TrackedRun(folder.name, folder, config=run.config.model_dump(mode="json"))
    threads = TrackerThreads(names, tracked)
    trackers = Trackers(folder, resume_step=-1, threads=threads)

    def settled(work: Callable[[int], object]) -> Way:
        def way(number: int) -> None:
            work(number)
            threads.settle(LONGEST)

        return way

    def validation(number: int) -> None:
        trackers.validation({"step": number, "loss": 0.1, "gain": 0.2, "agreement": 0.9})
        trackers.update_sizes(number, sizes.measure(weights))

    def system(number: int) -> None:
        row = host.read()
        for index, sample in enumerate(gpus):
            row |= {f"gpu_{index}_{name}": value for name, value in asdict(sample()).items() if value is not None}
        trackers.system({"step": number, **row})

    watches = Watches(run.context.device)
    try:
        with own_loop(run, folder, Split(run.context.device), trackers=trackers, watches=watches) as step:
            yield {
                EACH_STEP: settled(blocks_of(step)),
                SAMPLES: settled(lambda number: threads.call("images", number, shown)),
                VALIDATION: settled(validation),
                SYSTEM: settled(system),
            }
    finally:
        threads.finish(RunEnding("done", 0))


def blocks_of(step: Way) -> Way:
    def block(number: int) -> None:
        for within in range(BLOCK):
            step(number * BLOCK + within)

    return block


def opened_often(name: str) -> AbstractContextManager[object]:
    """The range around a phase of a run without a profile, `AMPLIFIED` times."""
    for _ in range(AMPLIFIED - 1):
        with nullcontext(name):
            pass
    return nullcontext(name)


def shown_at_once(run: Run) -> int:
    """Sample images of one time: each prompt with the LoRA at each strength, and without."""
    section = run.config.sample
    prompts = len(section.prompts) or section.count
    return prompts * section.num_images_per_prompt * (len(section.strengths) + 1)


def times_per_step(run: Run, seconds: float) -> dict[str, float]:
    """How often a run of steps that take `seconds` does what it does now and then; without what is never done."""
    config = run.config
    often: dict[str, float] = {
        SAMPLES: config.sample.every_n_steps,
        VALIDATION: config.validation.every_n_steps,
        SYSTEM: config.run.system_every_seconds / seconds,
    }
    return {name: 1 / steps for name, steps in often.items() if steps}


class ChildrenTime:
    """CPU seconds that the processes started by this one used in each turn of a way."""

    def __init__(self) -> None:
        self._turns: dict[str, list[tuple[str, float]]] = {}  # by the process's name: way, seconds
        self._way, self._before = "", dict[int, float]()

    def belong_to(self, way: str) -> None:
        """From now on it is this way's time."""
        now = dict[int, float]()
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                name, times = each.name(), each.cpu_times()
                now[each.pid] = float(times.user + times.system)
                used = now[each.pid] - self._before.get(each.pid, 0.0)
                self._turns.setdefault(name, []).append((self._way, used))
        self._way, self._before = way, now

    def notes(self, shares: Mapping[str, float], steps: int) -> list[str]:
        """A line for each process: what it costs a step if each way has its share; and the longest turn.

        One turn that is far above the mean is a disturbance: a computer without free memory reads programs anew.
        """
        lines = []
        for name, turns in self._turns.items():
            used = sum(shares.get(way, 0.0) * seconds for way, seconds in turns) / steps
            longest = max(seconds for _, seconds in turns)
            lines.append(
                f"{name}: {1000 * used:.2f} ms of CPU a step, beside these; at most {longest:.2f} s in one turn"
            )
        return lines or ["the trackers started no process"]


def weighted(shares: Mapping[str, float], times: Mapping[str, Timed]) -> Timed:
    """The sum of some ways' times by round, each with its share."""

    def of(kind: str) -> list[float]:
        rounds = zip(*(getattr(times[name], kind) for name in shares), strict=True)
        return [sum(share * each for share, each in zip(shares.values(), found, strict=True)) for found in rounds]

    return Timed(of("wall"), of("cpu"))


def tracker_row(name: str, model: str, own: Timed, base: Timed) -> TrackerRow:
    def per_step(seconds: Sequence[float]) -> list[float]:
        return [each / BLOCK for each in seconds]

    row = TrackerRow(**asdict(row_of(name, model, per_step(own.wall), per_step(base.wall))))
    low, high = median_interval([one / other for one, other in zip(own.wall, base.wall, strict=True)])
    row = replace(row, ratio_low=low, ratio_high=high)
    if not all(base.cpu) or os.name == "nt":  # counted in coarse ticks
        return row
    ratios = [one / other for one, other in zip(own.cpu, base.cpu, strict=True)]
    low, high = median_interval(ratios)
    return replace(row, cpu_ratio=statistics.median(ratios), cpu_low=low, cpu_high=high)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from order statistics: no distribution is assumed."""
    ordered, count = sorted(values), len(values)
    half = NORMAL_95 * math.sqrt(count) / 2
    return ordered[max(0, math.floor(count / 2 - half))], ordered[min(count - 1, math.ceil(count / 2 + half))]
