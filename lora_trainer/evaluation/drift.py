"""How much a LoRA changes the model's predictions for prompts unrelated to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.diffusion.noise import position_noise
from lora_trainer.diffusion.timesteps import stratified_timesteps

if TYPE_CHECKING:
    from lora_trainer.diffusion.process import Process
    from lora_trainer.evaluation.validation_loss import Predict

VISITS = 10  # timesteps of a sampled image
NEUTRAL_PROMPTS = (
    "",
    "a red circle on a blue background",
    "a green square on a white background",
    "a photo of a house",
    "a photo of a tree in a field",
    "a portrait of a woman",
    "a bowl of fruit on a table",
    "a car on a road",
)


@dataclass(frozen=True)
class Visit:
    """A step of the base model's own sampling: latents [B, C, h, w] of B prompts at timestep t, and its prediction."""

    t: int
    latents: Tensor
    prediction: Tensor


@torch.no_grad()
def base_visits(
    predict: Predict,
    process: Process,
    cond: Mapping[str, Tensor],
    sizes: Tensor,
    shape: tuple[int, ...],
    *,
    steps: int = VISITS,
) -> list[Visit]:
    """The steps of the base model when it samples B prompts from fixed noise, each by `Process.parts`.

    `cond` and `sizes` hold B rows; `shape` is [C, h, w]. Latents of the model's own samples test it more fairly
    than noise on empty latents.
    """
    device, dtype = sizes.device, next(iter(cond.values())).dtype
    count = len(sizes)
    latents = torch.stack([position_noise(shape, 0, "drift", index) for index in range(count)]).to(device)
    points = [torch.full((count,), t, device=device) for t in stratified_timesteps(steps, process.timesteps)[::-1]]
    visits = []
    for t, after in zip(points, [*points[1:], None], strict=True):
        prediction = predict(latents.to(dtype), t, cond, sizes).float()
        visits.append(Visit(int(t[0]), latents, prediction))
        if after is not None:
            clean, noise = process.parts(latents, prediction, t)
            latents = process.add_noise(clean, noise, after)
    return visits


@torch.no_grad()
def drift(predict: Predict, visits: list[Visit], cond: Mapping[str, Tensor], sizes: Tensor) -> float:
    """Mean of ||with - without|| / ||without|| of the prediction over the visits and prompts.

    NaN when a prediction is not finite.
    """
    dtype = next(iter(cond.values())).dtype
    changes = []
    for visit in visits:
        t = torch.full((len(sizes),), visit.t, device=sizes.device)
        changed = predict(visit.latents.to(dtype), t, cond, sizes).float() - visit.prediction
        changes.append(changed.flatten(1).norm(dim=1) / visit.prediction.flatten(1).norm(dim=1).clamp_min(1e-12))
    return float(torch.stack(changes).mean())
