"""Repeat a failed step with less memory, or without compiled blocks.

A repeated step has the same samples and the same noise: nothing but rounding changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from lora_trainer.core.errors import Problem, TrainingFailed, first_line, is_out_of_memory
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.randomness import position_key
from lora_trainer.models.compiled import Compiled, compiler_message
from lora_trainer.optim.schedules import momentum_at
from lora_trainer.training.compiling import WITHOUT, can_retry_without_compiling, refuse_graph_break
from lora_trainer.training.guard import with_guard
from lora_trainer.training.oom_fallback import describe, grow, install, reduce_memory
from lora_trainer.training.recovery import SMALLER_RUN, SMALLER_STATE, Rollback, WeightsLost, out_of_memory_error
from lora_trainer.training.step import (
    OomDuringAllReduce,
    OomDuringUpdate,
    StepResult,
    StepSettings,
    abort_step,
    changing_weights,
    train_step,
)

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.reporter import Reporter
    from lora_trainer.training.run import Run
    from lora_trainer.training.state import OomFallback, TrainState
    from lora_trainer.training.stopping import Stopping


@dataclass(frozen=True)
class Failure:
    """Why a step failed. Not the exception: its frames keep the memory that must be freed."""

    kind: type[Exception]
    reason: str
    of_compiler: bool = False


def refuse_alone(failure: Failure, step: int) -> None:
    """Raise TrainingFailed where the other processes of a sharded base are in the middle of the pass that failed here."""
    if failure.of_compiler:
        reason = f"Compiled blocks failed at step {step} ({failure.reason})"
        message = f"{reason}, and with memory.fsdp no process can repeat a pass alone."
        raise TrainingFailed(Problem("out_of_memory", message, "Set compile.enabled=false."))
    if failure.kind in (OomDuringUpdate, OomDuringAllReduce):
        return
    raise out_of_memory_error(f"at step {step}", failure.reason, is_sharded=True)


def step_with_fallbacks(
    run: Run,
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    lr: float,
    stopping: Stopping,
    reporter: Reporter,
) -> tuple[StepResult, OomFallback]:
    """The step after `state`, and the fallback that it fits with.

    Raises StepAborted for a signal, with nothing changed; Rollback where memory ran out while weights were changed;
    TrainingFailed where nothing is left to reduce.
    """
    context, samples = run.context, run.feed.samples_in(state.step)
    compiled, fit = context.compiled, grow(run, state, reporter)
    momentum = momentum_at(run.config, state.step, run.total_steps)
    settings = StepSettings(lr, state.step, momentum, state.control.clip_scale)
    is_changed = fit != state.fit
    with stopping.step(state) as gradients_are_there:
        context.joined.begin_step(state.step)
        while True:
            fitting = split_micro_batches(micro_batches, fit.micro)
            try:
                if is_changed:
                    install(run, fit)
                if compiled is not None:
                    compiled.begin_step()
                if run.config.lora.has_dropout:
                    # Seeded by position, as every other draw: no generator state to save, other masks in each process.
                    key = position_key(run.config.train.seed, "dropout", state.step, run.processes.rank)
                    torch.manual_seed(key % 2**32)
                guarded = with_guard(context, state)
                result = train_step(guarded, fitting, samples, settings, gradients_are_there)
                if context.average is not None:
                    with changing_weights(), context.phase("ema"):
                        context.average.update(context.adapter.masters, state.step, run.total_steps)
            except Exception as error:  # noqa: BLE001  raised again where no fallback helps
                failure = failure_of(error, compiled)
                if context.is_sharded:  # the others are in the middle of the pass that failed here
                    refuse_alone(failure, state.step + 1)
            else:
                if compiled is not None and compiled.on and (news := compiled.news()) is not None:
                    reporter.event(state.step + 1, "compile", news)
                return result, fit
            # Out here nothing refers to the frames of the failed step.
            abort_step(context)
            if compiled is not None and failure.of_compiler:
                compiled.on = False
                fit = replace(fit, eager=True)
                message = f"compiled blocks failed ({failure.reason}): {WITHOUT}; this step is repeated"
                reporter.event(state.step + 1, "compile", message)
            else:
                free_memory(context.device)
                fit, is_changed = with_less_memory(run, state, fit, fitting, failure, reporter), True


def split_micro_batches(micro_batches: Sequence[MicroBatch], most: int | None) -> list[MicroBatch]:
    """The same samples in the same order, in micro-batches of at most `most`; None keeps them as they are."""
    found = []
    for micro in micro_batches:
        count = len(micro.t)
        splits = -(-count // most) if most else 1
        bounds = [split * count // splits for split in range(splits + 1)]
        found += [micro] if splits <= 1 else [micro.part(start, end) for start, end in pairwise(bounds)]
    return found


def failure_of(error: Exception, compiled: Compiled | None) -> Failure:
    """The failure that a fallback can handle. Raises the error again where none can."""
    if compiled is not None and compiled.on and can_retry_without_compiling(error):
        refuse_graph_break(error, compiled)
        return Failure(type(error), compiler_message(error), of_compiler=True)
    if isinstance(error, OomDuringUpdate | OomDuringAllReduce) or is_out_of_memory(error):
        return Failure(type(error), first_line(error))
    raise error


def with_less_memory(
    run: Run,
    state: TrainState,
    fit: OomFallback,
    micro_batches: Sequence[MicroBatch],
    failure: Failure,
    reporter: Reporter,
) -> OomFallback:
    """The next fallback after memory ran out. Raises Rollback where weights are half changed, else TrainingFailed."""
    step, reason = state.step + 1, failure.reason
    if failure.kind is OomDuringAllReduce:
        message = f"Out of memory while gradients were summed or clipped, at step {step} ({reason})."
        raise TrainingFailed(Problem("out_of_memory", message, SMALLER_RUN))
    less = reduce_memory(run, fit, max((len(micro.t) for micro in micro_batches), default=1), state.step)
    if failure.kind is OomDuringUpdate and (run.processes.reduce is not None or less is None):
        message = f"Out of memory while the weights were changed, at step {step} ({reason})."
        raise WeightsLost(Problem("out_of_memory", message, SMALLER_STATE))
    if less is None:
        raise out_of_memory_error(f"at step {step}", reason)
    message = f"out of memory ({reason}): {describe(run, less)} in place of {describe(run, fit, micro_batches)}"
    if failure.kind is OomDuringUpdate:
        raise Rollback(state, "memory", message, fit=less)
    reporter.event(step, "memory", f"{message}; the step is repeated")
    return less
