"""Validation loss uses the same forward passes each time; the comparison is paired."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

from lora_trainer.diffusion.loss import min_snr_weight
from lora_trainer.diffusion.process import Process, scaled_linear_alphas, usual_process
from lora_trainer.diffusion.timesteps import stratified_timesteps
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.drift import base_visits, drift
from lora_trainer.evaluation.validation_loss import (
    EncodedSample,
    ValidationLoss,
    improvement,
    mean_losses,
    validation_losses,
)

PROCESS = Process(scaled_linear_alphas(1000, 0.00085, 0.012), "epsilon")


def samples(count: int) -> list[EncodedSample]:
    return [
        EncodedSample(
            str(i), torch.full((4, 4 + i % 2, 6), float(i)), {"embeds": torch.full((3, 2), float(i))}, torch.zeros(6)
        )
        for i in range(count)
    ]


def zero(noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    assert noisy.shape[0] == len(t) == len(cond["embeds"]) == len(sizes)
    return torch.zeros_like(noisy)


def test_predicting_nothing_costs_the_noise_and_micro_batches_change_nothing() -> None:
    losses = validation_losses(zero, samples(3), PROCESS, seed=1, timesteps=8, compute=Compute(at_once=8))
    assert losses.shape == (3, 8)
    assert losses.mean() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(
        losses, validation_losses(zero, samples(3), PROCESS, seed=1, timesteps=8, compute=Compute(at_once=3))
    )
    assert not torch.equal(losses, validation_losses(zero, samples(3), PROCESS, seed=2, timesteps=8))


def test_the_loss_of_a_sample_does_not_depend_on_its_batch() -> None:
    together = validation_losses(zero, samples(3), PROCESS, seed=1)
    assert torch.equal(validation_losses(zero, samples(3)[2:], PROCESS, seed=1)[0], together[2])


def test_knowing_the_sample_gives_zero_loss() -> None:
    def oracle(noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
        alpha = PROCESS.alphas_cumprod[t].view(-1, 1, 1, 1)
        clean = cond["embeds"][:, 0, 0].view(-1, 1, 1, 1)
        return (noisy - alpha.sqrt() * clean) / (1 - alpha).sqrt()

    assert validation_losses(oracle, samples(3), PROCESS, seed=1).max() < 1e-5


def test_improvement_is_a_paired_comparison() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(12, 8, generator=generator) + 0.1
    better = improvement(base, base * 0.98)
    assert better.mean == pytest.approx(0.02, abs=1e-6)
    assert better.low > 0.019  # although the losses themselves differ tenfold
    assert better.certainty == 1.0
    assert better.over_samples
    worse = improvement(base, base * 1.02)
    assert worse.high < 0
    assert worse.certainty == 0.0
    luck = improvement(base, base + 0.1 * torch.randn(12, 8, generator=generator))
    assert luck.low < 0 < luck.high


def test_few_samples_are_reported() -> None:
    base = torch.rand(2, 32, generator=torch.Generator().manual_seed(0)) + 0.1
    few = improvement(base, base * 0.9)
    assert not few.over_samples
    assert few.low > 0


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "flow"])
def test_drift_is_the_relative_change_of_the_prediction(prediction: str) -> None:
    process = Process(PROCESS.alphas_cumprod, prediction)  # type: ignore[arg-type]
    cond, sizes = {"embeds": torch.zeros(3, 5, 2)}, torch.zeros(3, 6)

    def base(noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
        return 0.5 * noisy

    visits = base_visits(base, process, cond, sizes, (4, 4, 4), steps=5)
    assert [visit.t for visit in visits] == [900, 700, 500, 300, 100]
    assert all(visit.latents.isfinite().all() for visit in visits)
    assert drift(base, visits, cond, sizes) == 0.0
    assert drift(lambda *args: 1.1 * base(*args), visits, cond, sizes) == pytest.approx(0.1, abs=1e-5)


@pytest.mark.parametrize("process", [PROCESS, usual_process("v_prediction"), usual_process("flow")])
def test_sampling_towards_a_known_image_ends_at_it(process: Process) -> None:
    """With a perfect predictor for one image, DDIM ends at it, and so does Euler for a flow."""
    image = torch.linspace(-1, 1, 4 * 4 * 4).view(1, 4, 4, 4)

    def oracle(noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
        signal = process.add_noise(torch.ones_like(noisy), torch.zeros_like(noisy), t)
        spread = process.add_noise(torch.zeros_like(noisy), torch.ones_like(noisy), t)
        return process.target(image.expand_as(noisy), (noisy - signal * image) / spread, t)

    last = base_visits(oracle, process, {"embeds": torch.zeros(2, 1, 1)}, torch.zeros(2, 6), (4, 4, 4), steps=20)[-1]
    clean, _ = process.parts(last.latents, last.prediction, torch.tensor([last.t] * 2))
    assert torch.allclose(clean, image.expand(2, -1, -1, -1), atol=1e-4)


def test_the_weighted_mean_is_that_of_the_training_loss() -> None:
    """Its weights divided by their mean: where all timesteps count alike it is the plain one."""
    process = usual_process("epsilon")
    losses = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    assert mean_losses(losses, process, None) == ValidationLoss(float(losses.mean()), float(losses.mean()))
    found = mean_losses(losses, process, partial(min_snr_weight, process, gamma=5.0))
    points = torch.tensor(stratified_timesteps(8, 1000))
    weights = min_snr_weight(process, points, 5.0)
    assert found.plain == float(losses.mean())
    assert found.weighted == pytest.approx(float((losses * weights).sum() / weights.sum() / 3), rel=1e-5)
