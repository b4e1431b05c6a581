"""Whether the base model finds the captions of images more fitting than those of other images.

A diffusion model is a classifier (arXiv:2303.16203, eq. 5): of several captions the one with which it predicts the noise
of an image best suits the image. All captions are compared at the same noise, so that little of it is left in their
differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lora_trainer.diffusion.noise import position_noise
from lora_trainer.evaluation.likeness import Values, agreement, bootstrap
from lora_trainer.evaluation.prediction import in_batches, in_parts, rows_at_once

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lora_trainer.diffusion.process import Process
    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.validation_loss import EncodedSample, Predict
    from lora_trainer.evaluation.verdict import Estimate

# The noisier half of the schedule, where little but the caption says what the image shows. On the built-in base the own
# caption of zobo's images won 0.4 to 0.6 of the comparisons at single timesteps of the other half, and up to 0.9 in this one.
NOISE_LEVELS, LEAST_NOISE = 6, 0.5


def noisy_timesteps(timesteps: int) -> list[int]:
    """The middles of NOISE_LEVELS equal parts of the schedule from LEAST_NOISE on."""
    parts = (LEAST_NOISE + (1 - LEAST_NOISE) * (part + 0.5) / NOISE_LEVELS for part in range(NOISE_LEVELS))
    return [int(part * timesteps) for part in parts]


@torch.no_grad()
def caption_losses(
    predict: Predict,
    samples: Sequence[EncodedSample],
    captions: Sequence[int],
    process: Process,
    compute: Compute,
) -> Values:
    """Mean squared errors [N, K, T] of N samples with each of K captions at T timesteps (`noisy_timesteps`).

    `captions` are the places of the samples that have them. The noise depends on the sample and the timestep alone.
    Progress is counted in forward passes.
    """
    device, dtype = compute.device, compute.dtype
    cond = {
        name: torch.stack([samples[place].cond[name] for place in captions]).to(device, dtype)
        for name in samples[0].cond
    }
    points = noisy_timesteps(process.timesteps)
    losses = np.zeros((len(samples), len(captions), len(points)))
    for row, sample in enumerate(samples):
        latents = sample.latents.float().to(device)[None]
        sizes = sample.sizes.to(device).expand(len(captions), -1)
        own = {
            name: value.to(device, dtype).expand(len(captions), *value.shape) for name, value in sample.controls.items()
        }
        for column, point in enumerate(points):
            t = torch.full((1,), point, device=device)
            noise = position_noise(tuple(sample.latents.shape), 0, "agreement", sample.id, column)[None].to(device)
            noisy = process.add_noise(latents, noise, t).to(dtype).expand(len(captions), -1, -1, -1)
            found = in_parts(predict, noisy, t.expand(len(captions)), {**cond, **own}, sizes).float()
            error = (found - process.target(latents, noise, t)).square().flatten(1).mean(1)
            losses[row, :, column] = error.double().cpu().numpy()
    return losses


@dataclass(frozen=True)
class CaptionComparison:
    """What a caption is worth beside others, for N images.

    `own` [N]: the share of other captions that suit the image less than its own, each counting by how different its words
    are; NaN where none differs. `apart` [N]: the same of the caption that suits it most by one half of the timesteps, by the
    other half. `better` [N]: the place of the image whose caption suits it most beyond its own. `margin` [N]:
    by how much, in standard deviations of all fits times the difference of the words.
    """

    own: Values
    apart: Values
    better: Sequence[int]
    margin: Values


def compare_fits(losses: Values, captions: Sequence[int], texts: Sequence[str]) -> CaptionComparison:
    """From losses [N, K, T] of N images with K captions; `captions` are the places of images that have them.

    Each timestep counts alike, in units of its own spread. What an image has in common with all captions, and a caption
    with all images, is taken off: a caption that suits every image says nothing of one.
    """
    column = {texts[place]: number for number, place in enumerate(captions)}
    mine = np.array([column[text] for text in texts])
    rows = np.arange(len(texts))
    between = 1.0 - agreement(texts)[np.ix_(captions, captions)]
    fit = _fits(losses)
    ahead = (fit - fit[rows, mine][:, None]) * between[mine]
    halves = [_fits(losses[:, :, start::2]) for start in (0, 1)]
    apart = [preferred(one, other.argmax(axis=1), between) for one, other in (halves, halves[::-1])]
    return CaptionComparison(
        preferred(fit, mine, between),
        np.mean(apart, axis=0),
        [captions[each] for each in ahead.argmax(axis=1)],
        ahead.max(axis=1) / max(float(fit.std()), 1e-12),
    )


def _fits(losses: Values) -> Values:
    """How well captions suit images, [N, K], from losses [N, K, T]; more is better."""
    apart = losses - losses.mean(axis=1, keepdims=True)
    scaled = apart / np.maximum(np.sqrt(np.square(apart).mean(axis=(0, 1))), 1e-12)
    fit = -scaled.mean(axis=2)
    found: Values = fit - fit.mean(axis=0)
    return found


def preferred(fit: Values, chosen: NDArray[np.intp], between: Values) -> Values:
    """The share of other captions that suit an image less than the chosen one [N], weighted by `between` [K, K]: [N]."""
    weight = between[chosen]
    total = weight.sum(axis=1)
    won = ((fit[np.arange(len(fit)), chosen][:, None] > fit) * weight).sum(axis=1)
    found: Values = np.where(total > 0, won / np.maximum(total, 1e-12), np.nan)
    return found


def passes(samples: Sequence[EncodedSample], captions: int) -> int:
    """Forward passes of `caption_losses`."""
    return NOISE_LEVELS * sum(in_batches(captions, rows_at_once(sample.latents.shape[1:])) for sample in samples)


def mean_share(own: Sequence[float] | Values) -> Estimate:
    """The mean share of other captions that suit an image less than its own, with the interval over images."""
    known = np.array([value for value in own if np.isfinite(value)])
    return bootstrap(lambda places: float(known[places].mean()), len(known))
