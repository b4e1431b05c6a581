"""The weights of the lowest validation loss: one file next to the checkpoints, named after its step.

A checkpoint's state names the best step until then. Every file that a checkpoint names is kept, so a run that resumes
from an older one finds its best again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.disk import what_helps
from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.io import atomic_path
from lora_trainer.lora_format.tensor_file import DamagedFile, read_sealed, verify_sealed, write_sealed
from lora_trainer.training.checkpoints.checkpoint import NewerVersion, list_checkpoints, read_state, resume_hint

if TYPE_CHECKING:
    from torch import Tensor


def best_path(folder: Path, step: int) -> Path:
    """`folder/best-000400.safetensors`."""
    return folder / f"best-{step:06d}.safetensors"


def save_best(folder: Path, step: int, weights: Mapping[str, Tensor]) -> None:
    """Write the weights of a step. Raises TrainingFailed when the disk refuses."""
    path = best_path(folder, step)
    try:
        with atomic_path(path) as temporary:
            verify_sealed(temporary, path.name, write_sealed(temporary, weights, path.name))
    except (OSError, DamagedFile) as error:
        raise TrainingFailed(
            Problem(
                "checkpoint_not_written",
                f"The best weights of step {step} could not be written ({error}).",
                f"{resume_hint(folder)} {what_helps(error)}.",
            )
        ) from error


def read_best(folder: Path, step: int) -> dict[str, Tensor] | None:
    """The weights of a step that was the best; None when their file is absent or damaged."""
    path = best_path(folder, step)
    try:
        return read_sealed(path, path.name)
    except (OSError, DamagedFile):
        return None


def prune_best(folder: Path, step: int, best: int | None) -> None:
    """Delete the files that no checkpoint names; that of `step`, just written, names `best`.

    Later ones stay: the checkpoint that names them is not written yet.
    """
    named = {best, *(best_step_of(path) for path in list_checkpoints(folder))}
    for number, path in best_files(folder).items():
        if number <= step and number not in named:
            path.unlink(missing_ok=True)


def drop_best_after(folder: Path, step: int) -> None:
    """Delete the files of steps later than `step`. Raises OSError."""
    for number, path in best_files(folder).items():
        if number > step:
            path.unlink(missing_ok=True)


def best_files(folder: Path) -> dict[int, Path]:
    """The files by step."""
    found = {path.stem.removeprefix("best-"): path for path in folder.glob("best-*.safetensors")}
    return {int(number): path for number, path in found.items() if number.isdigit()}


def best_step_of(checkpoint: Path) -> int | None:
    """The best step that a checkpoint names; None for a damaged one."""
    try:
        step = read_state(checkpoint)["state"]["best_step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NewerVersion):
        return None
    return step if isinstance(step, int) else None
