"""Curves and images of the report: robust to any data, without losing what matters."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lora_trainer.report import embedded_images
from lora_trainer.report.chart import (
    MOST_POINTS,
    ChartLine,
    Mark,
    linear_ticks,
    log_ticks,
    make_chart,
    short,
    smoothed,
    thinned,
    tick_labels,
)
from lora_trainer.report.read import format_setting

VALUES = st.lists(st.floats(width=32), min_size=1, max_size=60)
SENSIBLE = st.floats(1e-9, 1e9)


def over_steps(values: list[float]) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in enumerate(values, start=1)]


@given(VALUES, st.booleans(), st.booleans())
def test_any_numbers_make_a_chart_inside_its_frame(values: list[float], log: bool, from_zero: bool) -> None:
    points = over_steps(values)
    chart = make_chart("key", "Title", [ChartLine("line", points)], log=log, from_zero=from_zero)
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    assert (chart is None) == (not shown)
    if chart is not None:
        assert "nan" not in chart.lines[0].path
        assert len(chart.lines[0].points) == len(shown)
        places = [tick.place for tick in (*chart.x_ticks, *chart.y_ticks)]
        assert all(-0.5 <= place <= 1000.5 for place in places)


@given(st.integers(MOST_POINTS + 1, 5 * MOST_POINTS), st.integers(0, 2**32))
def test_thinning_keeps_the_ends_and_every_extreme(count: int, seed: int) -> None:
    random = Random(seed)
    values = [random.random() for _ in range(count)]
    points = over_steps(values)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {min(values), max(values)} <= {value for _, value in kept}
    assert list(kept) == sorted(kept)


@given(SENSIBLE, SENSIBLE)
def test_ticks_are_round_inside_and_distinct(one: float, other: float) -> None:
    low, high = sorted((one, other))
    high = max(high, low * 1.01)
    for ticks in (linear_ticks(low, high), log_ticks(low, high)):
        assert 1 <= len(ticks) <= 12
        room = 1e-6 * (high - low)
        assert all(low - room <= tick <= high + room for tick in ticks)
        labels = tick_labels(ticks)
        assert len(set(labels)) == len(ticks)
        for label, tick in zip(labels, ticks, strict=True):
            assert float(label.replace(",", "")) == pytest.approx(tick, rel=0.01, abs=room)


def test_a_gap_breaks_the_line_and_a_lone_point_is_a_dot() -> None:
    chart = make_chart("key", "Title", [ChartLine("line", over_steps([1.0, 2.0, math.nan, 3.0, math.inf, 4.0, 5.0]))])
    assert chart is not None
    assert chart.lines[0].path.count("M") == 2
    assert len(chart.lines[0].dots) == 1
    assert "lowest 1 at step 1, highest 5 at step 7" in chart.summary


def test_a_mark_outside_the_curve_is_skipped() -> None:
    marks = [Mark("in", (2.0, 2.0)), Mark("out", (9.0, 2.0))]
    chart = make_chart("key", "Title", [ChartLine("line", over_steps([1.0, 2.0, 3.0]))], marks=marks)
    assert chart is not None
    assert [(mark.name, mark.left, mark.top) for mark in chart.marks] == [("in", 500.0, 500.0)]


def test_the_smoothed_curve_starts_at_the_first_value_and_ends_at_a_constant() -> None:
    assert smoothed([(1.0, math.nan), (2.0, 3.0)])[1] == (2.0, 3.0)
    assert smoothed(over_steps([8.0] * 50))[-1][1] == pytest.approx(8.0)
    short_run = smoothed(over_steps([1.0, 0.0, 1.0, 0.0]))
    assert 0.2 < short_run[-1][1] < 0.6, "a curve of few steps is smoothed too"
    ramp = smoothed(over_steps([0.0] * 100 + [1.0] * 100))
    assert 0 < ramp[102][1] < 0.9 < ramp[-1][1] <= 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (0.0714, "0.0714"), (1.5e-5, "1.5e-5"), (2400.0, "2,400"), (11.46, "11.5"), (math.nan, "not finite")],
)
def test_numbers_are_readable(value: float, expected: str) -> None:
    assert short(value) == expected


def test_images_fit_the_size_limit_of_the_page(tmp_path: Path) -> None:
    random = Random(0)
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for path in paths:
        Image.frombytes("RGB", (300, 200), random.randbytes(300 * 200 * 3)).save(path)
    (tmp_path / "broken.png").write_bytes(b"no image")
    wanted = [*paths, tmp_path / "broken.png", tmp_path / "absent.png"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded_images, "BUDGET", 20_000)
        small = embedded_images.embedded(wanted)
    large = embedded_images.embedded(wanted)
    assert set(small) == set(large) == set(paths)
    sizes = [len(base64.b64decode(uri.partition(",")[2])) for uri in small.values()]
    assert sum(sizes) <= 20_000 < sum(map(len, large.values()))


def test_a_source_of_images_is_shown_by_what_is_set_of_it() -> None:
    source = {"path": "images/cat", "repeats": 2.0, "is_reg": False, "masks": None, "control_images": []}
    assert format_setting([source, {"path": "more"}]) == "path=images/cat repeats=2, path=more"
    assert format_setting({}) == "not set"
