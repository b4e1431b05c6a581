"""Whether a run's folder has room for what the run will write: found before the first step, not after the last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.config.schema import Config
from lora_trainer.core.disk import Patience, free_bytes, size_words
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.production.order import Order
from lora_trainer.production.plan import checkpoint_bytes, lora_bytes
from lora_trainer.training.checkpoints.checkpoint import kept, list_checkpoints

# Bytes beside the tensors' own: of a step in metrics.jsonl and TensorBoard's file, of a tensor in a file's header, of
# one that an optimizer keeps in a checkpoint's state, of a checkpoint's state, and of a LoRA file's header.
ROW, NAMED, STATE_OF, CHECKPOINT_HEAD, LORA_HEAD = 1000, 250, 100, 20_000, 8_000
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
        return Problem(message, "Free space there, name another disk with --output, or set checkpoint.keep_last lower.")


def patience_of(order: Order) -> Patience:
    """How a run meets a disk that refuses."""
    checkpoints = order.folder / "checkpoints"
    return Patience(order.config.checkpoint.wait_minutes, order.console.print, lambda: kept(checkpoints), order.folder)


def room_for(config: Config, folder: Path, shapes: Sequence[tuple[int, ...]], done: int, total: int) -> Room:
    """Room for the steps from `done` to `total` of an adapter of these shapes.

    Pictures are not counted: a full disk costs a run its pictures and no more.
    """
    there = list_checkpoints(folder / "checkpoints")
    written = [*(folder / "checkpoints").rglob("*"), *folder.glob(f"{folder.name}*.safetensors")]
    needed = highest_bytes(config, shapes, len(there), done, total) - _bytes(written)
    return Room(folder, max(0, needed), free_bytes(folder))


def highest_bytes(config: Config, shapes: Sequence[tuple[int, ...]], there: int, done: int, total: int) -> int:
    """The most that a run's folder holds at once, with `there` checkpoints in it at step `done`.

    Beside the last checkpoints stand the newest regular one and the one that is being written, which makes the oldest
    superfluous only when it is whole; and the best weights that each of them names, with those being written.
    """
    checkpoint, tensors, left = config.checkpoint, len(shapes), max(0, total - done)
    drawn = config.sample.every_steps  # it saves before it draws
    most = checkpoint.keep_last + (2 if checkpoint.keep_last == 1 or drawn % checkpoint.every_steps else 1)
    if checkpoint.every_epochs is None:
        beside = visits(drawn, done, total) if drawn % checkpoint.every_steps else 0
        most = min(most, there + visits(checkpoint.every_steps, done, total) + beside)
    values = sum(map(math.prod, shapes))
    best = min(most + 1, there + visits(config.validation.every_steps, done, total))
    kept = visits(checkpoint.weights_every_steps, done, total) if checkpoint.weights_every_steps else 0
    return (
        most * (checkpoint_bytes(config, shapes) + CHECKPOINT_HEAD + (5 * NAMED + 3 * STATE_OF) * tensors)
        + best * (4 * values + NAMED * tensors)
        + (lora_bytes(shapes) + 2 * LORA_HEAD + 4 * NAMED * tensors)
        + kept * (lora_bytes(shapes) // 2 + LORA_HEAD + 2 * NAMED * tensors)
        + left * ROW
    )


def visits(every: int, done: int, total: int) -> int:
    """How often something that happens every so many steps, and at the end, happens after step `done`."""
    if total <= done:
        return 0
    return 1 if every <= 0 else (total - 1) // every - done // every + 1


def refuse_without_room(room: Room) -> None:
    """Raise UsageError, with both numbers."""
    if room.problem is not None:
        raise UsageError(room.problem)


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
