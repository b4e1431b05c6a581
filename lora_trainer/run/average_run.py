"""The average over a run's checkpoints, of any kind of adapter, with the header of the run's own file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.convert import SourceFile
from lora_trainer.lora_tools.combining import average_of_checkpoints, checkpoints_in, unchanged_rows
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import read_source
from lora_trainer.run.inputs import read_model
from lora_trainer.run.reading import lora_of
from lora_trainer.run.release import lora_weights
from lora_trainer.run_folder.record import RECORD, Record
from lora_trainer.training.checkpoints.checkpoint import step_of

if TYPE_CHECKING:
    from lora_trainer.lora_format.low_rank import LayerRow
    from lora_trainer.lora_format.weights import AdapterWeights


@dataclass(frozen=True)
class RunAverage:
    """The average, the run's own LoRA file where it has one (else the form to write), and the steps."""

    name: str
    weights: AdapterWeights
    layers: tuple[LayerRow, ...]
    like: SourceFile
    steps: tuple[int, ...]


def average_run(named: Path, steps: tuple[int, int | None], weights_of: Callable[[int], Sequence[float]]) -> RunAverage:
    """Average the trained weights of a run's checkpoints; `weights_of` returns the weights of n states, oldest first.

    `named` is the run's folder or its `checkpoints`. Raises UsageError for what is no run, or has too few checkpoints.
    """
    folder = named.parent if named.name == "checkpoints" and (named.parent / RECORD).is_file() else named
    record = Record.read(folder)
    config = None if record is None else record.read_config()
    if config is None:
        message = f"{named} is no run: {RECORD} cannot be read there."
        raise UsageError(Problem("not_a_run", message, "Name a run's folder, or LoRA files."))
    paths = checkpoints_in(folder, *steps)
    exported = lora_of(folder)
    own = read_source(exported) if exported.is_file() else None
    family = FAMILIES[own.weights.family] if own is not None and own.weights.family else read_model(config)[0]
    averaged = average_of_checkpoints(paths, weights_of(len(paths)))
    weights = replace(lora_weights(config, family, averaged), family=family.name)
    layers = unchanged_rows(weights.modules)
    like = own or SourceFile(replace(weights, modules={}), "kohya")
    return RunAverage(folder.resolve().name, weights, layers, like, tuple(step_of(path) for path in paths))
