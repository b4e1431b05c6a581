from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.optim.schedules import SHAPES, rate_share, warmup_length


@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 500), st.data())
def test_rates_stay_in_range_and_rise_through_the_warm_up(name, total, data):
    warmup = data.draw(st.integers(0, total))
    shares = [rate_share(name, step, total, warmup) for step in range(total)]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert shares[0] > 0.0
    assert shares[:warmup] == sorted(shares[:warmup])
    assert shares[warmup:] == sorted(shares[warmup:], reverse=True)


def test_shapes_end_where_they_should():
    assert rate_share("constant", 99, 100, 10) == 1.0
    assert rate_share("linear", 55, 100, 10) == pytest.approx(0.5)
    assert rate_share("cosine", 55, 100, 10) == pytest.approx(0.5)
    assert rate_share("cosine", 99, 100, 10) < 0.001


@given(st.one_of(st.none(), st.integers(0, 1000)), st.integers(1, 1000))
def test_warm_up_is_three_percent_unless_set(asked, total):
    length = warmup_length(asked, total)
    assert 0 <= length <= total
    if asked is None:
        assert length >= 0.03 * total - 1e-9
