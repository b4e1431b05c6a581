"""Samples as latents: by the family's own prediction, without its pipeline and without decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.conditioning import controls_of
from lora_trainer.diffusion.noise import position_noise
from lora_trainer.diffusion.timesteps import few_step_timesteps, stratified_timesteps

if TYPE_CHECKING:
    from lora_trainer.diffusion.process import Process
    from lora_trainer.evaluation.validation_loss import Predict

Cond = Mapping[str, Tensor]


@dataclass(frozen=True)
class Request:
    """One sample: its conditioning [1, ...], latent shape [C, h, w], sizes [6] and seed.

    `negative` [1, ...] is its own in place of the sampler's, where text encoders read its control images.
    """

    cond: Cond
    shape: tuple[int, ...]
    sizes: Tensor
    seed: int
    negative: Cond | None = None


@dataclass(frozen=True)
class Sampler:
    """DDIM (arXiv:2010.02502, eta 0), or Euler along a flow, in `steps`; with classifier-free guidance
    (arXiv:2207.12598) where `negative`, the text embeddings of the empty caption, is there.

    `few`: at the timesteps of a model that was distilled for so many steps.
    """

    predict: Predict
    process: Process
    steps: int
    guidance: float = 1.0
    negative: Cond | None = None
    few: bool = False


@torch.no_grad()
def sample_latents(sampler: Sampler, requests: Sequence[Request], at_once: int = 1) -> list[Tensor]:
    """Latents [C, h, w] of each request, fp32 on the CPU; each from its seed's own noise, whatever is sampled with it."""
    found: list[Tensor | None] = [None] * len(requests)
    by_shape: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}
    for place, request in enumerate(requests):
        by_shape.setdefault((request.shape, tuple(controls_of(request.cond))), []).append(place)
    for (shape, _), places in by_shape.items():
        for start in range(0, len(places), at_once):
            chosen = places[start : start + at_once]
            for place, latents in zip(
                chosen, _sample(sampler, [requests[each] for each in chosen], shape), strict=True
            ):
                found[place] = latents
    return [latents for latents in found if latents is not None]


def _sample(sampler: Sampler, requests: Sequence[Request], shape: tuple[int, ...]) -> Tensor:
    """[B, C, h, w] of requests of one shape."""
    process, device = sampler.process, requests[0].sizes.device
    cond = {name: torch.cat([request.cond[name] for request in requests]) for name in requests[0].cond}
    sizes = torch.stack([request.sizes for request in requests])
    dtype, count = next(iter(cond.values())).dtype, len(requests)
    latents = torch.stack([position_noise(shape, request.seed, "verdict") for request in requests]).to(device)
    times = stratified_timesteps(sampler.steps, process.timesteps)[::-1]
    if sampler.few:
        times = few_step_timesteps(sampler.steps, process.times, process.timesteps, (shape[-2], shape[-1]))
    points = [torch.full((count,), t, device=device) for t in times]
    for t, after in zip(points, [*points[1:], None], strict=True):
        prediction = sampler.predict(latents.to(dtype), t, cond, sizes).float()
        if sampler.negative is not None and sampler.guidance != 1.0:
            own = [request.negative or sampler.negative for request in requests]
            empty = {name: torch.cat([each[name] for each in own]) for name in own[0]} | controls_of(cond)
            without = sampler.predict(latents.to(dtype), t, empty, sizes).float()
            prediction = without + sampler.guidance * (prediction - without)
        clean, noise = process.parts(latents, prediction, t)
        latents = clean if after is None else process.add_noise(clean, noise, after)
    return latents.cpu()
