"""`bench step --export-preset`: the settings that make a step fastest here and learn the same, as a file for `--config`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch

from lora_trainer.benchmarks.compare_settings import LOSS_KEPT, compare_all
from lora_trainer.benchmarks.device import device_name
from lora_trainer.config.resuming import CHANGES_TRAINING, FIXED
from lora_trainer.config.toml import shown
from lora_trainer.core.io import write_text

if TYPE_CHECKING:
    from lora_trainer.benchmarks.measures import RequestedMeasure, Row
    from lora_trainer.config.schema import Config

FASTER = 0.98  # of the time: less is not worth a setting
ATTENTION_ON_A_GPU = ("sdpa", "flash", "efficient", "cudnn", "xformers", "flash2")
TOGETHER = "best together"
Settings = Mapping[str, Any]


def export_fastest(
    request: RequestedMeasure, file: Path, subject: str, steps: int, folder: Path
) -> tuple[list[Row], list[str]]:
    """The requested settings, or the usual ones, each compared with the step without; the best are written.

    The best of each setting are measured together too, and written only where that is faster than any alone.
    """
    tried = request.compare or usual_settings(request.resolved.config)
    request = replace(request, compare=tried)
    rows, notes = compare_all(request, subject, steps, folder / "each", skip_failed=True)
    best = best_of_each(rows, tried)
    if len(best) > 1:
        joined = {name: value for row in best for name, value in tried[row.name].items()}
        request = replace(request, compare={TOGETHER: joined})
        more, more_notes = compare_all(request, subject, steps, folder / "together", skip_failed=True)
        rows, notes = [*rows, *more[1:]], [*notes, *more_notes]
        if not any(row.name == TOGETHER and is_better(row) and row["ratio"] <= best[0]["ratio"] for row in more):
            best = best[:1]
    write_text(file, preset_text(rows[0].model if rows else subject, rows, best, tried))
    result = ", ".join(row.name for row in best) or "nothing that was tried is quicker"
    return rows, [*notes, f"{file}: {result}"]


def usual_settings(config: Config) -> dict[str, Settings]:
    """What may be faster on this device, by its text."""
    names: list[tuple[str, Any]] = [("memory.gradient_checkpointing", False)]
    parts = {config.train.effective_batch_size // 2, config.train.effective_batch_size // 4} - {0}
    names += [("train.max_micro_batch_size", part) for part in sorted(parts, reverse=True)]
    if torch.cuda.is_available():
        names += [("hardware.attention_backend", name) for name in ATTENTION_ON_A_GPU]
        names += [("compile.enabled", True), ("hardware.channels_last", True)]
    return {f"{name}={shown(value).strip(chr(34))}": {name: value} for name, value in names}


def is_better(row: Row) -> bool:
    """Whether it is faster, in nine of ten steps too, and learns the same."""
    if row.ratio is None or row.ratio >= FASTER:
        return False
    if row.ratio_p90 is None or row.ratio_p90 >= 1:
        return False
    return row["loss_mean"] is not None and row["loss_mean"] <= LOSS_KEPT


def best_of_each(rows: Iterable[Row], tried: Mapping[str, Settings]) -> list[Row]:
    """The fastest value of each setting among those that are better, the fastest first."""
    best: dict[tuple[str, ...], Row] = {}
    for row in sorted((row for row in rows if row.name in tried and is_better(row)), key=lambda row: row["ratio"]):
        names = tuple(tried[row.name])
        if not any(name in FIXED or name in CHANGES_TRAINING for name in names):  # what is learned stays the same
            best.setdefault(names, row)
    return list(best.values())


def preset_text(model: str, rows: Sequence[Row], best: Sequence[Row], tried: Mapping[str, Settings]) -> str:
    """TOML, each value under its figures."""
    lines = [f"# Measured on {device_name()}: {model}.", "# Use: lora-trainer train --config THIS_FILE", ""]
    sections: dict[str, list[str]] = {}
    for row in best:
        for name, value in tried[row.name].items():
            section, _, key = name.partition(".")
            own = [f"# {describe(row, rows[0])}", tomli_w.dumps({key: value}).strip()]
            sections.setdefault(section, []).extend(own)
    for section, own in sections.items():
        lines += [f"[{section}]", *own, ""]
    others = [row for row in rows[1:] if row not in best and row.ratio is not None]
    if others:
        lines += ["# Tried beside:", *(f"#   {row.name}: {describe(row, rows[0])}" for row in others)]
    return "\n".join(lines) + "\n"


def describe(row: Row, base: Row) -> str:
    """Its time, memory and losses compared with the base's."""
    text = f"{row.ratio:.3f}"
    if row.ratio_p10 is not None:
        text += f" ({row.ratio_p10:.3f} to {row.ratio_p90:.3f})"
    text += " of the time"
    if row.peak_gib is not None and base.peak_gib is not None:
        text += f", {row.peak_gib - base.peak_gib:+.3f} GiB"
    if row["loss_mean"] is not None:
        text += f", losses {row['loss_mean']:.2%} off"
    return text
