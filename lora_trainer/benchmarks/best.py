"""The settings that make a step quickest here without changing what it learns, as a file for `--config`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch

from lora_trainer.benchmarks.device import device_name
from lora_trainer.benchmarks.versus import LOSS_KEPT, NotRun, VersusRow, rows_versus
from lora_trainer.config.resuming import CHANGES_TRAINING, FIXED
from lora_trainer.config.toml import shown
from lora_trainer.core.io import write_text

if TYPE_CHECKING:
    from lora_trainer.benchmarks.measures import RequestedMeasure
    from lora_trainer.config.schema import Config

QUICKER = 0.98  # of the time: less is not worth a setting
ATTENTION_ON_A_GPU = ("sdpa", "flash", "efficient", "cudnn", "xformers", "flash2")
BEST = "best together"
Settings = Mapping[str, Any]


def rows_and_best(
    asked: RequestedMeasure, named: str, steps: int, folder: Path
) -> tuple[list[VersusRow | NotRun], list[str]]:
    """The settings that were asked for, or the usual ones, each beside the step without; the best are written.

    The best of each setting are measured together too, and written only where that is better than any alone.
    """
    assert asked.best is not None
    tried = asked.versus or usual_settings(asked.resolved.config)
    rows, notes = rows_versus(replace(asked, compare=tried), named, steps, folder / "each")
    good = best_of_each(measured(rows), tried)
    if len(good) > 1:
        together: dict[str, Any] = {name: value for row in good for name, value in tried[row.name].items()}
        more, said = rows_versus(replace(asked, compare={BEST: together}), named, steps, folder / "together")
        rows, notes = [*rows, *more[1:]], [*notes, *said]
        if not any(row.name == BEST and kept(row) and row.ratio <= good[0].ratio for row in measured(more)):
            good = good[:1]
    write_text(asked.best, preset_text(rows[0].model if rows else named, measured(rows), good, tried))
    result = ", ".join(row.name for row in good) or "nothing that was tried is quicker"
    return rows, [*notes, f"{asked.best}: {result}"]


def usual_settings(config: Config) -> dict[str, Settings]:
    """What may be quicker on this device."""
    names: list[tuple[str, Any]] = [("memory.gradient_checkpointing", False)]
    halves = {config.train.effective_batch_size // 2, config.train.effective_batch_size // 4} - {0}
    names += [("train.max_micro_batch_size", half) for half in sorted(halves, reverse=True)]
    if torch.cuda.is_available():
        names += [("hardware.attention_backend", name) for name in ATTENTION_ON_A_GPU]
        names += [("compile.enabled", True), ("hardware.channels_last", True)]
    return {f"{name}={shown(value).strip(chr(34))}": {name: value} for name, value in names}


def kept(row: VersusRow) -> bool:
    """Whether it is quicker, in nine of ten steps too, and learns the same."""
    quicker = row.ratio < QUICKER and row.ratio_p90 is not None and row.ratio_p90 < 1
    return quicker and row.loss_mean is not None and row.loss_mean <= LOSS_KEPT


def measured(rows: Iterable[VersusRow | NotRun]) -> list[VersusRow]:
    return [row for row in rows if isinstance(row, VersusRow)]


def exportable(settings: Settings) -> bool:
    """Whether they leave alone what is learned."""
    return not any(name in FIXED or name in CHANGES_TRAINING for name in settings)


def best_of_each(rows: Iterable[VersusRow], tried: Mapping[str, Settings]) -> list[VersusRow]:
    """The quickest value of each setting among those that keep the loss, the quickest first."""
    best: dict[tuple[str, ...], VersusRow] = {}
    for row in sorted(
        (row for row in rows if row.name in tried and kept(row) and exportable(tried[row.name])),
        key=lambda row: row.ratio,
    ):
        best.setdefault(tuple(tried[row.name]), row)
    return list(best.values())


def preset_text(model: str, rows: Sequence[VersusRow], good: Sequence[VersusRow], tried: Mapping[str, Settings]) -> str:
    """TOML, each value under its figures."""
    lines = [f"# Measured on {device_name()}: {model}.", "# Use: lora-trainer train --config THIS_FILE", ""]
    sections: dict[str, list[str]] = {}
    for row in good:
        for name, value in tried[row.name].items():
            section, _, key = name.partition(".")
            own = [f"# {figures(row, rows[0])}", tomli_w.dumps({key: value}).strip()]
            sections.setdefault(section, []).extend(own)
    for section, own in sections.items():
        lines += [f"[{section}]", *own, ""]
    passed = [f"#   {row.name}: {figures(row, rows[0])}" for row in rows[1:] if row not in good]
    return "\n".join([*lines, *(["# Tried beside:", *passed] if passed else [])]) + "\n"


def figures(row: VersusRow, base: VersusRow) -> str:
    held = "" if row.peak_gib is None or base.peak_gib is None else f", {row.peak_gib - base.peak_gib:+.3f} GiB"
    spread = "" if row.ratio_p10 is None else f" ({row.ratio_p10:.3f} to {row.ratio_p90:.3f})"
    off = "" if row.loss_mean is None else f", losses {row.loss_mean:.2%} off"
    return f"{row.ratio:.3f}{spread} of the time{held}{off}"
