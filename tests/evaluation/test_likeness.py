"""Measures of likeness on features whose answer is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lora_trainer.evaluation.evidence import Sides
from lora_trainer.evaluation.likeness import (
    Features,
    agreement,
    diversity,
    faithfulness,
    following,
    nearness,
    spoiling,
)
from lora_trainer.evaluation.lora_check import sample_parts
from lora_trainer.evaluation.verdict import Estimate

STEP = 2.0
BLOCKS = ("middle", "after")
SEEDS = st.integers(0, 2**32 - 1)


def line(count: int, aside: float) -> Features:
    """`count` images in a row, each `STEP` from the next, and `aside` from the row of real images."""
    places = torch.stack([STEP * torch.arange(count), torch.full((count,), aside)], dim=1)
    return {name: places * (1 + index) for index, name in enumerate(BLOCKS)}


def random_features(seed: int, count: int, width: int = 5) -> Features:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(count, width, generator=generator) for name in BLOCKS}


def value_of(measure: Estimate | None) -> float:
    assert measure is not None
    return measure.value


@given(st.integers(4, 12), st.floats(2 * STEP, 50.0))
@settings(max_examples=4)
def test_faithfulness_is_0_at_the_base_and_1_where_samples_are_as_near_as_real_images(count: int, far: float) -> None:
    real, base = line(count, 0.0), line(count, far)
    assert value_of(faithfulness(real, base, base)) == 0.0
    assert value_of(faithfulness(real, base, line(count, STEP))) == pytest.approx(1.0)
    assert value_of(faithfulness(real, base, line(count, (far + STEP) / 2))) == pytest.approx(0.5)


@given(st.integers(4, 12), st.floats(0.0, STEP))
@settings(max_examples=4)
def test_faithfulness_is_not_measured_where_the_base_is_as_near_as_real_images(count: int, near: float) -> None:
    assert faithfulness(line(count, 0.0), line(count, near), line(count, 0.0)) is None


@pytest.mark.parametrize(("count", "jitter"), [(6, 0.0), (20, 0.0), (6, 1e-3), (20, 1e-3)])
def test_copies_in_the_dataset_change_nothing(count: int, jitter: float) -> None:
    real, base, lora = line(count, 0.0), line(count, 9.0), line(count, STEP)
    twice = {name: torch.cat([images, images + jitter]) for name, images in real.items()}
    assert value_of(faithfulness(twice, base, lora)) == pytest.approx(1.0, abs=1e-2)
    assert value_of(nearness(twice, lora)) == pytest.approx(1.0, abs=1e-2)
    assert value_of(nearness(twice, real)) == pytest.approx(0.0, abs=1e-2), "copied samples are still found"


@given(SEEDS)
@settings(max_examples=5)
def test_a_block_that_sees_no_difference_leaves_faithfulness_as_it_is(seed: int) -> None:
    blind = random_features(seed, 36)["middle"]
    real, base, lora = (
        {**line(12, aside), "blind": blind[12 * place : 12 * place + 12]}
        for place, aside in enumerate((0.0, 40.0, STEP))
    )
    found = faithfulness(real, base, lora)
    assert found is not None
    assert 0.9 < found.low <= found.high < 1.1


@given(st.integers(4, 12))
@settings(max_examples=3)
def test_copies_are_nearest_and_equal_samples_least_diverse(count: int) -> None:
    real = line(count, 0.0)
    assert value_of(nearness(real, real)) == 0.0
    assert value_of(nearness(real, line(count, STEP))) == pytest.approx(1.0)
    assert value_of(diversity(real, line(count, 7.0))) == pytest.approx(1.0)
    same = {name: images[:1].expand(count, -1) for name, images in real.items()}
    assert value_of(diversity(real, same)) == 0.0
    assert nearness(same, real) is None
    assert diversity(same, real) is None


@given(SEEDS)
@settings(max_examples=4)
def test_spoiling_is_0_for_the_same_images_and_1_for_other_seeds(seed: int) -> None:
    base, other = random_features(seed, 8), random_features(seed + 1, 8)
    assert value_of(spoiling(base, other, base)) == 0.0
    assert value_of(spoiling(base, other, other)) == pytest.approx(1.0)
    assert spoiling(base, base, other) is None
    assert spoiling(base, {name: images * torch.nan for name, images in other.items()}, other) is None


def test_measures_of_samples_that_are_not_finite_are_nan() -> None:
    real, base = line(6, 0.0), line(6, 9.0)
    broken = {name: images * torch.nan for name, images in base.items()}
    for measure in (faithfulness(real, base, broken), nearness(real, broken), spoiling(base, real, broken)):
        assert np.isnan(value_of(measure))


def test_captions_agree_by_their_rare_words() -> None:
    found = agreement(["a red cat", "a red dog", "a blue dog", "a red cat"])
    assert found[0, 3] == pytest.approx(1.0)
    assert found[0, 2] == 0.0  # "a" is in all captions and counts nothing
    assert 0.0 < found[0, 1] < 1.0
    assert found == pytest.approx(found.T)


def test_samples_that_follow_captions_score_near_1_and_others_0() -> None:
    shown = torch.cat([torch.eye(4).repeat(3, 1), torch.eye(3).repeat_interleave(4, dim=0)], dim=1)

    def drawn(seed: int, what: Tensor) -> Features:
        return {name: what + 0.1 * value for name, value in random_features(seed, len(what), 7).items()}

    base, other, real, prompts = drawn(1, shown), drawn(2, shown), drawn(3, shown), range(12)
    assert value_of(following(real, base, other, drawn(4, shown), prompts)) == pytest.approx(1.0, abs=0.15)
    assert value_of(following(real, base, other, drawn(4, torch.zeros_like(shown)), prompts)) < 0.4
    shuffled = shown[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    assert value_of(following(drawn(3, shuffled), base, other, drawn(4, shown), prompts)) < 0.4, "wrong captions"
    none = drawn(5, torch.zeros_like(shown)), drawn(6, torch.zeros_like(shown))
    assert following(real, *none, drawn(4, shown), prompts) is None, "the base shows nothing of the captions"


def test_the_reason_says_why_nothing_is_compared() -> None:
    real, base, other, lora = (dict(random_features(seed, 8)) for seed in range(4))
    sides = Sides(tuple(range(8)), base, other, lora)
    captions = [f"a {color} {thing}" for color in ("red", "blue", "green", "gray") for thing in ("cat", "dog")]
    unlike = sample_parts(real, sides, captions)["follows_captions"]
    assert unlike.reason == "the base model's samples do not depend on these captions"
    alike = sample_parts(real, sides, ["a cat", "A cat."] * 4)["follows_captions"]
    assert alike.reason == "all captions are alike"
    doubled = {name: value.repeat(2, 1) for name, value in real.items()}
    parts = sample_parts(doubled, sides, captions)
    assert (parts["does_not_copy"].reason, parts["diverse"].reason) == ("", "")
    same = {name: value[:1].repeat(8, 1) for name, value in real.items()}
    assert sample_parts(same, sides, captions)["diverse"].reason == "the images are all the same"


def test_copies_on_the_one_caption_are_not_hidden_by_longer_prompts() -> None:
    """Every second sample has another background, and is no copy."""
    real, base, other, far = (dict(random_features(seed, 8)) for seed in range(4))
    places = tuple(place for pair in zip(range(8), (8, 9, 10, 11) * 2, strict=True) for place in pair)
    lora = {name: torch.stack([real[name], 2 * far[name]], dim=1).flatten(0, 1) for name in real}
    sides = Sides(places, *({name: value.repeat(2, 1) for name, value in each.items()} for each in (base, other)), lora)
    copied = sample_parts(real, sides, ["a cat"] * 8)["does_not_copy"]
    assert copied.outcome() == "refused"
    assert copied.scores[0] == pytest.approx(0.0)


MEASURES: dict[str, Callable[[Features, Features, Features], Estimate | None]] = {
    "faithfulness": faithfulness,
    "nearness": lambda real, _, lora: nearness(real, lora),
    "diversity": lambda real, _, lora: diversity(real, lora),
    "spoiling": lambda real, base, lora: spoiling(base, real, lora),
}


@pytest.mark.parametrize("name", MEASURES)
@given(seed=SEEDS, scale=st.floats(1e-2, 1e2))
@settings(max_examples=3)
def test_measures_depend_neither_on_the_scale_of_a_block_nor_on_the_order_of_images(
    name: str, seed: int, scale: float
) -> None:
    real, base, lora = (random_features(seed + index, 8) for index in range(3))
    base = {block: images + 9.0 for block, images in base.items()}
    measure = MEASURES[name]
    found = measure(real, base, lora)
    assert found is not None
    assert found.low <= found.value <= found.high

    def scaled(features: Features) -> Features:
        return {block: images * (scale if block == "after" else 1.0) for block, images in features.items()}

    def turned(features: Features) -> Features:
        return {block: images.flip(0) for block, images in features.items()}

    again = measure(scaled(real), scaled(base), scaled(lora))
    assert again is not None
    assert (again.value, again.low, again.high) == pytest.approx((found.value, found.low, found.high), rel=1e-4)
    assert value_of(measure(turned(real), turned(base), turned(lora))) == pytest.approx(found.value, rel=1e-4)
