"""Validation loss at fixed noise, so that models are compared without chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.data.prompt_weights import plain_caption
from lora_trainer.diffusion.noise import position_noise
from lora_trainer.diffusion.timesteps import stratified_timesteps
from lora_trainer.evaluation.compute import ON_CPU, Compute
from lora_trainer.evaluation.likeness import Values, bootstrap

if TYPE_CHECKING:
    from lora_trainer.diffusion.loss import Weight
    from lora_trainer.diffusion.process import Process
    from lora_trainer.evaluation.verdict import Estimate
    from lora_trainer.models.family import Caption

# (noisy [B, C, h, w], t [B], conditioning, sizes [B, 6]) -> prediction [B, C, h, w]
Predict = Callable[[Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor]

MICRO = 4  # timesteps of one sample in a forward pass
FEWEST_TO_RESAMPLE = 4  # with fewer samples an interval over samples means nothing


@dataclass(frozen=True)
class EncodedSample:
    """One image and its caption as the denoiser sees them.

    `latents` [C, h, w] is the posterior's mean; `cond` holds the text encoder's tensors
    without the batch dimension, and is empty where it is encoded from `caption` each time; `sizes` [6] is original
    height and width, crop top and left, height and width, as SDXL wants them. `controls` are the latents [C, h, w] of its
    control images, which stay the image's own whatever caption it is compared under. `seen` are these control images
    themselves, pixels [3, H, W] in [-1, 1], where text encoders read them with the caption; `empty` is like `cond` that of
    the empty caption with them, where it is needed.
    """

    id: str
    latents: Tensor
    cond: Mapping[str, Tensor]
    sizes: Tensor
    caption: Caption = ""
    controls: Mapping[str, Tensor] = field(default_factory=dict)
    seen: tuple[Tensor, ...] = ()
    empty: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The caption, without weights."""
        return plain_caption(self.caption)


@dataclass(frozen=True)
class ValidationLoss:
    """Means over samples and timesteps: of the plain squared errors, and as the training loss weights timesteps.

    Plain ones compare runs of any `loss.weighting`. By the others a run chooses its best weights: of the plain mean most
    comes from the timesteps with little noise, which a weighting may count least. `losses` [N, T] are those that they are
    means of, and `margins` those of `evaluation/tracking.py`, where captions are compared.
    """

    plain: float
    weighted: float
    losses: Tensor | None = field(default=None, compare=False)
    margins: Tensor | None = field(default=None, compare=False)


def mean_losses(losses: Tensor, process: Process, weight: Weight | None) -> ValidationLoss:
    """The means of `validation_losses` [N, T]; `weight` is the training loss's, None where all timesteps count alike."""
    plain = float(losses.mean())
    if weight is None:
        return ValidationLoss(plain, plain, losses)
    points = torch.tensor(stratified_timesteps(losses.shape[1], process.timesteps), dtype=torch.long)
    weights = weight(points.to(process.alphas_cumprod.device)).cpu()
    return ValidationLoss(plain, float((losses * weights).mean() / weights.mean()), losses)


@torch.no_grad()
def validation_losses(
    predict: Predict,
    samples: Sequence[EncodedSample],
    process: Process,
    *,
    seed: int,
    timesteps: int = 8,
    compute: Compute = ON_CPU,
) -> Tensor:
    """Plain mean squared errors [N, T] in fp32 on the CPU: N samples at T stratified timesteps.

    The noise depends on (seed, sample, timestep's index) only, so two models, or one model at
    two steps of its training, are compared on the same inputs.
    """
    points = list(enumerate(stratified_timesteps(timesteps, process.timesteps)))
    losses = torch.zeros(len(samples), timesteps)
    for row, sample in enumerate(samples):
        losses[row] = losses_at(predict, process, sample, points, seed=seed, compute=compute)
    return losses


@torch.no_grad()
def losses_at(
    predict: Predict,
    process: Process,
    sample: EncodedSample,
    points: Sequence[tuple[int, int]],
    *,
    seed: int,
    compute: Compute = ON_CPU,
) -> Tensor:
    """Plain mean squared errors of one sample [P] in fp32 on the CPU at P points: indices of timesteps, and timesteps.

    The noise depends on (seed, sample, index) only.
    """
    device, dtype, micro = compute.device, compute.dtype, compute.at_once or MICRO
    losses = torch.zeros(len(points))
    for start in range(0, len(points), micro):
        some = points[start : start + micro]
        t = torch.tensor([each for _, each in some], dtype=torch.long, device=device)
        shape, count = tuple(sample.latents.shape), len(some)
        noise = torch.stack([position_noise(shape, seed, "validation", sample.id, index) for index, _ in some])
        noise = noise.to(device)
        latents = sample.latents.float().to(device).expand_as(noise)
        own = {**sample.cond, **sample.controls}
        cond = {name: value.to(device, dtype).expand(count, *value.shape) for name, value in own.items()}
        sizes = sample.sizes.to(device).expand(count, -1)
        noisy = process.add_noise(latents, noise, t)
        error = predict(noisy.to(dtype), t, cond, sizes).float() - process.target(latents, noise, t)
        losses[start : start + count] = error.square().flatten(1).mean(1).cpu()
    return losses


@dataclass(frozen=True)
class Improvement:
    """How much lower the loss is with the LoRA: shares of the base model's mean loss, with a 95 % interval."""

    base: float
    lora: float
    mean: float
    low: float
    high: float
    certainty: float  # share of bootstrap draws in which the LoRA is better
    over_samples: bool  # False: too few samples, so the interval covers noise and timesteps only


def gain_of(base: Tensor, lora: Tensor) -> Estimate:
    """By which share of the mean of `base` the losses `lora` are lower, both `validation_losses` [N, T] at the same noise.

    With bootstrap draws (Efron 1979) over samples; with fewer than four of them, over the N x T cells.
    """
    over_samples = len(base) >= FEWEST_TO_RESAMPLE
    before, after = ((each.mean(1) if over_samples else each.flatten()).double().numpy() for each in (base, lora))

    def statistic(places: Values) -> float:
        return float((before - after)[places].mean() / max(float(before[places].mean()), 1e-12))

    return bootstrap(statistic, len(before))


def improvement(base: Tensor, lora: Tensor) -> Improvement:
    """Paired comparison of two `validation_losses` [N, T], deterministic: `gain_of` and what it comes from."""
    gain = gain_of(base, lora)
    return Improvement(
        base=float(base.double().mean()),
        lora=float(lora.double().mean()),
        mean=gain.value,
        low=gain.low,
        high=gain.high,
        certainty=sum(draw > 0 for draw in gain.draws) / max(1, len(gain.draws)),
        over_samples=len(base) >= FEWEST_TO_RESAMPLE,
    )
