"""`bench challenge`: a production run next to three aims: seconds a step, peak memory, and the score of its LoRA.

Each model has a challenge of its own. Of the families in challenge.toml, or the one that is set, no weights are here: time
and memory are of one sample a step, planned for 5 GB, at the model's own resolution. On a GPU the step is measured, with
random weights; without one it is predicted: its operations, at the rate of a GPU and the share of that rate that other
programs are known to reach. Their score is not measured. The model that is named, or the built-in miniature with aims of
its size, is trained by one whole `produce`, whose steps, memory and score are compared with all three aims.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lora_trainer.benchmarks.bench_table import run_in_child
from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.measure_row import RowSettings, measure_and_write, settle_settings
from lora_trainer.benchmarks.measures import (
    Column,
    Report,
    RequestedMeasure,
    Row,
    change,
    figure,
    layers_of,
    time_row,
    yes_or_no,
)
from lora_trainer.benchmarks.table_rows import Spec
from lora_trainer.config.layers import Layer, Resolved
from lora_trainer.config.presets import preset_layers
from lora_trainer.config.toml import EMPTY
from lora_trainer.core.errors import LoraRefused
from lora_trainer.core.gpu_rates import GPU_TFLOPS
from lora_trainer.memory_plan.estimate import CONTEXT_GIB, GIB
from lora_trainer.models.published import public_architecture
from lora_trainer.monitor.trackers import METRICS, read_lines
from lora_trainer.run.order import make_order, plain_console
from lora_trainer.run.plans.plan import make_plan
from lora_trainer.run.settings import settle
from lora_trainer.run.train import train
from lora_trainer.run_folder.record import Record

DEMO_PRESET = "12gb"  # of the built-in run, where no preset is named
STEP_SECONDS = 600.0  # that measuring a step may take
KINDS = ("step", "peak", "score")  # of aims
ALL = "all"  # the row of a run's three aims together
BYTES = {"GB": 1e9, "MB": 1e6}
FAMILY_PRESET = "family preset"


@dataclass(frozen=True)
class Aims:
    """Below so many seconds a step, below so much memory, above this score."""

    seconds: float
    memory: float
    unit: str  # of the memory
    score: float = 0.9


FULL, MINIATURE = Aims(2.0, 5.0, "GB"), Aims(1.0, 1000.0, "MB")
LIMIT_GIB = FULL.memory * BYTES[FULL.unit] / GIB


@dataclass(frozen=True)
class SpeedRecord:
    """What share of a GPU's rate a public record reaches: its operations over its time, over the rate."""

    gpu: str
    share: float
    source: str


ASSUMED = tomllib.loads(Path(__file__).with_name("challenge.toml").read_text(encoding="utf-8"))
RECORDS = tuple(SpeedRecord(**record) for record in ASSUMED["record"])


COLUMNS: tuple[Column, ...] = (
    ("aim", figure("aim", "g")),
    ("found", figure("found", ".2f")),
    ("unit", figure("unit")),
    ("how", figure("how")),
    ("reached", yes_or_no("reached")),
)
ABOUT = {
    "peak": "the most that a GPU holds, with its context, or without a GPU this process in RAM; GB of 1e9, MB of 1e6 bytes",
    "score": "of the LoRA, by its gate",
    ALL: "whether one run reached the three aims",
    "aim": "to be under it; a score above it",
    "found": "predicted: operations over the assumed share of the GPU's rate; unpacking quantized weights is not counted",
}


def measure(request: RequestedMeasure) -> Report:
    """The rows of each family, then the production run's. Raises UserError."""
    wanted, model, rows = request.filter(KINDS), request.resolved.config.model, list[Row]()
    if model.path is None:
        for family in [model.family] if model.family else ASSUMED["models"]:
            rows += family_rows(request, family, with_step=wanted != ["score"])
    if "score" in wanted:
        rows += produce_run(request)
    rows = [row for row in rows if kind_of(row) in wanted or (row.name == ALL and len(wanted) == 3)]
    reasons = dict.fromkeys(f"{row.name}: {row['reason']}" for row in rows if row["reason"])
    return Report(rows, ABOUT, [*reasons, *conclude(rows)], COLUMNS, first="what")


