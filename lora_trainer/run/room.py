"""Whether a run's folder has room for what the run will write: found before the first step, not after the last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.disk import Patience, free_bytes, size_words
from lora_trainer.core.errors import Problem
from lora_trainer.run.file_sizes import StepSpan, highest_bytes
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, resume_hint

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.run.order import Order

SCARCE = 1.2  # times what is needed: below that it is said


@dataclass(frozen=True)
class Room:
    """Bytes that a run will write beyond what is in its folder, and those that its disk has left."""

    folder: Path
    needed: int
    free: int

    @property
    def line(self) -> str:
        return f"disk: checkpoints and the LoRA need {size_words(self.needed)}, {size_words(self.free)} are free"

    @property
    def scarce(self) -> bool:
        return self.needed <= self.free < SCARCE * self.needed

    @property
    def problem(self) -> Problem | None:
        """None where it fits."""
        if self.needed <= self.free:
            return None
        message = (
            f"Checkpoints and the LoRA need {size_words(self.needed)}, "
            f"and the disk of {self.folder} has {size_words(self.free)} free."
        )
        return Problem(
            "disk_full",
            message,
            "Free space there, name another disk with --output, or keep fewer checkpoints (checkpoint.keep_last, keep_every, keep_best).",
        )


def patience_of(order: Order) -> Patience:
    """How a run meets a disk that refuses."""
    section, checkpoints = order.config.checkpoint, order.folder / "checkpoints"
    then = "continue with --resume" if section.save_state else "start again with another --name"
    return Patience(
        section.wait_minutes, order.console.print, lambda: resume_hint(checkpoints), order.folder, then=then
    )


def room_for(
    config: Config, folder: Path, shapes: Sequence[tuple[int, ...]], done: int, total: int, per_epoch: int | None = None
) -> Room:
    """Room for the steps from `done` to `total` of an adapter of these shapes, so many of them `per_epoch`.

    Images are not counted: a full disk costs a run its images and no more.
    """
    there = list_checkpoints(folder / "checkpoints")
    written = [*(folder / "checkpoints").rglob("*"), *folder.glob(f"{folder.name}*.safetensors")]
    needed = highest_bytes(config, shapes, len(there), StepSpan(done, total, per_epoch)) - _bytes(written)
    return Room(folder, max(0, needed), free_bytes(folder))


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
