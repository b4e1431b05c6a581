"""EMA: its arithmetic, and that reading it changes nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lora_trainer.adapters.averages import Average, decay_at
from lora_trainer.adapters.masters import make_adapter
from lora_trainer.config.schema import TrainSection
from lora_trainer.optim.schedules import first_swa_step


def shares_of_steps(decay, total_steps):
    """How much the initial weights, then each step's, count at the end of a run."""
    shares = [1.0]
    for step in range(total_steps):
        now = decay_at(decay, step)
        shares = [*(share * now for share in shares), 1.0 - now]
    return shares


@given(st.floats(0.1, 0.9999), st.integers(0, 20_000))
def test_the_ema_decay_rises_to_its_setting_and_averages_a_fifth_of_the_steps_so_far(decay, step):
    now, later = decay_at(decay, step), decay_at(decay, step + 1)
    assert 0.0 <= now <= later <= decay
    assert 1.0 / (1.0 - now) <= max(2.0, 0.2 * (step + 1)) * (1 + 1e-9)
    assert (decay_at(decay, 0), decay_at(decay, 200_000)) == (0.0, decay)


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("total_steps", [10, 30, 300, 1000])
def test_early_weights_hardly_count_at_the_end(decay, total_steps):
    """A constant 0.999 leaves 74 % of the initial weights, zeros, after 300 steps."""
    shares = shares_of_steps(decay, total_steps)
    assert sum(shares) == pytest.approx(1.0)
    assert shares[0] == 0.0
    assert sum(shares[: total_steps // 5 + 1]) < 0.02
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(shares))


def test_the_ema_follows_its_recursion():
    values, expected, masters = {"a": torch.zeros(3)}, 0.0, {"a": torch.zeros(3)}
    average = Average(values, TrainSection(ema_decay=0.6))
    for step in range(30):
        masters["a"].fill_(float(step))
        average.update(masters, step, 30)
        now = decay_at(0.6, step)
        expected = now * expected + (1 - now) * step
    assert average.values["a"].tolist() == pytest.approx([expected] * 3, rel=1e-6)


@settings(max_examples=30)
@given(st.integers(1, 60), st.one_of(st.floats(0.05, 0.95), st.integers(1, 50)), st.integers(1, 12))
def test_swa_is_the_mean_of_every_nth_weights_from_its_start(total, start, every):
    """Until the first of them it is the newest weights."""
    first = first_swa_step(TrainSection(swa_start=start), total)
    average = Average({"a": torch.zeros(2)}, TrainSection(swa_start=start, swa_every_n_steps=every))
    averaged: list[float] = []
    for step in range(total):
        value = float(step**2 % 17)
        average.update({"a": torch.full((2,), value, dtype=torch.bfloat16)}, step, total)
        if step >= first and (step - first + 1) % every == 0:
            averaged.append(value)
        expected = sum(averaged) / len(averaged) if averaged else value
        assert average.values["a"].tolist() == pytest.approx([expected] * 2, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_in_weights_are_temporary(dtype):
    adapter = make_adapter({"a": nn.Parameter(torch.randn(5)), "b": nn.Parameter(torch.randn(2, 3))}, dtype)
    masters = {name: master.detach().clone() for name, master in adapter.masters.items()}
    copies = {name: copy.detach().clone() for name, copy in adapter.copies.items()}
    other = {name: torch.full_like(master, 0.1) for name, master in masters.items()}

    def check_weights() -> None:
        with adapter.swapped_in(other):
            assert all(torch.equal(copy, other[name].to(dtype)) for name, copy in adapter.copies.items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_weights()
    assert all(torch.equal(adapter.masters[name], masters[name]) for name in masters)
    assert all(torch.equal(adapter.copies[name], copies[name]) for name in copies)
