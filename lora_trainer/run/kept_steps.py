"""The LoRAs of a run's kept steps: files in `weights`, checkpoints and best weights, as LoRA files to compare."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.adapters.adapter_kinds import ADAPTERS, adapter_kind
from lora_trainer.core.errors import UsageError, UserError, first_line
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from lora_trainer.lora_format.metadata import with_hashes
from lora_trainer.lora_format.tensor_file import DamagedFile, read_sealed
from lora_trainer.lora_format.weights import AdapterWeights, folded
from lora_trainer.lora_format.writing import write_tensors
from lora_trainer.models.lora_names import names_of
from lora_trainer.optim.optimizers import OPTIMIZERS
from lora_trainer.run.choices import DTYPES
from lora_trainer.run.release import WEIGHTS, lora_weights
from lora_trainer.run_folder.record import Record
from lora_trainer.training.checkpoints.best import best_files, read_best
from lora_trainer.training.checkpoints.checkpoint import (
    ADAPTER,
    AVERAGE,
    list_checkpoints,
    read_state,
    step_name,
    step_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lora_trainer.config.schema import Config
    from lora_trainer.models.family import Family

EXPORTED = re.compile(r".+-step-(\d+)\.safetensors")
MOST_STEPS = 6  # compared beside the exported one


@dataclass(frozen=True)
class RunFiles:
    """A run's folder, the LoRA that it exported in kohya's format, and the step of its weights."""

    folder: Path
    lora: Path
    step: int


def run_files(lora: Path) -> RunFiles | None:
    """The run whose `run.json` is beside a LoRA file; None where it does not name its LoRA and that one's step."""
    record = Record.read(lora.parent)
    if record is None or record.files["kohya"] is None or not isinstance(step := record.released.get("step"), int):
        return None
    return RunFiles(lora.parent, lora.parent / record.files["kohya"], step)


def kept_steps(
    run: RunFiles, config: Config, family: Family, place: Path, say: Callable[[str], None]
) -> dict[int, Path]:
    """LoRA files of the steps that a run kept, beside the exported one; at most `MOST_STEPS`, evenly over the steps.

    Those that are no LoRA files yet are written to the folder `place`. A step whose weights cannot be read or written is
    skipped, which `say` is called with.
    """
    checkpoints = run.folder / "checkpoints"
    exported = {
        int(match[1]): path
        for path in (run.folder / WEIGHTS).glob("*.safetensors")
        if (match := EXPORTED.fullmatch(path.name))
    }
    there = {step_of(path): path for path in list_checkpoints(checkpoints)}
    steps = {*exported, *(set(there) | set(best_files(checkpoints)) if ADAPTERS[config.lora.type].is_checked else ())}
    kept = sorted(steps - {run.step})
    if len(kept) > MOST_STEPS:
        kept = [kept[round(index * (len(kept) - 1) / (MOST_STEPS - 1))] for index in range(MOST_STEPS)]
    found = {}
    for step in kept:
        if step in exported:
            found[step] = exported[step]
            continue
        weights: Mapping[str, Tensor] | None = read_best(checkpoints, step)
        if weights is None and step in there:
            weights = shown_weights_of(there[step], config)
        if weights is None:
            say(f"step {step} is not compared: its weights cannot be read")
            continue
        path = place / f"{run.folder.name}-{step_name(step)}.safetensors"
        try:
            write_step(path, step, lora_weights(config, family, weights), run, config, family)
        except UserError as error:
            say(f"step {step} is not compared: {first_line(error)}")
            continue
        found[step] = path
    return found


def write_step(path: Path, step: int, weights: AdapterWeights, run: RunFiles, config: Config, family: Family) -> None:
    """Write a step's weights as the run exports them in kohya's format, with the header of its LoRA."""
    ready = folded(weights, DTYPES[config.checkpoint.export_dtype])
    form, _ = adapter_kind(config).forms(ready, names_of(family))
    header = {**read_tensor_header(run.lora).get(METADATA, {}), **form.header}
    header |= {"ss_steps": str(step), "ss_output_name": path.stem, "modelspec.title": path.stem}
    write_tensors(path, form.tensors, with_hashes(form.tensors, header))


def shown_weights_of(checkpoint: Path, config: Config) -> Mapping[str, Tensor] | None:
    """The weights of a checkpoint that a run would export at its step: their average, or the masters.

    None for a damaged one, and for a schedule-free optimizer, whose average is in its state only.
    """
    averaged = config.train.averages_weights
    try:
        document = read_state(checkpoint)
        files, has_state = document["files"], document["optimizer"] is not None
        if has_state and not averaged and OPTIMIZERS[config.optimizer.name].eval_weight is not None:
            return None
        # An average lacks what is not trained, such as a LoRA's initial values.
        names = (ADAPTER, AVERAGE) if averaged and has_state else (ADAPTER,)
        return {
            key: value for name in names for key, value in read_sealed(checkpoint / name, name, files[name]).items()
        }
    except (OSError, DamagedFile, UsageError, ValueError, KeyError, TypeError, AttributeError):
        return None
