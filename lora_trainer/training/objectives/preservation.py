"""Output preservation (`loss.output_preservation_weight`): other prompts keep the base model's own predictions.

A LoRA is meant to act where its subject is asked for. In some steps the same noisy latents are predicted a second time, with a
prompt that is not about the subject, and the target is what the base model predicts for it without the LoRA. No images are
generated for it, and the target has no noise, unlike that of class images. ai-toolkit's "differential output preservation" is this
with the caption whose trigger word is replaced by a class; its "blank prompt preservation" is this with the empty prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.randomness import position_uniform
from lora_trainer.training.objectives.without_adapter import without_adapter

if TYPE_CHECKING:
    from lora_trainer.data.caches.entries import Store
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.step import StepContext

EMPTY_SHARE = 1 / 8  # of the preserved samples have the empty prompt, which guidance leans on
CLASS_SHARE = 0.5  # of the others have a caption with the class in place of the trigger word, where there is one

Places = Sequence[tuple[str, int]]  # sample id and occurrence of each sample of a micro-batch


@dataclass(frozen=True)
class PreservedPrompts:
    """Cache keys of the prompts whose output is kept: the empty one, those about the class, and general ones."""

    empty: str
    of_class: tuple[str, ...]
    general: tuple[str, ...]

    def key_at(self, seed: int, step: int, place: tuple[str, int]) -> str:
        """The prompt of one sample, drawn by its position in the run."""
        kind = position_uniform(seed, "preserved", step, *place)
        choice = position_uniform(seed, "preserved prompt", step, *place)
        if kind < EMPTY_SHARE:
            return self.empty
        is_about_class = kind < EMPTY_SHARE + CLASS_SHARE * (1 - EMPTY_SHARE)
        keys = self.of_class if is_about_class and self.of_class else self.general or self.of_class
        return keys[int(choice * len(keys))] if keys else self.empty


@dataclass(frozen=True)
class Preservation:
    """Adds the preserved samples to a step, every `every` steps, with losses that count `weight`."""

    weight: float
    every: int
    prompts: PreservedPrompts
    texts: Store
    seed: int

    @property
    def line(self) -> str:
        """For the log."""
        number = 1 + len(self.prompts.of_class) + len(self.prompts.general)
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        return f"output preservation: {number} other prompts, {steps}"

    def add_to(self, micros: list[MicroBatch], places: Sequence[Places], step: int) -> list[MicroBatch]:
        """The micro-batches of `step`, and behind them those that keep the base model's output: as many, of the same shapes."""
        if step % self.every:
            return micros
        preserved = []
        for micro, own_places in zip(micros, places, strict=True):
            texts = [self.texts.read(self.prompts.key_at(self.seed, step, place)) for place in own_places]
            cond = {name: torch.stack([entry[name] for entry in texts]) for name in texts[0]}
            weights = torch.full_like(micro.weights, 0.0 if micro.is_idle else self.weight)
            preserved.append(replace(micro, cond=cond, weights=weights, mask=None, keeps_base=True))
        return [*micros, *preserved]

    def applied_to(self, context: StepContext) -> StepContext:
        """The context whose steps have the preserved samples, with what the base model predicts for them as the target."""
        usual = context.target

        def target(context: StepContext, micro: MicroBatch, noisy: Tensor) -> Tensor:
            if not micro.keeps_base:
                return usual(context, micro, noisy)
            with torch.no_grad(), without_adapter(context.denoiser):
                return context.predict(context.denoiser, noisy, micro.t, micro.cond, micro.sizes).float()

        return replace(context, target=target, add_micros=self.add_to)
