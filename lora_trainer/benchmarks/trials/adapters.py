"""`bench adapters`: what each kind of adapter and each option of the LoRA costs a step, and what it learns.

Steps are timed in turn in one process, so that the machine's moods meet all rows. The losses are those of ordinary runs
on the run's own model and data: for each row the learning rate is chosen first, on a seed that is not compared, then
runs of all seeds are validated on held-out images at fixed noise. Seeds are compared in pairs.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.benchmarks.baseline import read_measurement
from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.measures import (
    OWN,
    SMALL,
    STEPS,
    TIMES,
    Column,
    Report,
    RequestedMeasure,
    TimedRow,
    figure,
)
from lora_trainer.benchmarks.subject import architecture_named
from lora_trainer.benchmarks.trials.steps import changed
from lora_trainer.benchmarks.versus import VersusRow, in_turn, rows_of
from lora_trainer.config.layers import Resolved, flattened
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.hardware import free_memory, package_versions
from lora_trainer.core.interrupt import Stopped
from lora_trainer.core.intervals import FEWEST_VALUES, mean_interval
from lora_trainer.core.io import write_json
from lora_trainer.monitor.trackers import VALIDATION, read_lines
from lora_trainer.run.order import make_order, plain_console
from lora_trainer.run.train import train
from lora_trainer.run_folder.progress import unwatched
from lora_trainer.training.processes import join_processes

BENCH = "adapters"
BASELINE = "lora"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {},
    **{name: {"lora.type": name} for name in ADAPTERS if name != BASELINE},
    "rslora": {"lora.use_rslora": True},
    "lora+": {"lora.loraplus_lr_ratio": 16.0},
    "pissa": {"lora.init_lora_weights": "pissa"},
    "svd_down": {"lora.init_lora_weights": "svd_down"},
    "t-lora": {"lora.timestep_min_rank": 16},
}
SEEDS, TRAINED = 3, 220  # of the losses; steps of each run
FACTORS = (1 / 3, 1.0, 3.0)  # of the settings' learning rate, that are tried first
MOST_BEYOND = 2  # more rates, each three times the best at an end or a third of it
VALIDATIONS = 20  # of a run
TUNING_SEED = 1000  # added to the settings' seed
RUN = {  # nothing but steps and their validation
    "gates.lora_check": "off",
    "sample.every_n_steps": 0,
    "validation.split": 0.25,
    "validation.agreement": False,
    "checkpoint.save_state": False,
    "run.trackers": (),
}
ABOUT = {
    BASELINE: "a LoRA with the settings as they are: what the others are compared with",
    "ratio": f"time of a step over `{BASELINE}`, the median of the ratios step by step",
    "peak GiB": "what was held at most: on a GPU by the allocator, on a CPU all storages of a step, counted",
    "trained": "trained parameters, thousands",
    "file": "size of NAME.safetensors in kB",
    "rate": "the learning rate that ended lowest on a seed that is not compared",
    "loss": "validation loss after equal steps, the mean over the seeds",
    "over lora": f"how much higher it is than that of `{BASELINE}`, with the 95 % interval over the seeds",
    "in equal time": "the same after as many seconds as the quickest row needs for its steps",
}


@dataclass(frozen=True)
class AdapterRow(TimedRow):
    """A kind or option. Losses and their changes, relative, are None where the weights are random."""

    peak_gib: float | None
    parameters: int
    file_bytes: int | None = None
    learning_rate: float | None = None
    seeds: int = 0
    loss: float | None = None
    loss_change: tuple[float, float, float] | None = None  # mean, low, high
    loss_change_equal_time: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class TrainedRun:
    """The validation losses of a run by their step, and the size of its LoRA file in bytes."""

    curve: Mapping[int, float]
    file_bytes: int

    @property
    def last(self) -> float:
        return self.curve[max(self.curve)]


def change_of(name: str) -> Callable[[AdapterRow], str]:
    def text(row: AdapterRow) -> str:
        change = getattr(row, name)
        return "" if change is None else "{:+.1%} ({:+.1%} to {:+.1%})".format(*change)

    return text


COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("ratio", lambda row: f"{row.ratio:.3f}"),
    ("peak GiB", figure("peak_gib", ".3f")),
    ("trained", lambda row: f"{row.parameters / 1e3:,.0f}"),
    ("file", lambda row: "" if row.file_bytes is None else f"{row.file_bytes / 1e3:,.0f}"),
    ("rate", figure("learning_rate", ".1e")),
    ("loss", figure("loss", ".4f")),
    ("over lora", change_of("loss_change")),
    ("in equal time", change_of("loss_change_equal_time")),
)


def measure(asked: RequestedMeasure) -> Report:
    """Measure each kind and option. `asked.steps` are those of each trained run. Raises UserError."""
    wanted = {name: VARIANTS[name] for name in VARIANTS if asked.only is None or asked.only in name}
    if not wanted:
        raise UsageError(
            Problem(
                "no_row_of_that_name",
                f"No adapter has {asked.only!r} in its name.",
                f"There are: {', '.join(VARIANTS)}.",
            )
        )
    wanted = {BASELINE: VARIANTS[BASELINE], **wanted}
    rows, notes = list[AdapterRow](), list[str]()
    for named in asked.subjects or (SMALL, OWN):
        with tempfile.TemporaryDirectory() as folder:
            timed, said = timed_rows(asked, named, wanted, Path(folder) / "steps")
            notes += said
            if architecture_named(asked.resolved.config, named) is None:
                timed = with_losses(asked, timed, wanted, Path(folder))
            else:
                notes.append(f"{timed[0].model}: weights are random, so that no loss is compared")
        free_memory(join_processes().device)
        rows += timed
    return Report(rows, ABOUT, notes, COLUMNS, first="adapter")


def timed_rows(
    asked: RequestedMeasure, named: str, wanted: Mapping[str, Mapping[str, Any]], folder: Path
) -> tuple[list[AdapterRow], list[str]]:
    """The time and memory of a step of each, and a line for what this model or hardware cannot carry."""
    sides, notes = dict[str, Resolved](), list[str]()
    for name, settings in wanted.items():
        try:
            sides[name] = changed(asked.resolved, settings)
        except UsageError as error:
            notes += [f"{name}: {problem.message}" for problem in error.problems]
    taken = in_turn(asked, named, sides, STEPS, folder)
    if taken is None:
        raise UsageError(
            Problem("does_not_fit", "The GPU has no room for all adapters in turn.", "Measure some: --filter dora.")
        )
    rows = []
    for row in rows_of(taken):
        if isinstance(row, VersusRow):
            times = row.seconds_median, row.seconds_p10, row.seconds_p90
            rows.append(AdapterRow(row.name, row.model, *times, row.ratio, row.peak_gib, taken[row.name].parameters))
    return rows, notes


def with_losses(
    asked: RequestedMeasure, rows: Sequence[AdapterRow], wanted: Mapping[str, Mapping[str, Any]], folder: Path
) -> list[AdapterRow]:
    """The rows with the losses of their own runs."""
    steps, count = asked.steps or TRAINED, asked.seeds or SEEDS
    base = changed(asked.resolved, RUN | {"run.output": str(folder / "runs"), "cache.dir": str(folder / "cache")})
    seed, quickest = base.config.train.seed, min(row.ratio for row in rows)
    kept = {} if asked.rows is None else kept_runs(asked.rows)

    def trained(name: str, rate: float, offset: int, steps: int) -> TrainedRun:
        own = {"optimizer.learning_rate": rate, "train.seed": seed + offset, "train.max_steps": steps}
        name_of_run = f"{name}-{rate:.3g}-{offset}-{steps}"
        every = {"validation.every_n_steps": max(1, steps // VALIDATIONS), "run.name": name_of_run}
        resolved = changed(base, {**wanted[name], **own, **every})
        key = settings_key(resolved)
        if key not in kept:
            kept[key] = run_of(resolved)
            if asked.rows is not None:
                keep_runs(asked.rows, kept)
        return kept[key]

    found = dict[str, list[TrainedRun]]()
    chosen = list[AdapterRow]()
    for row in rows:
        name = row.name

        def loss_of(rate: float, name: str = name) -> float:
            return trained(name, rate, TUNING_SEED, max(1, steps // 2)).last

        rate = best_rate(base.config.optimizer.learning_rate, loss_of)
        found[name] = [trained(name, rate, offset, steps) for offset in range(count)]
        chosen.append(replace(row, learning_rate=rate, seeds=count, file_bytes=found[name][0].file_bytes))
    ends = {row.name: [each.last for each in found[row.name]] for row in chosen}
    timed = {
        row.name: [loss_at(each.curve, steps * quickest / row.ratio) for each in found[row.name]] for row in chosen
    }
    return [
        replace(
            row,
            loss=statistics.fmean(ends[row.name]),
            loss_change=relative(ends[row.name], ends[BASELINE]),
            loss_change_equal_time=relative(timed[row.name], timed[BASELINE]),
        )
        for row in chosen
    ]


def run_of(resolved: Resolved) -> TrainedRun:
    """Train an ordinary run. Raises UserError; Stopped for a signal."""
    result = train(make_order(resolved, console=plain_console(quiet=True), watch=unwatched))
    if result.exit_code:
        raise Stopped(result.exit_code)
    curve = {int(row["step"]): float(row["loss"]) for row in read_lines(result.folder / VALIDATION)}
    return TrainedRun(curve, result.files["kohya"].stat().st_size)


def settings_key(resolved: Resolved) -> str:
    """The settings of a run but its place, which changes nothing."""
    values = flattened(resolved.config)
    own = {name: str(value) for name, value in values.items() if not name.startswith(("run.", "cache."))}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def kept_runs(path: Path) -> dict[str, TrainedRun]:
    """The trained runs that a file has already, by their settings. Raises UsageError for a file of something else."""
    if not path.exists():
        return {}
    return {
        row["settings"]: TrainedRun({int(step): loss for step, loss in row["curve"].items()}, row["file_bytes"])
        for row in read_measurement(path, BENCH)["rows"]
    }


def keep_runs(path: Path, runs: Mapping[str, TrainedRun]) -> None:
    rows = [{"settings": key, **asdict(run)} for key, run in runs.items()]
    write_json(path, {"bench": BENCH, "device": device_name(), "versions": package_versions(), "rows": rows})


def best_rate(rate: float, loss_of: Callable[[float], float]) -> float:
    """The learning rate whose loss is lowest: of three, and of those beyond while the best lies at an end."""
    losses = {rate * factor: loss_of(rate * factor) for factor in FACTORS}
    for _ in range(MOST_BEYOND):
        best = min(losses, key=lambda each: losses[each])
        if best not in (min(losses), max(losses)):
            break
        beyond = best * (3.0 if best == max(losses) else 1 / 3)
        losses[beyond] = loss_of(beyond)
    return min(losses, key=lambda each: losses[each])


def loss_at(curve: Mapping[int, float], step: float) -> float:
    """The loss at a step between two validations, on the line between them."""
    before = max((each for each in curve if each <= step), default=min(curve))
    after = min((each for each in curve if each >= step), default=max(curve))
    if before == after:
        return curve[before]
    return curve[before] + (curve[after] - curve[before]) * (step - before) / (after - before)


def relative(losses: Sequence[float], base: Sequence[float]) -> tuple[float, float, float] | None:
    """The mean change of a seed's loss with its 95 % interval; None with one seed, or of the baseline itself."""
    changes = [own / other - 1.0 for own, other in zip(losses, base, strict=True)]
    if len(changes) < FEWEST_VALUES or not any(changes):
        return None
    mean, reach = mean_interval(changes)
    return mean, mean - reach, mean + reach
