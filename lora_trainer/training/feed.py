"""The training loop's data: the micro-batches of any step, and how often each sample was trained until a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lora_trainer.data.loader import CachedData, read_micro
from lora_trainer.data.sample_counts import SampleCounts, count_trained
from lora_trainer.data.steps import Ref, StepPlan, plan_steps, share, split_micros
from lora_trainer.training.micro_batch import MicroBatch, make_copier, make_micro_batch

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.training.processes import Processes
    from lora_trainer.training.step import StepContext

DECODED_AHEAD = 2  # steps


@dataclass(frozen=True)
class Feed:
    """`micros(step)` returns this process's micro-batches of a step, `groups(step)` the references in each of them,
    `sample_counts(steps)` how often so many steps trained each sample, `samples_in(step)` the samples of a step over all
    processes, `names(step)` the names of its images, by process, then by micro-batch.

    `close` ends threads and frees the VAE, where there are any; no micro-batch can be read afterwards.
    """

    plan: StepPlan
    data: CachedData
    micros: Callable[[int], list[MicroBatch]]
    groups: Callable[[int], tuple[tuple[Ref, ...], ...]]
    sample_counts: Callable[[int], SampleCounts]
    samples_in: Callable[[int], int]
    names: Callable[[int], list[str]]
    close: Callable[[], None]


def make_feed(
    config: Config, data: CachedData, context: StepContext, processes: Processes, micro: int, total: int
) -> Feed:
    """The feed of one process over `total` steps; `micro` is the largest micro-batch.

    A step's micro-batches depend only on the step, so steps may be read in any order. Those of a run whose passes are joined
    with others' are sorted by shape, so that each shape of a step is one pass.
    """
    seed = config.train.seed
    plan = plan_steps(data.samples, config.train.effective_batch_size, seed)
    copied = make_copier(context.device, context.dtype)

    def groups_of(refs: tuple[Ref, ...]) -> tuple[tuple[Ref, ...], ...]:
        groups = split_micros(refs, lambda ref: data.shape(ref, seed), micro)
        if not context.is_joined:
            return groups
        shapes = {group: data.shape(group[0], seed) for group in groups}
        return tuple(
            sorted(groups, key=lambda group: (shapes[group][0].height, shapes[group][0].width, shapes[group][1]))
        )

    def own_groups(step: int) -> tuple[tuple[Ref, ...], ...]:
        return groups_of(share(plan.refs(step), processes.rank, processes.world))

    def micros(step: int) -> list[MicroBatch]:
        groups = own_groups(step)
        idle: tuple[tuple[Ref, ...], ...] = ()  # one sample for each pass that another process takes more than this one
        if context.is_sharded:
            refs = plan.refs(step)
            passes = [len(groups_of(share(refs, rank, processes.world))) for rank in range(processes.world)]
            idle = (refs[:1],) * (max(passes) - len(groups))
        if data.fresh is not None:
            later = (own_groups(near) for near in range(step + 1, min(step + 1 + DECODED_AHEAD, total)))
            data.fresh.expect(ref for each in (groups, idle, *later) for group in each for ref in group)
        epoch = step // plan.steps_per_epoch
        batches = [read_micro(data, group, step, epoch, seed) for group in (*groups, *idle)]
        made = [make_micro_batch(batch, step, seed, config.noise, context.process) for batch in batches]
        without_weight = (
            replace(each, weights=torch.zeros_like(each.weights), is_idle=True) for each in made[len(groups) :]
        )
        return copied([*made[: len(groups)], *without_weight])

    def text_of(ref: Ref, step: int) -> str | None:
        number = data.text(ref, step, step // plan.steps_per_epoch, seed)
        return None if number is None else data.samples[ref.index].texts[number]

    def sample_counts(steps: int) -> SampleCounts:
        return count_trained(plan, steps, lambda ref: data.bucket(ref, seed), text_of)

    def names(step: int) -> list[str]:
        refs, world = plan.refs(step), processes.world
        shares = (groups_of(share(refs, rank, world)) for rank in range(world))
        return [data.samples[ref.index].path.name for groups in shares for group in groups for ref in group]

    def close() -> None:
        if data.fresh is not None:
            data.fresh.close()

    return Feed(plan, data, micros, own_groups, sample_counts, plan.size, names, close)
