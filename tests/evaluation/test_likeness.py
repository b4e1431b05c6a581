"""What captions have in common, and intervals by resampling, on numbers whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lora_trainer.evaluation.likeness import agreement, bootstrap, differ


def test_captions_agree_by_their_rare_words() -> None:
    found = agreement(["a red cat", "a red dog", "a blue dog", "a red cat"])
    assert found[0, 3] == pytest.approx(1.0)
    assert found[0, 2] == 0.0  # "a" is in all captions and counts nothing
    assert 0.0 < found[0, 1] < 1.0
    assert found == pytest.approx(found.T)


def test_captions_differ_by_their_words_alone() -> None:
    assert not differ(["a cat", "A cat."] * 2)
    assert not differ(["", ""])
    assert differ(["a cat", "a cat", "a dog"])


def test_an_interval_holds_the_mean_and_narrows_with_more_members() -> None:
    values = np.tile([0.0, 1.0], 50)
    few, many = (bootstrap(lambda rows: float(values[rows].mean()), count) for count in (10, 100))
    for found in (few, many):
        assert found.low < found.value == 0.5 < found.high
    assert many.high - many.low < few.high - few.low


def test_groups_of_the_same_size_are_resampled_alike() -> None:
    one, other = (bootstrap(lambda rows, by=by: by * float(rows.mean()), 12) for by in (1.0, 2.0))
    assert [2 * draw for draw in one.draws] == pytest.approx(list(other.draws))


def test_draws_in_which_nothing_is_defined_count_as_the_worst_and_the_best() -> None:
    """Every third draw lacks the member that the statistic needs, about."""
    found = bootstrap(lambda rows: float(rows.mean()) if 0 in rows else math.nan, 3)
    defined = [each for each in found.draws if math.isfinite(each)]
    assert (found.low, found.high) == (min(defined), max(defined))
    assert math.isnan(bootstrap(lambda rows: math.nan, 3).low)
    never = bootstrap(lambda rows: 1.0 if list(rows) == [0, 1, 2, 3, 4, 5, 6, 7] else math.nan, 8)
    assert (never.low, never.high) == (-math.inf, math.inf)
