"""LR schedulers: functions of the step within [0, 1], continuous at the end of warmup."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.config.schema import Config, LrSchedulerSection
from lora_trainer.optim.optimizers import OPTIMIZERS
from lora_trainer.optim.schedules import (
    SHAPES,
    first_swa_step,
    lr_multiplier,
    momentum_at,
    scheduled_lr,
    warmup_length,
)


def shares_of(total: int, **values: object) -> list[float]:
    config = LrSchedulerSection.model_validate(values)
    return [lr_multiplier(config, step, total) for step in range(total)]


@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 500), st.integers(1, 6), st.floats(0.2, 4.0), st.data())
def test_learning_rates_stay_in_range_and_rise_during_warmup(name, total, cycles, power, data):
    warmup = data.draw(st.one_of(st.none(), st.integers(0, total)))
    values = {"name": name, "warmup_steps": warmup, "cycles": cycles, "power": power}
    shares = shares_of(total, **values)
    length = warmup_length(LrSchedulerSection.model_validate(values), total)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert shares[0] > 0.0
    assert shares[:length] == sorted(shares[:length])
    # Both sides of the end of warmup are at the peak; one_cycle's descent begins there, as torch's.
    end = length if name == "one_cycle" else length + 1
    assert all(share == pytest.approx(1.0) for share in shares[max(0, length - 1) : end])
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
    def at(step: int, **values: object) -> float:
        return lr_multiplier(LrSchedulerSection.model_validate({"warmup_steps": 10, **values}), step, 100)

    assert at(99, name="constant_with_warmup") == 1.0
    assert at(55, name="linear") == pytest.approx(0.5)
    assert at(55, name="cosine") == pytest.approx(0.5)
    assert at(55, name="polynomial", power=3.0) == pytest.approx(0.125)
    assert at(4, name="linear") == pytest.approx(0.5)
    for name in ("cosine", "one_cycle", "cosine_with_restarts", "polynomial"):
        assert at(99, name=name) < 0.01
    assert at(99, name="linear") == pytest.approx(1 / 90)


@settings(max_examples=30)
@given(st.integers(4, 60), st.floats(0.5, 0.85), st.floats(0.85, 0.99), st.data())
def test_one_cycle_and_its_momentum_are_torchs(total, base, most, data):
    """Learning rate and beta1 of every step equal those that OneCycleLR sets, for every length of the warm-up."""
    warmup = data.draw(st.integers(2, total - 2))
    config = LrSchedulerSection(
        name="one_cycle", warmup_steps=warmup, cycle_momentum=True, base_momentum=base, max_momentum=most
    )
    whole = Config(lr_scheduler=config)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=total, pct_start=warmup / total, base_momentum=base, max_momentum=most
    )
    for step in range(total):
        (group,) = optimizer.param_groups
        assert 1e-3 * lr_multiplier(config, step, total) == pytest.approx(group["lr"], rel=1e-9, abs=1e-12)
        assert momentum_at(whole, step, total) == pytest.approx(group["betas"][0], rel=1e-9)
        optimizer.step()
        if step < total - 1:
            theirs.step()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_momentum_stays_where_it_is_not_cycled(name):
    """As set; None for an optimizer without one that may change."""
    config = Config.model_validate({"optimizer": {"name": name, "beta1": 0.8}, "lr_scheduler": {"name": "one_cycle"}})
    expected = 0.8 if OPTIMIZERS[name].has_momentum else None
    assert {momentum_at(config, step, 20) for step in range(20)} == {expected}


@given(st.integers(1, 300), st.one_of(st.floats(0.01, 0.99), st.integers(1, 400)), st.booleans())
def test_the_learning_rate_and_momentum_are_constant_once_swa_starts(total, start, own):
    """As set for it, or that of the LR scheduler there; before, as without SWA. So is cycled momentum."""
    train: dict[str, object] = {"swa_start": start, "swa_learning_rate": 5e-5 if own else None}
    scheduler = {"name": "one_cycle", "cycle_momentum": True}
    plain = Config.model_validate({"lr_scheduler": scheduler})
    config = Config.model_validate({"lr_scheduler": scheduler, "train": train})
    first = first_swa_step(config.train, total)
    assert first == (start if isinstance(start, int) else round(start * total))
    for step in range(total):
        expected = scheduled_lr(plain, min(step, first), total, 0.5)
        assert scheduled_lr(config, step, total, 0.5) == (2.5e-5 if own and step >= first else expected)
        assert momentum_at(config, step, total) == momentum_at(plain, min(step, first), total)


@given(st.one_of(st.none(), st.integers(0, 1000)), st.integers(1, 1000), st.sampled_from(sorted(SHAPES)))
def test_warmup_is_three_percent_by_default_and_ten_for_one_cycle(steps, total, name):
    length = warmup_length(LrSchedulerSection(name=name, warmup_steps=steps), total)
    assert 0 <= length <= total
    if steps is None:
        share = 0.1 if name == "one_cycle" else 0.03
        assert share * total - 1e-9 <= length < share * total + 1
