"""The package from Python: `from lora_trainer import train, plan, check_dataset, validate_lora, load_config`.

All functions take the same settings as the command: `model` and `data` (without them the built-in ones), `presets` such as
`["12gb", "quality"]`, `settings` such as `{"lora.rank": 8}`, and `config`, a TOML file; later ones win. They raise
UsageError with every problem of the settings at once. Nothing is printed unless `quiet=False`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from lora_trainer.run.order import plain_console
from lora_trainer.run.score_lora import score_lora
from lora_trainer.run.trainer import ProductionTrainer, Source

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.dataset_check import DataReport
    from lora_trainer.evaluation.lora_report import LoraReport
    from lora_trainer.run.plans.plan import Plan
    from lora_trainer.run.train import RunResult
    from lora_trainer.run_folder.progress import Watch


class Options(TypedDict, total=False):
    """What `ProductionTrainer` takes beside the model and the data."""

    presets: str | Sequence[str]
    settings: Mapping[str, Any]
    config: Source
    output: Source
    name: str
    progress: Watch
    quiet: bool


def load_config(
    model: Source | None = None, data: Source | Sequence[Source] | None = None, **options: Unpack[Options]
) -> Config:
    """The frozen config of a run: defaults, the family's preset, `presets`, accelerate, `config`, `settings`; later wins."""
    return _trainer(model, data, options).config


def check_dataset(
    data: Source | Sequence[Source], model: Source | None = None, **options: Unpack[Options]
) -> DataReport:
    """The dataset gate's report: score in [0, 1], findings with their fixes, refusals. Decodes every image."""
    return _trainer(model, data, options).check()


def plan(
    model: Source | None = None, data: Source | Sequence[Source] | None = None, **options: Unpack[Options]
) -> Plan:
    """Memory in GiB part by part, steps, disk and least time, without a GPU or weights."""
    return _trainer(model, data, options).plan()


def train(
    model: Source | None = None,
    data: Source | Sequence[Source] | None = None,
    *,
    resume: bool = False,
    enforce_gates: bool = False,
    **options: Unpack[Options],
) -> RunResult:
    """Train one LoRA and export it; `resume` continues from the newest valid checkpoint.

    With `enforce_gates` a dataset or LoRA below its minimum score is refused. Raises DatasetRefused, LoraRefused and
    TrainingFailed, which names what was saved.
    """
    trainer = _trainer(model, data, options)
    return trainer.produce(resume=resume) if enforce_gates else trainer.train(resume=resume)


def validate_lora(
    lora: Source, model: Source | None = None, data: Source | None = None, **options: Unpack[Options]
) -> LoraReport:
    """The LoRA gate's report on a file: outcome, score in [0, 1], parts with intervals, and findings.

    Without `data` the images of the run beside the file are used. Raises UsageError for a file that cannot
    be read, pickle among them.
    """
    console = plain_console(quiet=options.get("quiet", True))
    config = _trainer(model, None, options).config
    return score_lora(Path(lora), None if data is None else Path(data), config, console.print)


def _trainer(model: Source | None, data: Source | Sequence[Source] | None, options: Options) -> ProductionTrainer:
    quiet: Options = {"quiet": True}
    return ProductionTrainer(model, data, **(quiet | options))
