"""`bench adapters`: what each kind of adapter and each option of the LoRA costs a step, and what it learns.

The losses are those of ordinary runs on the run's own model and data: for each row the learning rate is chosen first,
on a seed that is not compared, then runs of all seeds are validated on held-out images at fixed noise. Seeds are
compared in pairs.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.benchmarks.baseline import SavedRows
from lora_trainer.benchmarks.bench_model import public_name
from lora_trainer.benchmarks.compare_settings import compare_sides, measure_sides
from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.measures import (
    OWN,
    SMALL,
    STEPS,
    TIMES,
    Column,
    Report,
    RequestedMeasure,
    Row,
    change,
    figure,
    interval_figures,
    mean_and_interval,
)
from lora_trainer.config.layers import Resolved, flattened
from lora_trainer.core.errors import UsageError
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.interrupt import Stopped
from lora_trainer.monitor.trackers import VALIDATION, read_lines
from lora_trainer.run.order import make_order, plain_console
from lora_trainer.run.train import train
from lora_trainer.run_folder.progress import unwatched
from lora_trainer.training.processes import join_processes

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
MOST_BEYOND = 2  # more learning rates, each three times the best at an end or a third of it
VALIDATIONS = 20  # of a run
TUNING_SEED = 1000  # added to the settings' seed
ONLY_STEPS = {  # nothing but steps and their validation
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
COLUMNS: tuple[Column, ...] = (
    *TIMES,
    ("ratio", figure("ratio", ".3f")),
    ("peak GiB", figure("peak_gib", ".3f")),
    ("trained", figure("parameters", ",.0f", 1e-3)),
    ("file", figure("file_bytes", ",.0f", 1e-3)),
    ("rate", figure("learning_rate", ".1e")),
    ("loss", figure("loss", ".4f")),
    ("over lora", mean_and_interval("loss_change", "+.1%")),
    ("in equal time", mean_and_interval("loss_change_equal_time", "+.1%")),
)


def measure(request: RequestedMeasure) -> Report:
    """Measure each kind and option. `request.steps` are those of each trained run. Raises UserError."""
    names = dict.fromkeys([BASELINE, *request.filter(VARIANTS)])
    rows, notes = list[Row](), list[str]()
    for subject in request.subjects or (SMALL, OWN):
        with tempfile.TemporaryDirectory() as folder:
            subject_rows, subject_notes = time_adapters(request, subject, list(names), Path(folder) / "steps")
            notes += subject_notes
            if public_name(request.resolved.config, subject) is None:
                subject_rows = LossComparison(request, Path(folder)).add_to(subject_rows)
            else:
                notes.append(f"{subject_rows[0].model}: weights are random, so that no loss is compared")
        free_memory(join_processes().device)
        rows += subject_rows
    return Report(rows, ABOUT, notes, COLUMNS, first="adapter")


def time_adapters(
    request: RequestedMeasure, subject: str, names: Sequence[str], folder: Path
) -> tuple[list[Row], list[str]]:
    """The time and memory of a step of each, and a note for what this model or hardware cannot carry."""
    sides, notes = dict[str, Resolved](), list[str]()
    for name in names:
        try:
            sides[name] = change(request.resolved, VARIANTS[name])
        except UsageError as error:
            notes += [f"{name}: {problem.message}" for problem in error.problems]
    measured, side_notes = measure_sides(request, subject, sides, STEPS, folder)
    rows = [
        row.with_figures(parameters=measured[row.name].parameters)
        for row in compare_sides(measured)
        if row["not_run"] is None
    ]
    return rows, [*notes, *side_notes]


# ---- losses


@dataclass(frozen=True)
class TrainedRun:
    """The validation losses of a run by their step, and the size of its LoRA file in bytes."""

    curve: Mapping[int, float]
    file_bytes: int

    @property
    def last(self) -> float:
        return self.curve[max(self.curve)]


class LossComparison:
    """Trains the runs of each row, or finds them in the file of `--rows`."""

    def __init__(self, request: RequestedMeasure, folder: Path) -> None:
        places = {"run.output": str(folder / "runs"), "cache.dir": str(folder / "cache")}
        self.base = change(request.resolved, {**ONLY_STEPS, **places})
        self.steps, self.seeds = request.steps or TRAINED, request.seeds or SEEDS
        self.saved = SavedRows.read(request.rows, "adapters", device_name())

    def add_to(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with their learning rates and losses, compared with the baseline's."""
        rates = {row.name: self.choose_learning_rate(row.name) for row in rows}
        runs = {
            name: [self.train(name, rate, seed, self.steps) for seed in range(self.seeds)]
            for name, rate in rates.items()
        }
        quickest = min(row["ratio"] for row in rows)
        ends = {name: [run.last for run in own] for name, own in runs.items()}
        in_time = {
            row.name: [loss_at(run.curve, self.steps * quickest / row["ratio"]) for run in runs[row.name]]
            for row in rows
        }
        return [
            row.with_figures(
                file_bytes=runs[row.name][0].file_bytes,
                learning_rate=rates[row.name],
                seeds=self.seeds,
                loss=statistics.fmean(ends[row.name]),
                **compare_losses("loss_change", ends[row.name], ends[BASELINE]),
                **compare_losses("loss_change_equal_time", in_time[row.name], in_time[BASELINE]),
            )
            for row in rows
        ]

    def choose_learning_rate(self, name: str) -> float:
        """The best on a seed that is not compared, in half the steps."""
        steps = max(1, self.steps // 2)
        usual = self.base.config.optimizer.learning_rate
        return find_learning_rate(usual, lambda rate: self.train(name, rate, TUNING_SEED, steps).last)

    def train(self, name: str, rate: float, seed: int, steps: int) -> TrainedRun:
        """An ordinary run, or what the file has of it. Raises UserError; Stopped for a signal."""
        settings = {
            **VARIANTS[name],
            "optimizer.learning_rate": rate,
            "train.seed": self.base.config.train.seed + seed,
            "train.max_steps": steps,
            "validation.every_n_steps": max(1, steps // VALIDATIONS),
            "run.name": f"{name}-{rate:.3g}-{seed}-{steps}",
        }
        resolved = change(self.base, settings)
        key = settings_key(resolved)
        if key not in self.saved.rows:
            result = train(make_order(resolved, console=plain_console(quiet=True), watch=unwatched))
            if result.exit_code:
                raise Stopped(result.exit_code)
            curve = {int(line["step"]): float(line["loss"]) for line in read_lines(result.folder / VALIDATION)}
            self.saved.save(key, {"curve": curve, "file_bytes": result.files["kohya"].stat().st_size})
        row = self.saved.rows[key]
        return TrainedRun({int(step): loss for step, loss in row["curve"].items()}, row["file_bytes"])


def settings_key(resolved: Resolved) -> str:
    """The settings of a run but its place, which changes nothing."""
    values = flattened(resolved.config)
    own = {name: str(value) for name, value in values.items() if not name.startswith(("run.", "cache."))}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def find_learning_rate(rate: float, loss_of: Callable[[float], float]) -> float:
    """The learning rate whose loss is lowest: of three, and of those beyond while the best lies at an end."""
    losses = {rate * factor: loss_of(rate * factor) for factor in FACTORS}
    for _ in range(MOST_BEYOND):
        best = min(losses, key=lambda each: losses[each])
        if best == max(losses):
            beyond = best * 3.0
        elif best == min(losses):
            beyond = best / 3
        else:
            break
        losses[beyond] = loss_of(beyond)
    return min(losses, key=lambda each: losses[each])


def loss_at(curve: Mapping[int, float], step: float) -> float:
    """The loss at a step between two validations, on the line between them."""
    before = max((each for each in curve if each <= step), default=min(curve))
    after = min((each for each in curve if each >= step), default=max(curve))
    if before == after:
        return curve[before]
    return curve[before] + (curve[after] - curve[before]) * (step - before) / (after - before)


def compare_losses(name: str, losses: Sequence[float], base: Sequence[float]) -> dict[str, float | None]:
    """The figures of the mean change of a seed's loss; None with one seed, or of the baseline itself."""
    changes = [own / other - 1.0 for own, other in zip(losses, base, strict=True)]
    return interval_figures(name, changes if any(changes) else [])
