"""`bench challenge`: a production run held against three aims: seconds a step, peak memory, and the score of its LoRA.

Each model has a challenge of its own. Of the families in challenge.toml, or the one that is set, no weights are here: time
and memory are of one sample a step, planned for 5 GB, at the model's own resolution. On a GPU the step is measured, with
random weights; without one it is predicted: its operations, at the rate of a GPU and the share of that rate that other
programs are known to reach. Their score is not measured. The model that is named, or the built-in miniature with aims of its
size, is trained by one whole `produce`, whose steps, memory and score are held against all three aims.
"""

from __future__ import annotations

import statistics
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.measures import Column, Report, RequestedMeasure, tenths
from lora_trainer.benchmarks.trials.row import Asking, child, laid
from lora_trainer.benchmarks.trials.specs import Spec, TableRow, row_of_document
from lora_trainer.benchmarks.trials.steps import changed, layers_of
from lora_trainer.benchmarks.trials.table import in_child
from lora_trainer.config.layers import Layer, Resolved
from lora_trainer.config.presets import preset_layers
from lora_trainer.config.toml import EMPTY
from lora_trainer.core.errors import LoraRefused, Problem, UsageError
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
STEP_ROW_SECONDS = 600.0
PREDICTED, MEASURED, NOT_MEASURED = "predicted", "measured", "not measured"
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


ASSUMED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RECORDS = tuple(SpeedRecord(**record) for record in ASSUMED["record"])


@dataclass(frozen=True)
class ChallengeRow:
    """One aim. `ratio` is at most 1 where it is reached: `found` over `aim`, of a score `aim` over `found`.

    `found` is None where it could not be measured; `reason` says what it rests on, or why not.
    """

    name: str
    model: str
    aim: float
    found: float | None
    unit: str
    how: str
    reached: bool | None
    ratio: float | None
    reason: str
    seconds_median: float | None = None
    seconds_p10: float | None = None
    seconds_p90: float | None = None


def aimed(
    name: str,
    model: str,
    found: float | None,
    how: str,
    reason: str,
    aims: Aims = FULL,
    **seconds: float | None,
) -> ChallengeRow:
    """The row of an aim: `name` begins with `step` (seconds), `peak` (in the aims' unit) or `score`."""
    kind = name.partition(",")[0]
    aim, unit = {"step": (aims.seconds, "s"), "peak": (aims.memory, aims.unit), "score": (aims.score, "")}[kind]
    if found is None:
        return ChallengeRow(name, model, aim, None, unit, how, None, None, reason, **seconds)
    ratio = (aim / found if found else float("inf")) if kind == "score" else found / aim
    return ChallengeRow(name, model, aim, found, unit, how, ratio < 1, ratio, reason, **seconds)


def measure(asked: RequestedMeasure) -> Report:
    """The rows of each family, then the production run's. Raises UserError."""
    config = asked.resolved.config
    families = () if config.model.path else (config.model.family,) if config.model.family else ASSUMED["models"]
    rows: list[ChallengeRow] = []
    on_gpu = torch.cuda.is_available()
    wanted = [name for name in ("step", "peak", "score") if asked.only is None or asked.only in name]
    if not wanted:
        raise UsageError(
            Problem("no_row_of_that_name", f"No row has {asked.only!r} in its name.", "Rows: step, peak, score.")
        )
    for family in families:
        model = family
        if wanted != ["score"]:
            settings = challenge_settings(asked.resolved, family)
            rows += measured_step(family, settings, asked.steps) if on_gpu else predicted_step(family, settings)
            model = rows[-1].model
        rows.append(
            aimed("score", model, None, NOT_MEASURED, "of families: a score needs trained weights, see --model")
        )
    if "score" in wanted:
        rows += production_run(asked)
    rows = [row for row in rows if row.name.partition(",")[0] in wanted or (row.name == ALL and len(wanted) == 3)]
    reasons = dict.fromkeys(f"{row.name}: {row.reason}" for row in rows if row.reason)
    return Report(rows, ABOUT, [*reasons, *verdicts(rows)], COLUMNS, first="what")


def verdicts(rows: Sequence[ChallengeRow]) -> list[str]:
    """A line for each model: which aims are missed, and which were not measured."""
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model and row.name != ALL]
        missed = [row.name for row in own if row.reached is False]
        unknown = [row.name for row in own if row.reached is None]
        parts = [f"not reached: {', '.join(missed)}" if missed else "every aim that was judged is reached"]
        if unknown:
            parts.append(f"not measured: {', '.join(unknown)}")
        lines.append(f"{model}: {'; '.join(parts)}.")
    return lines


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


def predicted_step(family: str, settings: Mapping[str, Any]) -> list[ChallengeRow]:
    """Time on the GPUs of which a record is known, and the highest peak of all phases of a run, by the plan."""
    plan = make_plan(laid(settings), data=((), ()))
    fit, model = plan.fit, f"{family}, {plan.demand.resolution} px"
    tflop = fit.parts.tflop
    rows = []
    for record in RECORDS:
        rate = GPU_TFLOPS[record.gpu] * record.share
        seconds = tflop / rate
        reason = (
            f"assumed are {GPU_TFLOPS[record.gpu]:g} TFLOP/s, of which {record.share:.0%} are reached ({record.source})"
        )
        name = f"step, {record.gpu}"
        rows.append(aimed(name, model, seconds, PREDICTED, reason, seconds_median=seconds))
    phase = max(plan.phases, key=lambda name: plan.phases[name].peak_gib)
    chosen = f"{fit.precision} weights, {fit.checkpointed} of {fit.blocks} blocks recomputed, {fit.swapped} swapped"
    reason = " ".join((f"of {family}: {chosen}; the phase that holds most is {phase}", *plan.shortages))
    rows.append(aimed("peak", model, plan.phases[phase].peak_gib * GIB / 1e9, PREDICTED, reason))
    return rows


