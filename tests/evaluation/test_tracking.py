"""Gain and the agreement of captions on losses whose answer is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lora_trainer.data.split import FEWEST_COMPARED
from lora_trainer.diffusion.process import usual_process
from lora_trainer.evaluation.tracking import (
    PASSES_OF_A_SAMPLE,
    SHARE,
    TRIED_AT,
    agreement_of,
    caption_margins,
    gain_by_noise,
    plan_pairs,
    tracked_line,
    tracked_numbers,
)
from lora_trainer.evaluation.validation_loss import EncodedSample, ValidationLoss, losses_at, validation_losses

PROCESS = usual_process("epsilon")


def images(count: int) -> list[EncodedSample]:
    """Each is one value everywhere, and its caption names that value."""
    values = [float(index) / count for index in range(count)]
    return [
        EncodedSample(
            f"{value}", torch.full((4, 4, 4), value), {"says": torch.full((1,), value)}, torch.zeros(6), f"{value}"
        )
        for value in values
    ]


def believes(noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The noise, if the image were what the caption says."""
    alpha = PROCESS.alphas_cumprod[t].view(-1, 1, 1, 1)
    return (noisy - alpha.sqrt() * cond["says"].view(-1, 1, 1, 1)) / (1 - alpha).sqrt()


def margins_of(samples: list[EncodedSample]) -> Tensor:
    own = validation_losses(believes, samples, PROCESS, seed=1) + 1e-6
    measure = partial(losses_at, believes, PROCESS, seed=1)
    pairs = plan_pairs([str(sample.caption) for sample in samples], trained=1000)
    return caption_margins(measure, samples, own, pairs, PROCESS.timesteps)


def test_agreement_is_1_where_captions_are_believed_and_0_where_they_are_rotated() -> None:
    right = agreement_of(margins_of(images(5)))
    assert right is not None
    assert (right.value, right.high) == (1.0, 1.0)
    assert 0.5 < right.low < 0.6  # five images prove little, although all of them agree
    samples = images(5)
    rotated = [
        replace(sample, cond=other.cond, caption=other.caption)
        for sample, other in zip(samples, samples[1:] + samples[:1], strict=True)
    ]
    wrong = agreement_of(margins_of(rotated))
    assert wrong is not None
    assert wrong.value < 0.6


def test_agreement_of_noise_is_half_and_its_interval_narrows_with_images() -> None:
    draw = torch.Generator().manual_seed(0)
    found = [agreement_of(torch.randn(count, 1, generator=draw)) for count in (8, 400)]
    for each in found:
        assert each is not None
        assert each.low < 0.5 < each.high
    few, many = found
    assert few is not None
    assert many is not None
    assert many.high - many.low < 0.3 * (few.high - few.low)
    assert agreement_of(torch.full((4, 2), float("nan"))) is None


@given(st.integers(0, 20), st.integers(1, 5), st.integers(0, 1000))
@settings(max_examples=30)
def test_pairs_are_of_different_captions_and_within_what_is_allowed(count: int, kinds: int, trained: int) -> None:
    captions = [f"caption {index % kinds}" for index in range(count)]
    pairs = plan_pairs(captions, trained)
    if count < FEWEST_COMPARED or kinds == 1:
        assert not pairs
        return
    assert len(pairs) >= FEWEST_COMPARED
    assert len({place for place, _ in pairs}) == len(pairs)
    for place, others in pairs:
        said = [captions[other] for other in others]
        assert captions[place] not in said
        assert 1 <= len(said) == len(set(said))
    taken = TRIED_AT * sum(len(others) for _, others in pairs)
    assert taken <= max(SHARE * PASSES_OF_A_SAMPLE * trained, TRIED_AT * FEWEST_COMPARED)


def test_agreement_takes_few_forward_passes() -> None:
    """The arithmetic of the module's docstring: 100 steps of 4 samples and of one."""
    assert [len(others) for _, others in plan_pairs("abcd", 400)] == [3] * 4
    assert [len(others) for _, others in plan_pairs("abcdefghijklmnop", 400)] == [1] * 16
    assert [len(others) for _, others in plan_pairs("abcdefgh", 100)] == [1] * 4


def test_gain_in_a_band_is_of_its_timesteps() -> None:
    base = torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) + 0.1
    factor = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 1.25, 1.25, 1.25])
    bands = gain_by_noise(base, base * factor)
    assert [round(band.mean, 6) for band in bands.values()] == [0.0, 0.5, -0.25]
    assert list(gain_by_noise(base[:, :1], base[:, :1])) == ["mid"]


def test_what_is_tracked_of_a_validation() -> None:
    base = torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) + 0.1
    found = ValidationLoss(
        0.5, 0.5, base * 0.75, torch.tensor([[0.1, -0.1], [0.2, 0.3], [0.1, float("nan")], [0.1, 0.0]])
    )
    numbers = tracked_numbers(base.tolist(), found)
    assert numbers["gain"] == pytest.approx(0.25)
    assert numbers["gain_low"] == pytest.approx(numbers["gain_high"])
    assert numbers["gain_at_mid_noise"] == pytest.approx(0.25)
    assert numbers["agreement"] == pytest.approx((0.5 + 1 + 1 + 0.75) / 4)
    assert tracked_line(numbers) == "; 25 % lower than before training (25 to 25), caption agreement 0.81"
    assert set(tracked_numbers((), found)) == {"agreement", "agreement_low", "agreement_high"}
    rising = {"gain": -0.1, "gain_low": -0.12, "gain_high": -0.08}
    assert tracked_line(rising) == "; 10 % higher than before training (8 to 12)"
    assert tracked_line(tracked_numbers((), ValidationLoss(0.5, 0.5))) == ""
    assert not tracked_numbers(base.tolist(), ValidationLoss(0.5, 0.5, base * float("nan")))
