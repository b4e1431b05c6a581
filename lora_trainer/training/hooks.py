"""What happens after each step, in this order: metrics, validation, export, checkpoint, sample images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lora_trainer.training.checkpoints.save import keep_weights, save
from lora_trainer.training.guard import check_weights_are_finite
from lora_trainer.training.metrics import Metrics
from lora_trainer.training.oom_fallback import agree_across_processes
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.run import Run, is_due, is_regular
from lora_trainer.training.state import TrainState
from lora_trainer.training.stopping import Stopping
from lora_trainer.training.validation import validate

Hook = Callable[[TrainState], TrainState]  # the state after a step -> the state after the hook


def make_hooks(run: Run, stopping: Stopping, metrics: Metrics, reporter: Reporter) -> tuple[Hook, ...]:
    """The hooks of a run. Each raises TrainingFailed, Rollback or ProcessLost."""
    config, sample = run.config, run.sample
    seconds_of_check = 0.0

    def is_validation_due(state: TrainState) -> bool:
        at_the_end = stopping.is_last(state) and not stopping.is_signalled
        return is_due(config.validation.every_n_steps, state.step) or at_the_end

    def is_export_due(state: TrainState) -> bool:
        return is_due(config.checkpoint.export_every_n_steps, state.step)

    def is_sample_due(state: TrainState) -> bool:
        return sample is not None and is_due(config.sample.every_n_steps, state.step) and not stopping.is_last(state)

    def is_checkpoint_due(state: TrainState) -> bool:
        return stopping.is_last(state) or is_sample_due(state) or is_regular(run, state.step)

    def agree_on_fallback(state: TrainState) -> TrainState:
        return replace(state, fit=agree_across_processes(run, state.fit, state.step, reporter))

    def read_metrics(state: TrainState) -> TrainState:
        stopping.decide(state)
        weights_are_used = is_checkpoint_due(state) or is_export_due(state) or is_validation_due(state)
        return metrics.flush(state) if weights_are_used or metrics.are_due(state) else state

    def check_weights(state: TrainState) -> TrainState:
        nonlocal seconds_of_check
        needed = is_checkpoint_due(state) or is_validation_due(state)
        seconds_of_check = check_weights_are_finite(run, state, reporter) if needed else 0.0
        return state

    def validation(state: TrainState) -> TrainState:
        return validate(run, state, reporter) if is_validation_due(state) else state

    def export_weights(state: TrainState) -> TrainState:
        if is_export_due(state):
            keep_weights(run, state.step)
        return state

    def checkpoint(state: TrainState) -> TrainState:
        if is_checkpoint_due(state):
            # Drawing samples has ended runs: before it, all is on the disk.
            wait = stopping.is_last(state) or is_sample_due(state)
            save(run, state, reporter.flush, last=wait, held_up=seconds_of_check)
        return state

    def draw_samples(state: TrainState) -> TrainState:
        if sample is not None and is_sample_due(state):
            sample(state)
        return state

    return agree_on_fallback, read_metrics, check_weights, validation, export_weights, checkpoint, draw_samples
