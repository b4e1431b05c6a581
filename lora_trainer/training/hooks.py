"""What happens after each step, in this order: the processes agree on a fallback, metrics, a check of the weights,
validation, how much the weights changed, export, checkpoint, sample images, answers to requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, first_line
from lora_trainer.core.findings import counted
from lora_trainer.training.checkpoints.checkpoint import step_name
from lora_trainer.training.checkpoints.save import keep_weights, save, settle
from lora_trainer.training.guard import check_weights_are_finite
from lora_trainer.training.metrics import progress_of
from lora_trainer.training.oom_fallback import agree_across_processes
from lora_trainer.training.state import TrainState
from lora_trainer.training.training_run import Run, is_due, is_regular, lr_at
from lora_trainer.training.update_sizes import UpdateSizes
from lora_trainer.training.validation import validate

if TYPE_CHECKING:
    from lora_trainer.training.metrics import Metrics
    from lora_trainer.training.reporter import Reporter
    from lora_trainer.training.stopping import Stopping

Hook = Callable[[TrainState], TrainState]  # the state after a step -> the state after the hook


@dataclass(frozen=True)
class Due:
    """What is due after a step, by the settings or on request; the same in every process."""

    run: Run
    stopping: Stopping

    def requested(self, kind: str) -> bool:
        return kind in self.run.requests.due

    def validation(self, state: TrainState) -> bool:
        at_the_end = self.stopping.is_last(state) and not self.stopping.is_signalled
        return is_due(self.run.config.validation.every_n_steps, state.step) or at_the_end

    def export(self, state: TrainState) -> bool:
        section = self.run.config.checkpoint
        epochs = section.export_every_n_epochs * self.run.feed.plan.steps_per_epoch
        due = is_due(section.export_every_n_steps, state.step) or is_due(epochs, state.step)
        return due or self.requested("save")

    def samples(self, state: TrainState) -> bool:
        """Not after the last step: those are drawn with the exported file."""
        due = is_due(self.run.config.sample.every_n_steps, state.step) or self.requested("sample")
        return due and self.run.sample is not None and not self.stopping.is_last(state)

    def whole_weights(self, state: TrainState) -> bool:
        """Whether something that must be whole is made of the weights: they are checked before, and measured."""
        return self.checkpoint(state) or self.validation(state)

    def checkpoint(self, state: TrainState) -> bool:
        wanted = self.requested("save") or self.samples(state)
        return wanted or self.stopping.is_last(state) or is_regular(self.run, state.step)


def make_hooks(run: Run, stopping: Stopping, metrics: Metrics, reporter: Reporter) -> tuple[Hook, ...]:
    """The hooks of a run. Each raises TrainingFailed, Rollback or ProcessLost."""
    due, phase = Due(run, stopping), run.context.phase
    seconds_of_check = 0.0

    def agree_on_fallback(state: TrainState) -> TrainState:
        return replace(state, fit=agree_across_processes(run, state.fit, state.step, reporter))

    def read_metrics(state: TrainState) -> TrainState:
        weights_are_used = due.whole_weights(state) or due.export(state)
        with phase("metrics"):
            return metrics.flush(state) if weights_are_used or metrics.are_due(state) else state

    def check_weights(state: TrainState) -> TrainState:
        nonlocal seconds_of_check
        needed = due.whole_weights(state)
        seconds_of_check = check_weights_are_finite(run, state, reporter) if needed else 0.0
        return state

    def validation(state: TrainState) -> TrainState:
        if not due.validation(state):
            return state
        with phase("validation"):
            return validate(run, state, reporter)

    def export_weights(state: TrainState) -> TrainState:
        if due.export(state):
            with phase("checkpoint"):
                keep_weights(run, state.step)
        return state

    def checkpoint(state: TrainState) -> TrainState:
        if due.checkpoint(state):
            # Drawing samples has ended runs: before it, all is on a disk.
            last, wait = stopping.is_last(state), due.samples(state) or due.requested("save")
            with phase("checkpoint"):
                skipped = save(run, state, reporter.flush, last=last, wait=wait, held_up=seconds_of_check)
                for step in skipped:
                    message = (
                        f"the checkpoint of step {step} is skipped: the disk had not written it by step {state.step}"
                    )
                    reporter.event(state.step, "checkpoint", message)
        return state

    return (
        agree_on_fallback,
        read_metrics,
        check_weights,
        validation,
        export_weights,
        checkpoint,
        update_sizes_hook(run, due, reporter),
        *sample_hooks(run, due, reporter),
    )


def sample_hooks(run: Run, due: Due, reporter: Reporter) -> tuple[Hook, Hook]:
    """A hook that draws sample images, and one that answers the requests that were done after the step."""
    sample = run.sample
    not_drawn: str | None = None

    def draw_samples(state: TrainState) -> TrainState:
        nonlocal not_drawn
        if sample is not None and due.samples(state):
            reporter.progress(progress_of(run, state, lr_at(run, state, state.step), 0.0, "drawing"))
            with run.context.phase("samples"):
                not_drawn = sample(state)
        return state

    def answer_requests(state: TrainState) -> TrainState:
        if due.requested("save"):
            settle(run)  # a file that an answer names is there
        result = partial(result_of, run=run, due=due, state=state, not_drawn=not_drawn)
        for sentence in run.requests.answer(state.step, result):
            reporter.event(state.step, "request", sentence)
        return state

    return draw_samples, answer_requests


def result_of(kind: str, run: Run, due: Due, state: TrainState, not_drawn: str | None) -> str | Problem:
    """What became of a kind of request after this step; `not_drawn` is why its images are missing."""
    name = step_name(state.step)
    if kind == "prompts":
        return f"{counted(len(run.requests.prompts or ()), 'prompt')} for sample images from now on"
    if kind == "save":
        lora = "" if run.export is None else f" and weights/{run.folder.name}-{name}.safetensors"
        return f"saved checkpoints/{name}{lora}"
    if run.sample is None:
        return Problem("no_images_of_kind", f"No images can be generated with lora.type={run.config.lora.type}.")
    if due.stopping.is_last(state):
        return Problem("training_ends", "The training ends at this step.")
    return (
        f"generated samples/{name}.png" if not_drawn is None else Problem("no_images_drawn", f"No images: {not_drawn}.")
    )


def update_sizes_hook(run: Run, due: Due, reporter: Reporter) -> Hook:
    """A hook that shows how much the weights changed since its last time, where a tracker shows it.

    Where memory is short it shows nothing any more: nothing that was trained may depend on it.
    """
    weights = run.context.adapter.masters
    sizes: UpdateSizes | None = None
    if reporter.shows_update_sizes:
        with suppress(RuntimeError):
            sizes = UpdateSizes(weights)

    def update_sizes(state: TrainState) -> TrainState:
        nonlocal sizes
        if sizes is not None and due.whole_weights(state):
            try:
                reporter.update_sizes(state.step, sizes.measure(weights))
            except RuntimeError as error:
                sizes = None
                run.say(f"warning: how much weights change is not shown any more ({first_line(error)})")
        return state

    return update_sizes
