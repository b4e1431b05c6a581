"""What the loop needs: everything of a run that does not change from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.evaluation.evidence import RealImages
from lora_trainer.monitor.idle import IdleSetup
from lora_trainer.monitor.watches import Watches
from lora_trainer.optim.schedules import scheduled_lr
from lora_trainer.training.checkpoints.writer import Writer
from lora_trainer.training.control import is_stopped_early
from lora_trainer.training.requests import Requests
from lora_trainer.training.steering import Steering

if TYPE_CHECKING:
    from torch import Tensor

    from lora_trainer.config.schema import Config
    from lora_trainer.evaluation.validation_loss import ValidationLoss
    from lora_trainer.training.checkpoints.scratch import Scratch
    from lora_trainer.training.feed import Feed
    from lora_trainer.training.processes import Processes
    from lora_trainer.training.profiler import Profiler
    from lora_trainer.training.state import OomFallback, TrainState
    from lora_trainer.training.step import StepContext


def keep_all(step: int) -> None:
    pass


@dataclass(frozen=True)
class Run:
    """All that the loop needs."""

    config: Config
    folder: Path
    context: StepContext
    feed: Feed
    processes: Processes
    planned: OomFallback  # the planned micro-batch, checkpointed and swapped blocks
    total_steps: int
    validate: Callable[[int], ValidationLoss] | None  # samples in one forward pass -> losses
    sample: Callable[[TrainState], str | None] | None  # returns why there are no images, None where there are
    settings: dict[str, Any]  # kept in each checkpoint
    say: Callable[[str], None]  # print a line
    export: Callable[[int, Mapping[str, Tensor]], None] | None = (
        None  # write a LoRA file of a step's weights, never pruned
    )
    withdraw: Callable[[int], None] = keep_all  # delete the files that `export` wrote of steps later than this one
    setup: IdleSetup = field(default_factory=IdleSetup)  # what explains an idle GPU
    images: RealImages = field(
        default_factory=RealImages
    )  # what the LoRA is measured with; `validate` takes those that are not trained on
    steering: Steering = field(default_factory=Steering)
    requests: Requests = field(default_factory=Requests)  # of other processes, while it trains
    writer: Writer = field(default_factory=Writer)  # of checkpoints, in its own thread
    profiler: Profiler | None = None
    scratch: Scratch | None = None  # where checkpoints are written first, in the main process
    copier: Writer = field(default_factory=Writer)  # from there to the run's folder, in its own thread

    @cached_property
    def watches(self) -> Watches:
        """What watches the speed of the loop, and in the main process the machine."""
        every = self.config.run.system_every_seconds if self.processes.is_main else 0.0
        return Watches(self.context.device, setup=self.setup, every=every, processes=self.processes.world)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def lr_at(run: Run, state: TrainState, step: int) -> float:
    """The learning rate of `step`, counted from 0: the scheduled one, times the safeguards' factor."""
    if run.steering.lr is not None:
        return run.steering.lr(step) * state.rate_factor
    return scheduled_lr(run.config, step, run.total_steps, state.rate_factor)


def is_regular(run: Run, step: int, nth: int = 1) -> bool:
    """Whether a regular checkpoint is due after `step` steps: every `every_n_steps`, or every `every_n_epochs`.

    With `nth` only the n-th ones of either interval.
    """
    section, epochs = run.config.checkpoint, run.config.checkpoint.every_n_epochs
    ends_epochs = epochs is not None and step % (nth * epochs * run.feed.plan.steps_per_epoch) == 0
    return step > 0 and (step % (nth * section.every_n_steps) == 0 or ends_epochs)


def is_due(every: int, step: int) -> bool:
    """Whether something with the interval `every` is due after `step`; 0 is never."""
    return every > 0 and step % every == 0


def is_finished(run: Run, state: TrainState) -> bool:
    """Whether no step is left: all are trained, or early stopping ended the training."""
    return state.step >= run.total_steps or is_stopped_early(run.config.safeguards, state.control)


def is_unvalidated(run: Run, state: TrainState) -> bool:
    """Whether a validation of this step is due and not done, since a signal aborted it."""
    wanted = is_due(run.config.validation.every_n_steps, state.step) or state.step in (0, run.total_steps)
    return run.validate is not None and wanted and state.validated_step != state.step
