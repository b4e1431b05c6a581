"""The judge on a drawn dataset: what it tells, where its limits lie, and images of which nothing can be said."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from lora_trainer import builtin
from lora_trainer.evaluation import judge as judging
from lora_trainer.evaluation.faults import FAULTS
from lora_trainer.evaluation.judge import (
    ASKED,
    LENIENT,
    MEASURES,
    OTHER,
    OTHER_WORDS,
    TOWARDS_OTHER,
    Judge,
    edge_strength,
    is_beyond,
    limits_between,
    same_place_distance,
    with_edge_strength,
)
from lora_trainer.evaluation.judge import Tested as JudgeTested
from lora_trainer.evaluation.looks import COLORS, SCALES, look_at

FUNGO = sorted((Path(__file__).resolve().parents[1] / "data_sets" / "fungo").glob("*.webp"))
COUNT = 16  # the first ones are the dataset, and the others are new images of the same subject


def drawn(number: int) -> tuple[Image.Image, str]:
    with Image.open(FUNGO[number]) as image:
        small = image.convert("RGB").resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS)
    return small, FUNGO[number].with_suffix(".txt").read_text("utf-8").strip()


@pytest.fixture(scope="module")
def judge() -> Judge:
    pairs = [drawn(number) for number in range(COUNT)]
    return Judge([image for image, _ in pairs], [caption for _, caption in pairs])


@pytest.fixture(scope="module")
def tested(judge: Judge) -> JudgeTested:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "MOST_PLANTED", 6)
        return judge.tested()


def passing(judge: Judge, tested: JudgeTested, part: str, images: Sequence[Image.Image]) -> int:
    return sum(not is_beyond(judge.measure(look_at(image)), tested.limits, ASKED[part]) for image in images)


def test_it_tells_lumps_blur_and_noise_and_passes_what_is_untouched(judge: Judge, tested: JudgeTested) -> None:
    assert all(tested.tells(fault) for fault in ("lump", "blurred", "noisy"))
    assert {part for part in ASKED if tested.is_measured(part)} >= {"shows", "whole"}
    assert set(tested.cannot_tell) == {fault.words for name, fault in FAULTS.items() if not tested.tells(name)}
    assert all(of == 6 for _, of in tested.found.values())
    assert all(of == COUNT for _, of in tested.untouched.values())


def test_new_images_of_the_subject_pass_and_faulty_ones_do_not(judge: Judge, tested: JudgeTested) -> None:
    new = [drawn(number)[0] for number in range(COUNT, COUNT + 6)]
    rng = random.Random(1)
    lumps, noisy = ([FAULTS[name].plant(image, new, rng) for image in new] for name in ("lump", "noisy"))
    assert passing(judge, tested, "shows", new) >= 5
    assert passing(judge, tested, "whole", new) >= 5
    assert passing(judge, tested, "shows", lumps) + passing(judge, tested, "whole", lumps) <= 2
    assert passing(judge, tested, "whole", noisy) <= 1


def test_an_image_of_the_dataset_is_its_own_copy(judge: Judge, tested: JudgeTested) -> None:
    own = judge.looks[0]
    assert judge.measure(own)["near"] > judge.measure(own, [0])["near"]
    assert "near" not in tested.limits or is_beyond(judge.measure(own), tested.limits, ASKED["is_new"])


def test_samples_that_are_not_finite_show_nothing_and_are_not_whole(judge: Judge, tested: JudgeTested) -> None:
    found = judge.measure(look_at(None))
    assert is_beyond(found, tested.limits, ASKED["shows"])
    assert is_beyond(found, tested.limits, ASKED["whole"])
    assert math.isnan(judge.suits(look_at(None), "fungo"))


def test_captions_suit_the_images_that_they_describe(judge: Judge) -> None:
    """A background of another color suits less."""
    right = [judge.suits(judge.looks[row], judge.captions[row], [row]) for row in range(COUNT)]
    wrong = [judge.suits(judge.looks[row], judge.captions[(row + 1) % COUNT], [row]) for row in range(COUNT)]
    assert sum(right) > sum(wrong)


def values(number: float, without: Sequence[str] = ()) -> dict[str, float]:
    return {name: number for name in MEASURES if name not in without}


def planted(number: float, **others: Mapping[str, float]) -> dict[str, list[dict[str, float]]]:
    return {name: [values(number) | dict(others.get(name, {}))] * 4 for name in FAULTS}


def test_a_limit_lies_between_untouched_images_and_the_nearest_faulty_ones() -> None:
    untouched = [values(0.0)] * 4
    assert limits_between(untouched, planted(1.0)) == pytest.approx(values(LENIENT, ["strange"]))
    blind = limits_between(untouched, planted(1.0, lump={"unlike": -1.0}))
    assert blind == pytest.approx(values(LENIENT, ["unlike"])), "the other measure of lumps is used"
    nearer = limits_between(untouched, planted(1.0, lump={"edge": 0.5}))
    assert nearer["edge"] == pytest.approx(0.5 * LENIENT)
    assert nearer["odd"] == pytest.approx(LENIENT)
    one_fault = limits_between(untouched, planted(1.0, lump={"edge": -2.0}))
    assert one_fault["edge"] == pytest.approx(LENIENT), "by the fault that it tells"


def test_other_things_are_found_where_lumps_are_not() -> None:
    """As of a subject of one plain form, whose lumps have the same colors at the same places."""
    untouched, plain = [values(0.0)] * 4, planted(1.0, lump={"unlike": -1.0})
    others = {OTHER: [values(-1.0)] + [values(2.0)] * 7}
    found = limits_between(untouched, {**plain, **others})
    assert found["unlike"] == pytest.approx(2.0 * TOWARDS_OTHER), "though one of them is like the dataset"
    assert found["strange"] == pytest.approx(2.0 * TOWARDS_OTHER), "the nearer of both limits"
    both = limits_between(untouched, {**planted(0.5), **others})
    assert both["unlike"] == pytest.approx(0.5 * LENIENT)
    assert "strange" not in both


def test_the_base_s_own_samples_of_other_prompts_are_other_things() -> None:
    pairs = [drawn(number) for number in range(6)]
    judge = Judge([image for image, _ in pairs], [caption for _, caption in pairs])
    assert OTHER not in judge.tested().found
    others = [look_at(Image.effect_noise((96, 96), 80.0 + number).convert("RGB")) for number in range(4)]
    tested = judge.tested(others)
    assert tested.found[OTHER] == (4, 4)
    assert OTHER_WORDS not in tested.cannot_tell
    blind = judge.tested(judge.looks)
    assert OTHER_WORDS in blind.cannot_tell


def test_a_measure_that_tells_nothing_has_no_limit() -> None:
    untouched = [values(0.0, ["foreign"])] * 4
    found = limits_between(untouched, planted(1.0, noisy={"grain": -1.0}, copied={"near": 0.0}))
    assert set(found) == set(MEASURES) - {"grain", "foreign", "strange"}
    assert found["near"] == pytest.approx(math.log(2.0)), "twice as near as untouched images ever are"
    without = [values(0.0) | {"near": -math.inf, "edge": math.inf}] * 4
    assert set(limits_between(without, planted(1.0))) == set(MEASURES) - {"near", "edge", "strange"}


def test_what_is_not_a_number_is_beyond_every_limit() -> None:
    limits = {"edge": 1.0}
    assert not is_beyond({"edge": 1.0}, limits, ["edge"])
    assert is_beyond({"edge": 1.1}, limits, ["edge"])
    assert is_beyond({"edge": math.nan}, limits, ["edge"])
    assert not is_beyond({"edge": 0.0, "grain": math.nan}, limits, ["edge", "grain"]), "grain has no limit"


def test_of_images_that_are_all_the_same_no_copy_is_found() -> None:
    tested = Judge([drawn(0)[0]] * 6, ["fungo"] * 6).tested()
    assert not tested.is_measured("is_new")
    assert not tested.is_measured("follows_captions")
    assert FAULTS["copied"].words in tested.cannot_tell


def test_of_images_of_one_color_no_form_is_seen() -> None:
    colors = [(40 * number, 90, 200 - 30 * number) for number in range(5)]
    tested = Judge([Image.new("RGB", (64, 64), color) for color in colors], [f"{each}" for each in colors]).tested()
    assert not any(tested.tells(name) for name in ("blurred", "mirrored", "melted"))
    assert "edge" not in tested.limits


def test_images_of_unlike_shapes_are_no_copies() -> None:
    one, other = look_at(Image.new("RGB", (96, 96), "red")), look_at(Image.new("RGB", (120, 72), "red"))
    assert same_place_distance(one, other) == math.inf
    assert same_place_distance(one, one) == 0.0
    ring = look_at(drawn(0)[0])
    assert math.isnan(same_place_distance(look_at(None), look_at(None)))
    assert same_place_distance(ring, ring) == 0.0


def test_an_encoder_measures_how_foreign_a_sample_is() -> None:
    """By a mean color, red is foreign to shades of blue."""

    def describe(image: Image.Image) -> torch.Tensor:
        color = torch.tensor(np.asarray(image, np.float32).mean((0, 1)))
        return torch.nn.functional.normalize(color, dim=0)

    blue = [Image.new("RGB", (64, 64), (20, 20 + 10 * number, 200)) for number in range(4)]
    judge = Judge(blue, ["blue"] * 4, describe)
    near, far = (
        judge.measure(look_at(Image.new("RGB", (64, 64), color), describe)) for color in ((20, 25, 200), (200, 20, 20))
    )
    assert near["foreign"] < 0.1 < 1.0 < far["foreign"]
    assert math.isnan(judge.measure(look_at(None, describe))["foreign"])


def test_bolder_edges_are_not_odd_and_melted_forms_are() -> None:
    """Guidance makes lines bolder than the dataset's: their forms are the same."""
    files = sorted((Path(builtin.__file__).parent / "pomo").glob("*.webp"))
    images = [Image.open(file).convert("RGB") for file in files]
    judge = Judge(images, [file.with_suffix(".txt").read_text("utf-8").strip() for file in files])
    limits, rng = judge.tested().limits, random.Random(1)

    def odd(change: Callable[[Image.Image], Image.Image]) -> float:
        values = [judge.measure(look_at(change(image)), [row]) for row, image in enumerate(images)]
        return sum(is_beyond(each, limits, ["odd"]) for each in values) / len(values)

    assert odd(lambda image: image.filter(ImageFilter.UnsharpMask(2, 100, 0))) <= 0.25
    assert odd(lambda image: FAULTS["melted"].plant(image, images, rng)) >= 0.75


@given(factor=st.floats(0.6, 1.6))
def test_edges_are_brought_to_one_strength(factor: float) -> None:
    look = look_at(drawn(0)[0])
    strengths = {scale: factor * edge_strength(look, scale) for scale in SCALES[1:]}
    brought = with_edge_strength(look, strengths)
    for scale, strength in strengths.items():
        assert edge_strength(brought, scale) == pytest.approx(strength, rel=1e-4)
        colors = 4 * COLORS
        same = (brought.patterns[scale].values[..., :colors], look.patterns[scale].values[..., :colors])
        assert torch.equal(*same)