def aim_row(name: str, model: str, found: float | None, how: str, reason: str, aims: Aims = FULL) -> Row:
    """The row of an aim: `name` begins with `step` (seconds), `peak` (in the aims' unit) or `score`.

    `ratio` is below 1 where the aim is reached: `found` over it, of a score the aim over `found`. `found` is None where
    it could not be measured; `reason` is what it rests on, or why not.
    """
    kind = name.partition(",")[0]
    aim, unit = {"step": (aims.seconds, "s"), "peak": (aims.memory, aims.unit), "score": (aims.score, "")}[kind]
    ratio = None
    if found is not None and kind == "score":
        ratio = aim / found if found else float("inf")
    elif found is not None:
        ratio = found / aim
    figures = {"aim": aim, "found": found, "unit": unit, "how": how, "reason": reason}
    return Row(name, model, ratio=ratio, figures={**figures, "reached": None if ratio is None else ratio < 1})


def kind_of(row: Row) -> str:
    return row.name.partition(",")[0]


def conclude(rows: Sequence[Row]) -> list[str]:
    """A line for each model: which aims are missed, and which were not measured."""
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model and row.name != ALL]
        missed = [row.name for row in own if row["reached"] is False]
        unknown = [row.name for row in own if row["reached"] is None]
        line = f"not reached: {', '.join(missed)}" if missed else "every aim that was judged is reached"
        if unknown:
            line += f"; not measured: {', '.join(unknown)}"
        lines.append(f"{model}: {line}.")
    return lines


# ---- a step of a family


def family_rows(request: RequestedMeasure, family: str, *, with_step: bool) -> list[Row]:
    """Its step and peak, measured on a GPU and else predicted; its score is not known."""
    rows, model = list[Row](), family
    if with_step:
        settings = challenge_settings(request.resolved, family)
        if torch.cuda.is_available():
            rows = measure_family(family, settings, request.steps)
        else:
            rows = predict_family(family, settings)
        model = rows[-1].model
    reason = "of families: a score needs trained weights, see --model"
    return [*rows, aim_row("score", model, None, "not measured", reason)]


def challenge_settings(resolved: Resolved, family: str) -> dict[str, Any]:
    """The family at its own resolution in 5 GB, one sample a step, over which your settings win.

    Those of the built-in model's preset are left out.
    """
    own = {
        f"{section}.{key}": value
        for origin, sections in layers_of(resolved).items()
        if not origin.startswith(FAMILY_PRESET)
        for section, values in sections.items()
        for key, value in values.items()
    }
    limit = min(LIMIT_GIB, resolved.config.memory.limit_gib or LIMIT_GIB)
    usual = {"data.resolution": public_architecture(family).facts.resolution, "train.effective_batch_size": 1}
    return {**usual, **own, "model.family": family, "memory.limit_gib": limit}


def predict_family(family: str, settings: Mapping[str, Any]) -> list[Row]:
    """Time on the GPUs of which a record is known, and the highest peak of all phases of a run, by the plan."""
    plan = make_plan(settle_settings(settings), data=((), ()))
    fit, model, rows = plan.fit, f"{family}, {plan.demand.resolution} px", list[Row]()
    for record in RECORDS:
        rate = GPU_TFLOPS[record.gpu]
        seconds = fit.parts.tflop / (rate * record.share)
        reason = f"assumed are {rate:g} TFLOP/s, of which {record.share:.0%} are reached ({record.source})"
        row = aim_row(f"step, {record.gpu}", model, seconds, "predicted", reason)
        rows.append(replace(row, seconds_median=seconds))
    phase = max(plan.phases, key=lambda name: plan.phases[name].peak_gib)
    chosen = f"{fit.precision} weights, {fit.checkpointed} of {fit.blocks} blocks recomputed, {fit.swapped} swapped"
    reason = " ".join((f"of {family}: {chosen}; the phase that holds most is {phase}", *plan.shortages))
    rows.append(aim_row("peak", model, plan.phases[phase].peak_gib * GIB / 1e9, "predicted", reason))
    return rows


