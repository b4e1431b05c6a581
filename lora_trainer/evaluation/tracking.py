"""What is tracked while training beside the validation loss: the gain, and whether images fit their own captions.

**Gain** is the paired fall of the validation loss since before training, at the same noise, as the gate's `learned`; also in
three bands of noise. It costs nothing: both losses are measured anyway.

**Agreement** is how often an image's loss is lower with its own caption than with another image's, at the same noise (a
diffusion classifier, arXiv:2303.16203); chance is 0.5. Of other images' captions few are tried, so that it takes
about `SHARE` of the training: a trained sample costs about `PASSES_OF_A_SAMPLE` forward passes, so between two validations 100
steps of 4 samples cost 100 × 4 × 3 = 1,200, and agreement may take 36 more: 4 images with the 3 other captions at 2
timesteps take 24, 16 images with one other caption 32. The losses with the own caption are those of the validation loss.
With 100 steps of one sample it may take 9: the least, 4 images with one other caption, takes 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lora_trainer.data.split import FEWEST_COMPARED
from lora_trainer.diffusion.timesteps import stratified_timesteps
from lora_trainer.evaluation.validation_loss import EncodedSample, Improvement, ValidationLoss, improvement
from lora_trainer.evaluation.verdict import Estimate

BANDS = ("low", "mid", "high")  # of noise: thirds of the timesteps
SHARE = 0.03  # of a run's work
PASSES_OF_A_SAMPLE = 3  # measured on the built-in model: 3.7 with its share of the optimizer
COMPARED_AT = slice(-3, None, 2)  # of the timesteps: captions tell most where there is much noise (docs/scores.md)
TRIED_AT = 2  # so many timesteps

Item = TypeVar("Item")
# An image, and the other images whose captions it is tried with; all are places among the validation images.
Pairs = Sequence[tuple[int, tuple[int, ...]]]


def gain_by_noise(base: Tensor, lora: Tensor) -> dict[str, Improvement]:
    """`improvement` of losses [N, T] in each band of T timesteps that go from little noise to much."""
    count = base.shape[1]
    band = torch.tensor([len(BANDS) * (2 * index + 1) // (2 * count) for index in range(count)])
    there = {name: band == place for place, name in enumerate(BANDS) if bool((band == place).any())}
    return {name: improvement(base[:, own], lora[:, own]) for name, own in there.items()}


def plan_pairs(captions: Sequence[str], trained: int) -> Pairs:
    """Images and the others whose captions they are tried with, where `trained` samples are trained between two validations.

    Rather more images than more captions of each: images are what an interval is taken over. Empty where there are fewer
    than `FEWEST_COMPARED` images, or all captions are alike.
    """
    count = len(captions)
    if count < FEWEST_COMPARED or len(set(captions)) < 2:
        return ()
    passes = SHARE * PASSES_OF_A_SAMPLE * trained
    tries = max(FEWEST_COMPARED, int(passes / TRIED_AT))
    chosen, found = evenly(range(count), tries), []
    for place in chosen:
        after = [(place + step) % count for step in range(1, count)]
        others = list({captions[each]: each for each in after if captions[each] != captions[place]}.values())
        found.append((place, tuple(evenly(others, tries // len(chosen)))))
    return found


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items, evenly."""
    many = min(most, len(items))
    return [items[(2 * index + 1) * len(items) // (2 * many)] for index in range(many)]


def caption_margins(
    losses_of: Callable[[EncodedSample, Sequence[tuple[int, int]]], Tensor],
    samples: Sequence[EncodedSample],
    own: Tensor,
    pairs: Pairs,
    timesteps: int,
) -> Tensor:
    """By how much the loss is higher with each other caption, as a share [P, K] of that with the own; NaN where there is none.

    Shares are averaged over the timesteps, since losses of little noise are many times those of much.
    `losses_of` measures a sample at points (index and timestep) as it was done for `own` [N, T]; `timesteps` are the process's.
    """
    points = list(enumerate(stratified_timesteps(own.shape[1], timesteps)))[COMPARED_AT]
    margins = torch.full((len(pairs), max(len(others) for _, others in pairs)), math.nan)
    for row, (place, others) in enumerate(pairs):
        known = own[place, COMPARED_AT]
        for column, other in enumerate(others):
            tried = losses_of(replace(samples[place], cond=samples[other].cond), points)
            margins[row, column] = ((tried - known) / known).mean()
    return margins


def agreement_of(margins: Tensor) -> Estimate | None:
    """The share of margins [P, K] above 0, ties half, with its 95 % interval over images.

    A bootstrap would have no width where all images agree. None where a loss is not finite.
    """
    there = ~margins.isnan()
    if not bool(there.any(1).all()):
        return None
    wins = torch.where(there, (margins > 0) + 0.5 * (margins == 0), 0.0).sum(1) / there.sum(1)
    return Estimate.of_share(float(wins.double().mean()), len(wins))


def tracked_numbers(base: Sequence[Sequence[float]], found: ValidationLoss) -> dict[str, float]:
    """What `validation.jsonl` has of a validation beside its losses; `base` [N, T] are the losses before training, if known.

    Without what cannot be measured: no gain before training, no agreement where captions are not compared.
    """
    numbers: dict[str, float] = {}
    if base and found.losses is not None and bool(found.losses.isfinite().all()):
        before = torch.tensor(base)
        gain = improvement(before, found.losses)
        numbers |= {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}
        bands = gain_by_noise(before, found.losses)
        numbers |= {f"gain_at_{name}_noise": band.mean for name, band in bands.items()}
    if found.margins is not None and (share := agreement_of(found.margins)) is not None:
        numbers |= {"agreement": share.value, "agreement_low": share.low, "agreement_high": share.high}
    return numbers


def tracked_line(numbers: Mapping[str, float]) -> str:
    """`; 52 % lower than before training (48 to 55), caption agreement 0.92`, after a validation loss; empty without numbers."""
    parts = []
    if "gain" in numbers:
        gain, low, high = (100 * numbers[name] for name in ("gain", "gain_low", "gain_high"))
        if gain >= 0:
            parts.append(f"{gain:.0f} % lower than before training ({low:.0f} to {high:.0f})")
        else:
            parts.append(f"{-gain:.0f} % higher than before training ({-high:.0f} to {-low:.0f})")
    if "agreement" in numbers:
        parts.append(f"caption agreement {numbers['agreement']:.2f}")
    return f"; {', '.join(parts)}" if parts else ""