def measured_step(family: str, settings: Mapping[str, Any], steps: int | None) -> list[ChallengeRow]:
    """Time and memory of the trainer's own step on this GPU, in a process of its own, held to 5 GB."""
    spec = Spec("step", family, dict(settings), cap_gib=settings["memory.limit_gib"], seconds=STEP_ROW_SECONDS)
    asking = Asking(steps=steps or Asking.steps)
    with tempfile.TemporaryDirectory() as folder:
        found = in_child(child, (spec, asking), Path(folder) / "row.json", spec.seconds)
    row = row_of_document(found | {"name": spec.name, "model": found.get("model", family)})
    return step_rows(row, device_name())


def step_rows(row: TableRow, device: str) -> list[ChallengeRow]:
    """The aims of a measured step; what torch's allocator does not see of the peak is the plan's constant."""
    name, model = f"step, {device}", f"{row.model}, {row.precision}, {row.checkpointed} blocks recomputed"
    if row.failed is not None or row.seconds_median is None:
        return [aimed(each, row.model, None, MEASURED, row.failed or "not measured") for each in (name, "peak")]
    seconds = {"seconds_median": row.seconds_median, "seconds_p10": row.seconds_p10, "seconds_p90": row.seconds_p90}
    held = row.reserved_gib if row.reserved_gib is not None else row.peak_gib
    peak = None if held is None else (held + CONTEXT_GIB) * GIB / 1e9
    reason = f"{CONTEXT_GIB:g} GiB for the CUDA context are added to what torch's allocator held; of the training alone"
    return [
        aimed(name, model, row.seconds_median, MEASURED, "", FULL, **seconds),
        aimed("peak", model, peak, MEASURED, reason),
    ]


def production_run(asked: RequestedMeasure) -> list[ChallengeRow]:
    """A whole `produce`, and what its record says: its steps' median time, its memory, and its LoRA's score."""
    resolved = asked.resolved
    config = resolved.config
    layers = [Layer(name, values) for name, values in layers_of(resolved).items() if not name.startswith(FAMILY_PRESET)]
    if config.model.path is None:  # a family alone has no weights
        layers.append(Layer("bench challenge", {"model": {"family": EMPTY}}))
        presets = [] if any(name.startswith("preset") for name in layers_of(resolved)) else [DEMO_PRESET]
        resolved = settle(preset_layers(presets).layers, layers)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"run.output": folder, "run.name": "challenge"}
        resolved = changed(resolved, settings | ({"train.max_steps": asked.steps} if asked.steps else {}))
        order = make_order(resolved, enforce_gates=True, console=plain_console(stderr=True))
        with suppress(LoraRefused):  # its score is in the record too
            train(order)
        record, steps = Record.read(order.folder) or Record(order.folder.name), read_lines(order.folder / METRICS)
    times = [float(step["seconds"]) for step in steps]
    low, high = tenths(times) if len(times) > 1 else (None, None)
    median = statistics.median(times) if times else None
    memory, model = record.memory, config.model.path or "built-in base model"
    held = memory["held_gib"] + CONTEXT_GIB if "held_gib" in memory else memory.get("peak_gib")
    aims = MINIATURE if config.model.path is None else FULL
    peak, where = (
        None if held is None else held * GIB / BYTES[aims.unit],
        "of the GPU" if "held_gib" in memory else "of RAM",
    )
    ended = f"one whole produce on {device_name()} ended as {record.status} after {record.steps} steps"
    seconds = {"seconds_median": median, "seconds_p10": low, "seconds_p90": high}
    rows = [
        aimed(f"step, {device_name()}", model, median, MEASURED, ended, aims, **seconds),
        aimed("peak", model, peak, MEASURED, f"{where}; {ended}", aims),
        aimed("score", model, record.scores["lora"], MEASURED, f"{ended}; its files are not kept", aims),
    ]
    ratios = [row.ratio for row in rows if row.ratio is not None]
    worst = max(ratios) if len(ratios) == len(rows) else None
    reached = None if worst is None else worst < 1
    return [*rows, ChallengeRow(ALL, model, 1.0, worst, "", MEASURED, reached, worst, "the largest ratio of the three")]


COLUMNS: tuple[Column, ...] = (
    ("aim", lambda row: f"{'over' if row.name == 'score' else 'under'} {row.aim:g} {row.unit}".rstrip()),
    (
        "found",
        lambda row: "" if row.found is None else f"{row.found:.{0 if row.found > 100 else 2}f} {row.unit}".rstrip(),
    ),
    ("how", lambda row: row.how),
    ("reached", lambda row: "" if row.reached is None else "yes" if row.reached else "no"),
)
ABOUT = {
    "peak": "the most that a GPU holds, with its context, or without a GPU this process in RAM; GB of 1e9, MB of 1e6 bytes",
    "score": "of the LoRA, by its gate",
    ALL: "whether one run reached the three aims",
    "found": "predicted: operations over the assumed share of the GPU's rate; unpacking quantized weights is not counted",
}
