"""LR schedulers: functions of the step within [0, 1], continuous at the end of warmup."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.schema import LrSchedulerSection
from lora_trainer.optim.schedules import SHAPES, lr_multiplier, warmup_length


def shares_of(total: int, **settings: object) -> list[float]:
    config = LrSchedulerSection.model_validate(settings)
    return [lr_multiplier(config, step, total) for step in range(total)]


@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 500), st.integers(1, 6), st.floats(0.2, 4.0), st.data())
def test_learning_rates_stay_in_range_and_rise_during_warmup(name, total, cycles, power, data):
    warmup = data.draw(st.one_of(st.none(), st.integers(0, total)))
    settings = {"name": name, "warmup_steps": warmup, "cycles": cycles, "power": power}
    shares = shares_of(total, **settings)
    length = warmup_length(LrSchedulerSection.model_validate(settings), total)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert shares[0] > 0.0
    assert shares[:length] == sorted(shares[:length])
    # Both sides of the end of warmup are at the peak.
    assert all(share == pytest.approx(1.0) for share in shares[max(0, length - 1) : length + 1])
    if name != "cosine_with_restarts":
        assert shares[length:] == sorted(shares[length:], reverse=True)


@given(st.integers(2, 6), st.integers(20, 100))
def test_restarts_happen_as_often_as_set(cycles, length):
    shares = shares_of(cycles * length, name="cosine_with_restarts", cycles=cycles, warmup_steps=0)
    first = shares[:length]
    assert first == sorted(first, reverse=True)
    for start in range(0, cycles * length, length):
        assert shares[start : start + length] == pytest.approx(first, abs=1e-6)
    assert sum(later > earlier + 0.5 for earlier, later in pairwise(shares)) == cycles - 1


def test_schedules_have_the_expected_shape():
    def at(step: int, **settings: object) -> float:
        return lr_multiplier(LrSchedulerSection.model_validate({"warmup_steps": 10, **settings}), step, 100)

    assert at(99, name="constant_with_warmup") == 1.0
    assert at(55, name="linear") == pytest.approx(0.5)
    assert at(55, name="cosine") == pytest.approx(0.5)
    assert at(55, name="polynomial", power=3.0) == pytest.approx(0.125)
    assert at(55, name="one_cycle") == pytest.approx(0.5)
    assert at(4, name="one_cycle") == pytest.approx((1 + 1 / 25) / 2)
    assert at(4, name="linear") == pytest.approx(0.5)
    for name in ("cosine", "one_cycle", "cosine_with_restarts", "polynomial"):
        assert at(99, name=name) < 0.01
    assert at(99, name="linear") == pytest.approx(1 / 90)


@given(st.one_of(st.none(), st.integers(0, 1000)), st.integers(1, 1000), st.sampled_from(sorted(SHAPES)))
def test_warmup_is_three_percent_by_default_and_ten_for_one_cycle(settings, total, name):
    length = warmup_length(LrSchedulerSection(name=name, warmup_steps=settings), total)
    assert 0 <= length <= total
    if settings is None:
        share = 0.1 if name == "one_cycle" else 0.03
        assert share * total - 1e-9 <= length < share * total + 1
