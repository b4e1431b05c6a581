"""Noise as a function of position: the same sample at the same step gets the same noise.

Drawn on the CPU with Philox (Salmon et al., SC 2011), keyed by all 128 bits of the
position; torch's own CPU generator would drop the upper 32 bits of a seed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lora_trainer.core.randomness import position_key

Shape = tuple[int, ...]


def generator(seed: int, purpose: str, *position: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=position_key(seed, purpose, *position)))


def position_noise(shape: Shape, seed: int, purpose: str, *position: int | str) -> Tensor:
    """Standard normal noise of a shape, float32, on the CPU."""
    return normal(generator(seed, purpose, *position), shape)


def normal(source: np.random.Generator, shape: Shape) -> Tensor:
    return torch.from_numpy(source.standard_normal(shape, dtype=np.float32))


def training_noise(
    shape: Shape, seed: int, *position: int | str, offset: float, multires_iterations: int, multires_discount: float
) -> Tensor:
    """One sample's diffusion noise [C, h, w], with the options that shape it applied in turn.

    Multi-resolution noise comes last, since it scales the sum to unit spread: so does kohya's sd-scripts.
    """
    noise = position_noise(shape, seed, "noise", *position)
    if offset:
        noise = noise + offset * position_noise((shape[0], 1, 1), seed, "offset", *position)
    if multires_iterations:
        source = generator(seed, "multires", *position)
        noise = multires_noise(noise, source, multires_iterations, multires_discount)
    return noise


def perturbed(noise: Tensor, more: Tensor, strength: float) -> Tensor:
    """Noise [B, C, h, w] to mix into the latents, with `more` of the same shape added to it (arXiv:2301.11706, alg. 2).

    The target keeps the unperturbed noise: the model trains on inputs with errors like those of its own predictions.
    """
    return noise + strength * more


def multires_noise(noise: Tensor, source: np.random.Generator, iterations: int, discount: float) -> Tensor:
    """Coarser and coarser noise added to [C, h, w], then scaled back to unit spread.

    Each level is two to four times smaller than the last and weighs `discount` times as
    much (J. Whitaker, "Multi-Resolution Noise for Diffusion Model Training", 2023). Stops
    when a level has one row or column left.
    """
    channels, height, width = noise.shape
    level_height, level_width = float(height), float(width)
    total = noise
    for level in range(1, iterations + 1):
        shrink = 2.0 + 2.0 * source.random()
        level_height, level_width = max(1.0, level_height / shrink), max(1.0, level_width / shrink)
        coarse = normal(source, (1, channels, int(level_height), int(level_width)))
        total = total + discount**level * interpolate(coarse, (height, width), mode="bilinear")[0]
        if int(level_height) == 1 or int(level_width) == 1:
            break
    return total / total.std()