def measure_family(family: str, settings: Mapping[str, Any], steps: int | None) -> list[Row]:
    """Time and memory of the trainer's own step on this GPU, in a process of its own, held to 5 GB."""
    spec = Spec("step", family, dict(settings), cap_gib=settings["memory.limit_gib"], seconds=STEP_SECONDS)
    how = RowSettings(steps=steps or RowSettings.steps)
    with tempfile.TemporaryDirectory() as folder:
        found = run_in_child(measure_and_write, (spec, how), Path(folder) / "row.json", spec.seconds)
    return step_rows(Row.from_json({"name": spec.name, "model": family, **found}), device_name())


def step_rows(row: Row, device: str) -> list[Row]:
    """The aims of a measured step; what torch's allocator does not see of the peak is the plan's constant."""
    name = f"step, {device}"
    if row["failed"] is not None or row.seconds_median is None:
        reason = row["failed"] or "not measured"
        return [aim_row(each, row.model, None, "measured", reason) for each in (name, "peak")]
    model = f"{row.model}, {row['precision']}, {row['checkpointed']} blocks recomputed"
    step = aim_row(name, model, row.seconds_median, "measured", "")
    held = row.peak_gib if row["reserved_gib"] is None else row["reserved_gib"]
    peak = None if held is None else (held + CONTEXT_GIB) * GIB / 1e9
    reason = f"{CONTEXT_GIB:g} GiB for the CUDA context are added to what torch's allocator held; of the training alone"
    return [with_seconds(step, row), aim_row("peak", model, peak, "measured", reason)]


def with_seconds(row: Row, timed: Row) -> Row:
    median, low, high = timed.seconds_median, timed.seconds_p10, timed.seconds_p90
    return replace(row, seconds_median=median, seconds_p10=low, seconds_p90=high)


# ---- a whole run


def produce_run(request: RequestedMeasure) -> list[Row]:
    """A whole `produce`, and what its record says: its steps' median time, its memory, and its LoRA's score."""
    resolved = production_settings(request.resolved)
    path = resolved.config.model.path
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"run.output": folder, "run.name": "challenge"}
        if request.steps:
            settings["train.max_steps"] = request.steps
        order = make_order(change(resolved, settings), enforce_gates=True, console=plain_console(stderr=True))
        with suppress(LoraRefused):  # its score is in the record too
            train(order)
        record = Record.read(order.folder) or Record(order.folder.name)
        seconds = [float(step["seconds"]) for step in read_lines(order.folder / METRICS)]

    aims, model = (FULL, path) if path is not None else (MINIATURE, "built-in base model")
    held, where = record.memory.get("peak_gib"), "of RAM"
    if "held_gib" in record.memory:
        held, where = record.memory["held_gib"] + CONTEXT_GIB, "of the GPU"
    peak = None if held is None else held * GIB / BYTES[aims.unit]
    timed = time_row("step", model, seconds) if len(seconds) > 1 else Row("step", model)
    ended = f"one whole produce on {device_name()} ended as {record.status} after {record.steps} steps"
    step = aim_row(f"step, {device_name()}", model, timed.seconds_median, "measured", ended, aims)
    rows = [
        with_seconds(step, timed),
        aim_row("peak", model, peak, "measured", f"{where}; {ended}", aims),
        aim_row("score", model, record.scores["lora"], "measured", f"{ended}; its files are not kept", aims),
    ]
    return [*rows, row_of_all(model, rows)]


def production_settings(resolved: Resolved) -> Resolved:
    """The settings of the run that is named, or those of the built-in miniature: a family alone has no weights."""
    if resolved.config.model.path is not None:
        return resolved
    layers = layers_of(resolved)
    own = [Layer(name, values) for name, values in layers.items() if not name.startswith(FAMILY_PRESET)]
    has_preset = any(name.startswith("preset") for name in layers)
    presets = preset_layers([] if has_preset else [DEMO_PRESET]).layers
    return settle(presets, [*own, Layer("bench challenge", {"model": {"family": EMPTY}})])


def row_of_all(model: str, rows: Sequence[Row]) -> Row:
    """The largest ratio of the three aims, where all were measured."""
    ratios = [row["ratio"] for row in rows]
    worst = None if None in ratios else max(ratios)
    figures = {"aim": 1.0, "found": worst, "unit": "", "how": "measured", "reason": "the largest ratio of the three"}
    return Row(ALL, model, ratio=worst, figures={**figures, "reached": None if worst is None else worst < 1})
