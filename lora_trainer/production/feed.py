"""What the loop is fed with: the micro batches of any step, and what the steps until then have trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lora_trainer.config.schema import Config
from lora_trainer.data.ledger import Ledger, count_trained
from lora_trainer.data.loader import CachedData, read_micro
from lora_trainer.data.steps import Ref, StepPlan, plan_steps, share, split_micros
from lora_trainer.training.micro import Micro, make_micro
from lora_trainer.training.processes import Processes
from lora_trainer.training.step import Learner


@dataclass(frozen=True)
class Feed:
    """`micros(step)` gives this process's micro batches of a step, `ledger(steps)` what so many steps trained."""

    plan: StepPlan
    micros: Callable[[int], list[Micro]]
    ledger: Callable[[int], Ledger]


def make_feed(config: Config, data: CachedData, learner: Learner, processes: Processes, micro: int) -> Feed:
    """The feed of one process; `micro` is the largest micro batch. Both functions depend on nothing but the step."""
    seed = config.train.seed
    plan = plan_steps(data.samples, config.batch.effective, seed)

    def micros(step: int) -> list[Micro]:
        mine = share(plan.refs(step), processes.rank, processes.world)
        groups = split_micros(mine, lambda ref: data.bucket(ref, seed), micro)
        epoch = step // plan.steps_per_epoch
        batches = [read_micro(data, group, step, epoch, seed) for group in groups]
        made = [make_micro(batch, step, seed, config.noise, learner.process) for batch in batches]
        return [each.staged(learner.device, learner.dtype) for each in made]

    def text_of(ref: Ref, step: int) -> str | None:
        number = data.text(ref, step, step // plan.steps_per_epoch, seed)
        return None if number is None else data.samples[ref.index].texts[number]

    def ledger(steps: int) -> Ledger:
        return count_trained(plan, steps, lambda ref: data.bucket(ref, seed), text_of)

    return Feed(plan, micros, ledger)
