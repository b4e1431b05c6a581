"""Fallbacks after memory ran out: smaller micro-batches, then more gradient checkpointing, then more block swap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lora_trainer.models.compiled import WITH_GRAPHS
from lora_trainer.models.memory.block_swap import swap_blocks, swappable_blocks
from lora_trainer.models.memory.checkpointing import checkpoint_blocks, checkpointable_blocks
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.run import Run
from lora_trainer.training.state import OomFallback, TrainState

AGREE_EVERY = 10  # steps between asking all processes what fits each of them


def reduce_memory(run: Run, fit: OomFallback, largest: int, step: int) -> OomFallback | None:
    """One fallback down from micro-batches of at most `largest`: half of it, then more blocks; None below the last.

    More blocks are checkpointed first: a block computed again costs less than one that is waited for.
    """
    failed = fit.failed + fit.grown
    if largest > 1:
        return replace(fit, micro=-(-largest // 2), since=step, grown=False, failed=failed)
    more = [count for count in checkpointing_fallbacks(run) if count > checkpointed(run, fit)]
    if more:
        return replace(fit, checkpointed=more[0], since=step, grown=False, failed=failed)
    visiting = [count for count in swap_fallbacks(run) if count > swapped(run, fit)]
    return replace(fit, swapped=visiting[0], since=step, grown=False, failed=failed) if visiting else None


def grow(run: Run, state: TrainState, reporter: Reporter) -> OomFallback:
    """One fallback up, which is logged, after enough steps in which memory sufficed; else the same."""
    fit = state.fit
    steps = state.step - fit.since
    waiting = run.config.memory.oom_recovery_steps * 2**fit.failed
    as_planned = (fit.micro, fit.checkpointed, fit.swapped) == (None, None, None)
    if not waiting or as_planned or steps < waiting:
        return fit
    up = replace(fit, since=state.step, grown=True)
    if fit.swapped is not None:
        fewer = [count for count in swap_fallbacks(run) if count < fit.swapped]
        up = replace(up, swapped=fewer[-1] if len(fewer) > 1 else None)
    elif fit.checkpointed is not None:
        fewer = [count for count in checkpointing_fallbacks(run) if count < fit.checkpointed]
        up = replace(up, checkpointed=fewer[-1] if len(fewer) > 1 else None)
    elif fit.micro is not None:
        micro = fit.micro * 2
        up = replace(up, micro=None if micro >= (run.planned.micro or 1) else micro)
    message = f"memory has sufficed for {steps} steps: trying {describe(run, up)} in place of {describe(run, fit)}"
    reporter.event(state.step + 1, "memory", message)
    return up


def checkpointing_fallbacks(run: Run) -> list[int]:
    """Numbers of checkpointed blocks: as planned, then twice as many but at least half of all, then all."""
    blocks, planned = len(checkpointable_blocks(run.context.denoiser)), run.planned.checkpointed or 0
    return sorted({planned, min(blocks, max(2 * planned, -(-blocks // 2))), blocks})


def swap_fallbacks(run: Run) -> list[int]:
    """Numbers of blocks that visit the GPU: as planned, then a quarter of all or twice as many, then half, then all.

    As planned on a CPU, where more would free nothing, where nothing is to visit, and with CUDA graphs.
    """
    planned, compiled = run.planned.swapped or 0, run.context.compiled
    frees_nothing = run.context.device.type == "cpu" and not planned
    held_in_place = compiled is not None and compiled.on and compiled.mode in WITH_GRAPHS
    if run.config.memory.blocks_to_swap == 0 or frees_nothing or held_in_place:
        return [planned]
    blocks = len(swappable_blocks(run.context.denoiser))
    more = {max(2 * planned, -(-blocks // 4)), max(2 * planned, -(-blocks // 2)), blocks}
    return sorted({planned, *(min(blocks, count) for count in more)})


def checkpointed(run: Run, fit: OomFallback) -> int:
    """How many blocks are: as planned, or more where memory ran out. A resumed run may be planned with more than that."""
    return max(run.planned.checkpointed or 0, fit.checkpointed or 0)


def swapped(run: Run, fit: OomFallback) -> int:
    """How many blocks visit, in the same way."""
    return max(run.planned.swapped or 0, fit.swapped or 0)


def install(run: Run, fit: OomFallback) -> None:
    """Checkpoint as many blocks as a fit says, let as many visit, and leave out compiled ones that failed."""
    if run.context.compiled is not None:
        run.context.compiled.on = not fit.eager
    checkpoint_blocks(run.context.denoiser, checkpointed(run, fit), run.config.memory.checkpointing_mode)
    swap_blocks(run.context.denoiser, swapped(run, fit), run.context.device)


def describe(run: Run, fit: OomFallback, given: Sequence[MicroBatch] = ()) -> str:
    """A fit as people read it; `given` are the micro-batches as they were, where that is known better."""
    largest = max((len(micro.t) for micro in given), default=fit.micro or run.planned.micro)
    visiting = f" and {count} streamed" if (count := swapped(run, fit)) else ""
    return f"micro-batches of {largest} with {checkpointed(run, fit)} blocks checkpointed{visiting}"


def agree_across_processes(run: Run, fit: OomFallback, step: int, reporter: Reporter) -> OomFallback:
    """The smallest fit of all processes, every so many steps: so a resumed run, which knows one, goes on with that.

    In between each process shrinks alone: gradients are summed at the end of the step.
    """
    if run.processes.reduce is None or step % AGREE_EVERY:
        return fit
    rows = torch.zeros(run.processes.world, 6, dtype=torch.float64)
    mine = [fit.micro or 0, checkpointed(run, fit), swapped(run, fit), fit.since, fit.grown, fit.failed]
    rows[run.processes.rank] = torch.tensor(mine, dtype=torch.float64)
    found = [[int(value) for value in row] for row in run.processes.sum_of_all(rows).tolist()]
    least = min(found, key=lambda row: (row[0] or float("inf"), -row[1], -row[2], row))
    micro, blocks, visiting, since, was_grown, failed = least
    together = replace(
        fit,
        micro=micro or None,
        checkpointed=None if blocks == (run.planned.checkpointed or 0) else blocks,
        swapped=None if visiting == (run.planned.swapped or 0) else visiting,
        since=since,
        grown=bool(was_grown),
        failed=failed,
    )
    if (together.micro, together.checkpointed, together.swapped) != (fit.micro, fit.checkpointed, fit.swapped):
        message = f"another process ran out of memory: all go on with {describe(run, together)}"
        reporter.event(step, "memory", f"{message} in place of {describe(run, fit)}")
        install(run, together)
    return together
