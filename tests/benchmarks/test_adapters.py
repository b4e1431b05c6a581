"""`bench adapters`: how the learning rate is chosen and losses are compared, and the command on a small base."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.benchmarks.bench_adapters import BASELINE, VARIANTS, compare_losses, find_learning_rate, loss_at
from lora_trainer.cli.main import main


@given(start=st.floats(1e-5, 1e-2), steps_away=st.integers(-3, 3))
def test_the_best_learning_rate_is_found_up_to_27_times_away(start, steps_away):
    optimum = start * 3.0**steps_away

    found = find_learning_rate(start, lambda rate: math.log(rate / optimum) ** 2)

    assert found == pytest.approx(optimum, rel=1e-6)


def test_no_more_learning_rates_are_tried_where_the_first_lies_between_two_worse_ones():
    tried = []
    find_learning_rate(1e-3, lambda rate: tried.append(rate) or abs(math.log(rate / 1e-3)))
    assert len(tried) == 3


def test_a_loss_between_two_validations_lies_on_the_line_between_them():
    curve = {0: 1.0, 10: 0.5, 20: 0.4}
    assert [loss_at(curve, step) for step in (0, 5, 10, 17.5, 20, 25)] == pytest.approx([1, 0.75, 0.5, 0.425, 0.4, 0.4])


def test_losses_are_compared_seed_by_seed():
    """Seeds differ far more than the two adapters do: the interval is of their differences."""
    base = [1.0, 2.0, 4.0]
    figures = compare_losses("change", [1.01, 2.02, 4.04], base)
    assert figures == pytest.approx({"change": 0.01, "change_low": 0.01, "change_high": 0.01})
    nothing = dict.fromkeys(("change", "change_low", "change_high"))
    assert compare_losses("change", base, base) == nothing
    assert compare_losses("change", [1.1], [1.0]) == nothing


@pytest.mark.slow
def test_each_adapter_is_timed_and_trained(tmp_path, capsys):
    arguments = ["--steps", "6", "--seeds", "2", "--filter", "dora", "--subject", "own", "--preset", "12gb"]
    assert main(["bench", "adapters", *arguments, "--json", "--set", f"cache.dir={tmp_path}"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(rows) == {BASELINE, *(name for name in VARIANTS if "dora" in name)}
    lora, dora = rows[BASELINE], rows["dora"]
    assert dora["parameters"] > lora["parameters"]
    assert dora["file_bytes"] > lora["file_bytes"] > 2 * lora["parameters"]
    assert lora["loss_change"] is None
    assert dora["loss_change_low"] <= dora["loss_change"] <= dora["loss_change_high"]


def test_an_adapter_that_is_none_is_refused(capsys):
    assert main(["bench", "adapters", "--filter", "nothing"]) == 2
    assert "There are: lora" in capsys.readouterr().err
