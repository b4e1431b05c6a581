"""EMA: its arithmetic, and that reading it changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lora_trainer.adapters.ema import Ema, decay_at
from lora_trainer.adapters.masters import make_adapter


@given(st.floats(0.5, 0.9999), st.integers(0, 10**6))
def test_the_ema_decay_warms_up_to_its_setting(decay, step):
    now, later = decay_at(decay, step), decay_at(decay, step + 1)
    assert 0.0 < now <= later <= decay
    assert decay_at(decay, 10**7) == decay


def test_the_ema_follows_its_recursion():
    values, expected, masters = {"a": torch.zeros(3)}, 0.0, {"a": torch.zeros(3)}
    average = Ema(values, 0.6)
    for step in range(30):
        masters["a"].fill_(float(step))
        average.update(masters, step)
        expected = decay_at(0.6, step) * expected + (1 - decay_at(0.6, step)) * step
    assert average.values["a"].tolist() == pytest.approx([expected] * 3, rel=1e-6)


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
