"""The guidance-augmented target of a distilled model (`loss.guidance_target`).

A model whose guidance is distilled into its weights predicts what a guided model would: u + g (c - u), where c is the
prediction with the caption and u that with the empty one (arXiv:2210.03142). The usual target is that of c alone, so
plain training teaches such a model to guide less. Here the target is moved as far as guidance would move it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lora_trainer.core.conditioning import controls_of
from lora_trainer.training.objectives.without_adapter import without_adapter
from lora_trainer.training.step import plain_target

if TYPE_CHECKING:
    from lora_trainer.evaluation.validation_loss import Predict
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.step import StepContext

PredictWith = Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class GuidanceTarget:
    """`scale` is g; `cond` the text embeddings of the empty caption, each [1, ...], on the device."""

    scale: float
    cond: Mapping[str, Tensor]

    @torch.no_grad()
    def without_caption(
        self,
        predict: PredictWith,
        denoiser: nn.Module,
        inputs: tuple[Tensor, Tensor, Mapping[str, Tensor], Tensor],
    ) -> Tensor:
        """u [B, C, h, w] in fp32: the frozen model's prediction for the empty caption, without the LoRA.

        `inputs` are noisy latents, t, conditioning and sizes of the samples; their control images stay.
        """
        noisy, t, own, sizes = inputs
        empty = {name: value.expand(len(t), *value.shape[1:]) for name, value in self.cond.items()}
        with without_adapter(denoiser):
            return predict(denoiser, noisy, t, {**empty, **controls_of(own)}, sizes).float()

    def moved(self, context: StepContext, micro: MicroBatch, noisy: Tensor) -> Tensor:
        """The target u + g (target - u) [B, C, h, w]. Each sample's is its own, so a step may be split."""
        target = plain_target(context, micro, noisy)
        u = self.without_caption(context.predict, context.denoiser, (noisy, micro.t, micro.cond, micro.sizes))
        return u + self.scale * (target - u)

    def applied_to(self, context: StepContext) -> StepContext:
        """The context whose steps have this target, and whose validation losses are unguided."""
        return replace(context, target=self.moved, validated=self.unguided)

    def unguided(self, context: StepContext) -> Predict:
        """Predictions with the guidance divided out: u + (p - u) / g.

        Their error from the plain target is the training error divided by g, so that validation losses are those that
        training lowers, and of the size of any other model's.
        """
        predict, denoiser = context.predict, context.denoiser

        def predict_unguided(noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
            u = self.without_caption(predict, denoiser, (noisy, t, cond, sizes))
            return u + (predict(denoiser, noisy, t, cond, sizes).float() - u) / self.scale

        return predict_unguided


def make_guidance_target(
    scale: float, denoiser: nn.Module, cond: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> GuidanceTarget:
    """`cond` are the empty caption's text embeddings as they are cached, without the batch dimension."""
    # Masks stay on the CPU, as those of micro-batches do.
    placed = {name: value if value.dtype == torch.bool else value.to(device, dtype) for name, value in cond.items()}
    return GuidanceTarget(scale, {name: value[None] for name, value in placed.items()})
