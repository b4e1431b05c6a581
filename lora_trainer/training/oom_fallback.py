"""Fallbacks after memory ran out: smaller micro-batches, then more gradient checkpointing, then more block swap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lora_trainer.models.compiled import WITH_GRAPHS
from lora_trainer.models.memory.block_swap import swap_blocks, swappable_blocks
from lora_trainer.models.memory.checkpointing import checkpoint_blocks, checkpointable_blocks

if TYPE_CHECKING:
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.reporter import Reporter
    from lora_trainer.training.run import Run
    from lora_trainer.training.state import OomFallback, TrainState

AGREE_EVERY = 10  # steps between two agreements of all processes


def reduce_memory(run: Run, fit: OomFallback, largest: int, step: int) -> OomFallback | None:
    """One fallback down from micro-batches of at most `largest`: halve it, then more blocks; None after the last.

    Checkpointing comes before block swap: to recompute a block costs less than to wait for it.
    """
    failed = fit.failed + fit.grown
    if largest > 1:
        return replace(fit, micro=-(-largest // 2), since=step, grown=False, failed=failed)
    more = [count for count in checkpointing_fallbacks(run) if count > checkpointed(run, fit)]
    if more:
        return replace(fit, checkpointed=more[0], since=step, grown=False, failed=failed)
    more = [count for count in swap_fallbacks(run) if count > swapped(run, fit)]
    return replace(fit, swapped=more[0], since=step, grown=False, failed=failed) if more else None


def grow(run: Run, state: TrainState, reporter: Reporter) -> OomFallback:
    """One fallback up, logged, after enough steps without running out of memory; else the same."""
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
    message = f"memory was enough for {steps} steps: trying {describe(run, up)} in place of {describe(run, fit)}"
    reporter.event(state.step + 1, "memory", message)
    return up


def checkpointing_fallbacks(run: Run) -> list[int]:
    """Numbers of checkpointed blocks: as planned, then twice as many but at least half of all, then all."""
    blocks, planned = len(checkpointable_blocks(run.context.denoiser)), run.planned.checkpointed or 0
    return sorted({planned, min(blocks, max(2 * planned, -(-blocks // 2))), blocks})


def swap_fallbacks(run: Run) -> list[int]:
    """Numbers of swapped blocks: as planned, then a quarter of all or twice as many, then half, then all.

    Only as planned on a CPU, where more would free nothing, where block swap is off, with CUDA graphs, and for a base that
    other runs train, too.
    """
    planned, compiled = run.planned.swapped or 0, run.context.compiled
    frees_nothing = run.context.device.type == "cpu" and not planned
    has_graphs = compiled is not None and compiled.on and compiled.mode in WITH_GRAPHS
    if run.config.memory.blocks_to_swap == 0 or frees_nothing or has_graphs or run.context.is_joined:
        return [planned]
    blocks = len(swappable_blocks(run.context.denoiser))
    more = {max(2 * planned, -(-blocks // 4)), max(2 * planned, -(-blocks // 2)), blocks}
    return sorted({planned, *(min(blocks, count) for count in more)})


def checkpointed(run: Run, fit: OomFallback) -> int:
    """Number of checkpointed blocks: as planned, or more after memory ran out. A resumed run may plan more."""
    return max(run.planned.checkpointed or 0, fit.checkpointed or 0)


def swapped(run: Run, fit: OomFallback) -> int:
    """Number of swapped blocks, likewise."""
    if run.context.is_joined:
        return run.planned.swapped or 0
    return max(run.planned.swapped or 0, fit.swapped or 0)


def install(run: Run, fit: OomFallback) -> None:
    """Apply a fallback to the denoiser: checkpointed and swapped blocks, and no compiled ones where they failed."""
    if run.context.compiled is not None:
        run.context.compiled.on = not fit.eager
    checkpoint_blocks(run.context.denoiser, checkpointed(run, fit), run.config.memory.checkpointing_mode)
    swap_blocks(run.context.denoiser, swapped(run, fit), run.context.device)


def describe(run: Run, fit: OomFallback, batches: Sequence[MicroBatch] = ()) -> str:
    """A fallback for a message; `batches` are the micro-batches that it made, where they are known."""
    largest = max((len(micro.t) for micro in batches), default=fit.micro or run.planned.micro)
    and_swapped = f" and {count} swapped" if (count := swapped(run, fit)) else ""
    return f"micro-batches of {largest} with {checkpointed(run, fit)} blocks checkpointed{and_swapped}"


def agree_across_processes(run: Run, fit: OomFallback, step: int, reporter: Reporter) -> OomFallback:
    """The smallest fallback of all processes, every `AGREE_EVERY` steps: a checkpoint holds only one.

    In between each process falls back alone: gradients are summed at the end of the step.
    """
    if run.processes.reduce is None or step % AGREE_EVERY:
        return fit
    rows = torch.zeros(run.processes.world, 6, dtype=torch.float64)
    mine = [fit.micro or 0, checkpointed(run, fit), swapped(run, fit), fit.since, fit.grown, fit.failed]
    rows[run.processes.rank] = torch.tensor(mine, dtype=torch.float64)
    found = [[int(value) for value in row] for row in run.processes.sum_of_all(rows).tolist()]
    least = min(found, key=lambda row: (row[0] or float("inf"), -row[1], -row[2], row))
    micro, blocks, swaps, since, was_grown, failed = least
    together = replace(
        fit,
        micro=micro or None,
        checkpointed=None if blocks == (run.planned.checkpointed or 0) else blocks,
        swapped=None if swaps == (run.planned.swapped or 0) else swaps,
        since=since,
        grown=bool(was_grown),
        failed=failed,
    )
    if (together.micro, together.checkpointed, together.swapped) != (fit.micro, fit.checkpointed, fit.swapped):
        message = f"another process ran out of memory: all continue with {describe(run, together)}"
        reporter.event(step, "memory", f"{message} in place of {describe(run, fit)}")
        install(run, together)
    return together
