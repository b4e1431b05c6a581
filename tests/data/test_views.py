"""The variants of an image, how they are cropped, and how often each is used."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lora_trainer.config.schema import DataSection, SourceSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.images.images import load_alpha, load_rgb
from lora_trainer.data.images.render import recolored, render, render_mask
from lora_trainer.data.sample import Sample
from lora_trainer.data.steps import plan_steps
from lora_trainer.data.views import Framing, View, framings_of, notes_on, plan_plain, plan_views, turn_of, views_of
from tests.data.conftest import noise_image

STEP = 32
sides = st.integers(1, 3000)


def sample_of(width: int, height: int, name: str = "a") -> Sample:
    return Sample(Path(f"{name}.png"), "", width, height, f"{ord(name[0]):064x}"[::-1])


samples = st.builds(sample_of, sides, sides, st.sampled_from("abc"))
framings = st.builds(
    Framing,
    resolutions=st.lists(st.integers(64, 1024), min_size=1, max_size=3, unique=True).map(
        lambda found: tuple(sorted(found, reverse=True))
    ),
    step=st.just(STEP),
    max_aspect=st.floats(1.0, 4.0),
    shortest=st.sampled_from([None, 64]),
    longest=st.sampled_from([None, 1024, 1200]),
    allow_upscale=st.booleans(),
    no_upscale=st.booleans(),
    crops=st.integers(1, 5),
    flip=st.booleans(),
    colors=st.integers(0, 4),
)


@given(samples, framings)
def test_every_variant_has_a_bucket_and_lies_inside_the_image(sample: Sample, framing: Framing) -> None:
    views = views_of(sample, framing)
    assert views
    for view in views:
        fit = view.fit
        assert fit.bucket.width % STEP == fit.bucket.height % STEP == 0
        assert STEP**2 <= fit.bucket.width * fit.bucket.height <= framing.resolutions[0] ** 2
        assert max(fit.bucket.width, fit.bucket.height) <= framing.max_aspect * min(fit.bucket.width, fit.bucket.height)
        assert max(fit.bucket.width, fit.bucket.height) <= (framing.longest or 10**6)
        assert min(fit.bucket.width, fit.bucket.height) >= (0 if framing.no_upscale else framing.shortest or 0)
        assert 0 <= fit.left <= fit.resized_width - fit.bucket.width
        assert 0 <= fit.top <= fit.resized_height - fit.bucket.height


@given(samples, framings)
def test_the_first_variant_is_unaugmented_and_the_only_one_of_validation_images(
    sample: Sample, framing: Framing
) -> None:
    first = views_of(sample, framing)[0]
    assert (first.flip, first.color) == (False, 0)
    assert first.fit.left == (first.fit.resized_width - first.fit.bucket.width) // 2
    assert first.fit.top == (first.fit.resized_height - first.fit.bucket.height) // 2
    assert plan_plain([sample], [framing]).views == ((first,),)


@given(st.integers(STEP, 3000), st.integers(STEP, 3000), framings)
def test_no_upscale_enlarges_nothing(width: int, height: int, framing: Framing) -> None:
    framing = Framing(framing.resolutions, STEP, framing.max_aspect, no_upscale=True, crops=framing.crops)
    for view in views_of(sample_of(width, height), framing):
        assert view.fit.scale_from(width, height) <= 1.0
        assert view.fit.resized_width <= width
        assert view.fit.resized_height <= height


@given(samples, framings)
def test_resolutions_that_upscale_are_skipped_if_another_fits(sample: Sample, framing: Framing) -> None:
    factors = [view.fit.scale_from(sample.width, sample.height) for view in views_of(sample, framing)]
    if framing.allow_upscale:
        distinct = {view.fit for view in views_of(sample, Framing(framing.resolutions, STEP, allow_upscale=True))}
        assert len(distinct) <= len(framing.resolutions)
    else:
        assert max(factors) <= 1.0 or len({round(factor, 6) for factor in factors}) == 1


@pytest.mark.parametrize(
    ("size", "settings", "expected"),
    [
        ((2000, 2000), {}, ["1024x1024", "768x768", "512x512"]),
        ((800, 800), {}, ["768x768", "512x512"]),
        ((300, 300), {}, ["512x512"]),
        ((300, 300), {"allow_upscale": True}, ["1024x1024", "768x768", "512x512"]),
        ((300, 300), {"no_upscale": True}, ["256x256"]),
        ((900, 200), {"no_upscale": True}, ["384x192"]),
        ((40, 300), {"no_upscale": True}, ["64x128"]),  # smaller than a step: an error of the gate
    ],
)
def test_each_image_is_trained_at_fitting_resolutions(size, settings, expected) -> None:
    views = views_of(sample_of(*size), Framing((1024, 768, 512), 64, **settings))
    assert [str(view.fit.bucket) for view in views] == expected


@given(st.integers(1, 6), st.booleans(), st.integers(0, 6))
def test_variants_cover_each_crop_both_flips_and_every_color(crops: int, flip: bool, colors: int) -> None:
    """On an image with room for each crop, so that no two are the same."""
    framing = Framing((256,), 64, crops=crops, flip=flip, colors=colors)
    views = views_of(sample_of(1001, 300), framing)
    assert len(set(views)) == len(views)
    assert len(views) < max(8, 1 + colors) + crops * (1 + flip)
    shares = [Counter((view.fit.left, view.flip) for view in views), Counter(view.flip for view in views)]
    assert all(max(share.values()) == min(share.values()) for share in shares)
    assert len(shares[0]) == crops * (1 + flip)
    by_color = Counter(view.color for view in views)
    assert set(by_color) == set(range(1 + colors))
    assert max(by_color.values()) - min(by_color.values()) <= max(1, len(views) // 8)


@given(
    st.integers(1, 9), st.integers(1, 30), st.integers(0, 2**40), st.lists(st.integers(1, 3), min_size=1, max_size=5)
)
def test_a_run_uses_all_variants_equally_often(count: int, steps: int, seed: int, repeats: list[int]) -> None:
    shown = [Sample(Path(str(n)), "", 64, 64, f"{n:064x}"[::-1], times) for n, times in enumerate(repeats)]
    plan = plan_steps(shown, 3, seed)
    used: dict[int, Counter[int]] = {index: Counter(range(count)) for index in range(len(shown))}
    for ref in (
        ref for epoch in range(steps) for step in range(plan.steps_per_epoch) for ref in whole(plan, epoch, step)
    ):
        used[ref.index][turn_of(ref, count, seed)] += 1
    assert all(max(turns.values()) - min(turns.values()) <= 1 for turns in used.values())


def whole(plan, epoch: int, step: int):
    return plan.refs(epoch * plan.steps_per_epoch + step)


@given(st.integers(64, 300), st.integers(64, 300), st.integers(0, 9), st.integers(0, 3))
def test_flipping_twice_is_the_identity(width: int, height: int, place: int, color: int) -> None:
    image = noise_image(width, height, 1)
    fit = views_of(sample_of(width, height), Framing((64,), STEP, crops=10))[place].fit
    mirrored = render(image, View(fit, True, color), "content")
    assert (mirrored[:, ::-1] == render(image, View(fit, False, color), "content")).all()
    assert View(fit).crop == (fit.top, fit.left)
    assert View(fit, flip=True).crop == (fit.top, fit.resized_width - fit.bucket.width - fit.left)


def test_the_reported_crop_is_that_of_the_flipped_image() -> None:
    image = noise_image(300, 100, 2)
    (_, view) = views_of(sample_of(300, 100), Framing((64,), 16, flip=True))
    mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    fit, (top, left) = view.fit, view.crop
    resized = mirrored.resize((fit.resized_width, fit.resized_height), Image.Resampling.LANCZOS)
    cut = resized.crop((left, top, left + fit.bucket.width, top + fit.bucket.height))
    assert np.abs(np.asarray(cut, dtype=int) - render(image, view, "content")).max() <= 1


def test_each_color_augmentation_is_mild() -> None:
    image = Image.new("RGB", (8, 8), (180, 120, 60))
    versions = [np.asarray(recolored(image, "content", number), dtype=int)[0, 0] for number in range(1, 9)]
    assert len({tuple(version) for version in versions}) > 4
    assert all(0 < np.abs(version - (180, 120, 60)).max() < 60 for version in versions)
    again = np.asarray(recolored(image, "content", 1), dtype=int)[0, 0]
    assert (again == versions[0]).all()


def test_a_mask_is_cropped_like_its_image_at_any_size() -> None:
    """A white square in a black image, and the same square in a mask of half the size."""
    pixels = np.zeros((240, 480, 3), dtype=np.uint8)
    pixels[40:120, 300:420] = 255
    mask = Image.fromarray(pixels[::2, ::2, 0])
    for view in views_of(sample_of(480, 240), Framing((128,), 16, max_aspect=1.5, crops=3, flip=True)):
        shown = render(Image.fromarray(pixels), view, "content")[:, :, 0].astype(int)
        assert np.abs(shown - render_mask(mask, view)).mean() < 6


def test_transparency_is_a_mask_and_the_image_lies_on_white(tmp_path: Path) -> None:
    pixels = np.full((60, 80, 4), (200, 10, 10, 255), dtype=np.uint8)
    pixels[:, :40, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    Image.fromarray(pixels[:, :, :3]).save(tmp_path / "whole.png")
    alpha = np.asarray(load_alpha(tmp_path / "clear.png"))
    assert (alpha[:, :40] == 0).all()
    assert (alpha[:, 40:] == 255).all()
    assert np.asarray(load_rgb(tmp_path / "clear.png"))[0, 0].tolist() == [255, 255, 255]
    assert (np.asarray(load_alpha(tmp_path / "whole.png")) == 255).all()


def test_settings_that_no_bucket_fits_are_reported_at_once() -> None:
    data = DataSection(bucket_step=48, bucket_min=600, resolutions=(512, 64))
    with pytest.raises(UsageError) as refused:
        framings_of(data, 512, 64)
    message = str(refused.value)
    assert "data.bucket_step is 48, no multiple of the model's step of 64 pixels. Set it to 64" in message
    assert "data.bucket_min is 600, more than the 480 px of a square at 512" in message
    with pytest.raises(UsageError, match=r"data\.bucket_max is 256, less than the 512 px of a square"):
        framings_of(DataSection(bucket_max=256), 512, 64)


@given(st.sampled_from([8, 16, 24, 32, 64]), st.lists(st.integers(8, 256), min_size=1, max_size=3))
def test_the_default_step_keeps_every_square_and_is_no_more_than_an_eighth(pixel_step: int, sides: list[int]) -> None:
    resolutions = tuple(max(pixel_step, side * 8) for side in sides)
    (framing,) = framings_of(DataSection(resolutions=resolutions), 512, pixel_step)
    assert framing.step % pixel_step == 0
    assert framing.step == pixel_step or framing.step <= min(64, min(resolutions) // 8)
    for side in resolutions:
        assert side // framing.step * framing.step == side // pixel_step * pixel_step


@pytest.mark.parametrize(
    ("resolutions", "pixel_step", "step"),
    [
        ((1024,), 16, 64),
        ((1024,), 32, 64),
        ((512,), 64, 64),
        ((512, 256), 16, 32),
        ((128,), 16, 16),
        ((1008,), 16, 16),
        ((1024,), 48, 48),
    ],
)
def test_buckets_of_a_transformer_are_as_few_as_those_of_a_unet(resolutions, pixel_step, step) -> None:
    (framing,) = framings_of(DataSection(resolutions=resolutions), 512, pixel_step)
    assert framing.step == step
    (chosen,) = framings_of(DataSection(resolutions=resolutions, bucket_step=2 * pixel_step), 512, pixel_step)
    assert chosen.step == 2 * pixel_step
    assert len(framing.buckets(1024)) <= 13 or step < 64


def test_a_resolution_between_two_bucket_steps_is_reported() -> None:
    (note,) = notes_on(framings_of(DataSection(resolution=500), 512, 64))
    assert note == "data.resolution 500 is no multiple of 64: squares are trained at 448 px"
    assert notes_on(framings_of(DataSection(), 512, 64)) == ()


def test_a_source_has_its_own_settings() -> None:
    own = SourceSection(path="b", resolutions=(256,), flip=True, color_variants=2, crop="random")
    data = DataSection(sources=(SourceSection(path="a"), own), resolutions=(512, 768), crop_variants=3)
    first, second = framings_of(data, 512, 64)
    assert (first.resolutions, first.crops, first.flip, first.colors) == ((768, 512), 1, False, 0)
    assert (second.resolutions, second.crops, second.flip, second.colors) == ((256,), 3, True, 2)
    shown = [sample_of(900, 900), Sample(Path("b"), "", 900, 900, "b" * 64, source=1)]
    plan = plan_views(shown, (first, second))
    assert [str(bucket) for bucket in sorted(plan.counts)] == ["256x256", "512x512", "768x768"]


def test_bucket_sides_are_bounded() -> None:
    framing = Framing((512,), 64, max_aspect=8.0, shortest=256, longest=1024)
    assert min(min(bucket.width, bucket.height) for bucket in framing.buckets(512)) == 256
    assert max(max(bucket.width, bucket.height) for bucket in framing.buckets(512)) == 1024
    bounded = [str(bucket) for bucket in Framing((512,), 64, longest=512).buckets(512)]
    assert bounded == [
        "256x512",
        "320x512",
        "384x512",
        "448x512",
        "512x256",
        "512x320",
        "512x384",
        "512x448",
        "512x512",
    ]
