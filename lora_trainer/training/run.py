"""What the loop is given: everything of a run that does not change from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from lora_trainer.config.schema import CheckpointSection, Config
from lora_trainer.monitor.watches import Watches
from lora_trainer.optim.schedules import lr_multiplier
from lora_trainer.training.checkpoints.writer import Writer
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.processes import Processes
from lora_trainer.training.state import OomFallback, TrainState
from lora_trainer.training.step import StepContext


def keep_all(step: int) -> None:
    pass


@dataclass(frozen=True)
class Run:
    """All that the loop needs. `micros(step)` gives this process's micro-batches of a step."""

    config: Config
    folder: Path
    context: StepContext
    processes: Processes
    planned: OomFallback  # the largest micro-batch and the checkpointed blocks, as they were chosen
    total_steps: int
    steps_per_epoch: int
    samples_in: Callable[[int], int]  # step -> samples over all processes
    names_in: Callable[[int], list[str]]  # step -> what people call its samples: process by process, micro by micro
    micros: Callable[[int], list[MicroBatch]]
    validate: Callable[[int], float] | None  # the validation loss, by so many questions at once
    sample: Callable[[TrainState], None] | None
    settings: dict[str, Any]  # kept in each checkpoint
    say: Callable[[str], None]  # a line for people
    export: Callable[[int, Mapping[str, Tensor]], None] | None = None  # a LoRA file of a step's weights, kept for good
    withdraw: Callable[[int], None] = keep_all  # delete the files that `export` wrote of steps later than this one
    writer: Writer = field(default_factory=Writer)  # of checkpoints, beside the loop

    @cached_property
    def watches(self) -> Watches:
        """Beside the loop."""
        return Watches(self.context.device, cached=self.config.cache.latents)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def lr_at(run: Run, state: TrainState, step: int) -> float:
    """The learning rate of `step`, counted from 0: the schedule's, times what the run itself made of it."""
    return (
        run.config.optimizer.learning_rate
        * state.rate_factor
        * lr_multiplier(run.config.lr_scheduler, step, run.total_steps)
    )


def is_regular(run: Run, step: int) -> bool:
    """Whether the run's own rhythm saves after `step` steps, by steps or by epochs."""
    return due_to_save(run.config.checkpoint, run.steps_per_epoch, step)


def due_to_save(section: CheckpointSection, steps_per_epoch: int, step: int) -> bool:
    """The rhythm of `checkpoint.every_n_steps` and `checkpoint.every_n_epochs`: either is enough."""
    epochs = section.every_n_epochs
    return step > 0 and (
        step % section.every_n_steps == 0 or (epochs is not None and step % (epochs * steps_per_epoch) == 0)
    )


def is_due(every: int, step: int) -> bool:
    """Whether something that happens every so many steps does after this one; `every` is 0 for never."""
    return every > 0 and step % every == 0


def is_unvalidated(run: Run, state: TrainState) -> bool:
    """Whether the weights of this step were to be validated and were not, since a signal aborted it."""
    wanted = is_due(run.config.validation.every_n_steps, state.step) or state.step in (0, run.total_steps)
    return run.validate is not None and wanted and state.validated_step != state.step
