"""Which images a LoRA is measured with: the same after training and by `validate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_trainer.data.sample import Sample
from lora_trainer.data.split import MOST_COMPARED
from lora_trainer.data.views import BucketPlan
from lora_trainer.run.inputs import measured_among
from lora_trainer.run.score_lora import Samples, measured_of


def samples(*contents: str, regularization: bool = False) -> list[Sample]:
    return [
        Sample(Path(f"{index}-{content}.png"), "a ring", 8, 8, content, regularization=regularization)
        for index, content in enumerate(contents)
    ]


def contents(kind: str, count: int) -> list[str]:
    """In another order than sorted."""
    return [f"{kind}{index * 11 % count:03}" for index in range(count)]


@pytest.mark.parametrize(("trained", "kept", "expected"), [(65, 0, 64), (60, 0, 60), (56, 16, 48), (10, 70, 0)])
def test_64_images_are_measured_the_validation_images_first(trained: int, kept: int, expected: int) -> None:
    train, validation = samples(*contents("t", trained)), samples(*contents("v", kept))
    chosen = measured_among(train, validation)
    assert chosen == sorted(set(chosen))
    assert sum(index < trained for index in chosen) == expected
    assert len(chosen) == min(MOST_COMPARED, trained + kept)


def test_copies_are_measured_once() -> None:
    """A copy would be the nearest other image, at distance 0."""
    train, validation = samples("b", "a", "b", "c", "a"), samples("y", "x", "x")
    assert measured_among(train, validation) == [0, 1, 3, 5, 6]
    assert measured_among(samples("b", "d", regularization=True) + train, validation) == [2, 3, 5, 7, 8]


def test_a_file_is_measured_with_the_images_that_its_run_measured() -> None:
    train, validation = samples(*contents("t", 60), *contents("t", 60)), samples(*contents("v", 16), "v000")
    by_run = [(*train, *validation)[index] for index in measured_among(train, validation)]
    mixed = (*train[:30], *validation, *train[30:])
    found = measured_of(
        Samples(mixed, BucketPlan(((),) * len(mixed)), frozenset(each.content for each in validation), "")
    )
    assert list(found.samples) == by_run
    assert len(found.plan.views) == len(by_run) == 64
