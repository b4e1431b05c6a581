from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.core.errors import UsageError
from lora_trainer.data.buckets import Bucket, fit_to, make_buckets, nearest_bucket, rank_buckets
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import Framing, plan_views

sides = st.integers(1, 8000)
settings_of_buckets = st.tuples(st.integers(64, 1536), st.sampled_from([8, 16, 32, 64]), st.floats(1.0, 8.0))


@given(settings_of_buckets)
def test_buckets_keep_area_step_and_aspect(chosen: tuple[int, int, float]) -> None:
    resolution, step, max_aspect = chosen
    buckets = make_buckets(resolution, step, max_aspect)
    square = resolution // step * step
    assert Bucket(square, square) in buckets
    assert len(set(buckets)) == len(buckets)
    for bucket in buckets:
        assert bucket.width * bucket.height <= resolution**2
        assert bucket.width % step == bucket.height % step == 0
        assert max(bucket.width, bucket.height) <= max_aspect * min(bucket.width, bucket.height)
        assert Bucket(bucket.height, bucket.width) in buckets


@given(sides, sides, settings_of_buckets)
def test_an_image_goes_to_the_nearest_aspect_ratio(width: int, height: int, chosen: tuple[int, int, float]) -> None:
    buckets = make_buckets(*chosen)

    def gap(bucket: Bucket) -> float:
        return abs(math.log(bucket.width / bucket.height) - math.log(width / height))

    assert gap(nearest_bucket(width, height, rank_buckets(buckets))) <= min(map(gap, buckets)) + 1e-8


@given(sides, sides, st.integers(1, 64), st.integers(1, 64))
def test_a_resized_image_covers_its_bucket_and_no_more_than_needed(
    width: int, height: int, across: int, down: int
) -> None:
    bucket = Bucket(across * 8, down * 8)
    fit = fit_to(width, height, bucket)
    assert 0 <= fit.left <= fit.resized_width - bucket.width
    assert 0 <= fit.top <= fit.resized_height - bucket.height
    assert fit.resized_width == bucket.width or fit.resized_height == bucket.height
    assert 0 < fit.kept <= 1


@given(st.lists(st.tuples(sides, sides), max_size=40), settings_of_buckets)
def test_every_sample_is_placed_once(sizes: list[tuple[int, int]], chosen: tuple[int, int, float]) -> None:
    samples = [Sample(Path(f"{n}.png"), "", width, height, str(n)) for n, (width, height) in enumerate(sizes)]
    plan = plan_views(samples, [Framing((chosen[0],), *chosen[1:])])
    assert len(plan.fits) == sum(plan.counts.values()) == len(samples)


def test_the_description_names_counts() -> None:
    samples = [
        Sample(Path("a"), "", 100, 100, "a"),
        Sample(Path("b"), "", 50, 50, "b"),
        Sample(Path("c"), "", 10, 20, "c"),
    ]
    assert plan_views(samples, [Framing((128,), 16)]).lines == ("buckets: 128x128 (2), 96x160 (1)",)


def test_a_resolution_below_the_step_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.resolution is 32.*64"):
        make_buckets(32, 64, 2.0)


def test_the_documented_buckets_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "buckets.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| ((?:\d+x\d+(?:, )?)+) \|$", page, re.MULTILINE))
    assert set(rows) == {"512", "768", "1024"}
    for resolution, buckets in rows.items():
        found = make_buckets(int(resolution), 64, 2.0)
        assert buckets.split(", ") == [str(bucket) for bucket in found if bucket.width >= bucket.height]
