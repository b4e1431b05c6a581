"""The parts that are counted in samples: their intervals, and what is counted, on looks whose measures are given."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest
import torch
from PIL import Image, ImageDraw

from lora_trainer.evaluation.judge import Judge
from lora_trainer.evaluation.judge import Tested as JudgeTested
from lora_trainer.evaluation.looks import Look, look_at
from lora_trainer.evaluation.sample_rates import (
    LEVEL,
    PARTS_COUNTED,
    DrawnSample,
    Unrelated,
    away_part,
    kept_part,
    rate_of,
    subject_parts,
)
from lora_trainer.evaluation.verdict import SCALES, Estimate, VerdictPart

LIMITS = {"unlike": 2.0, "grain": 2.0, "near": 0.5}
UNTOUCHED = {"shows": (8, 8), "whole": (8, 8), "is_new": (8, 8), "follows_captions": (8, 8)}
FOUND = {"copied": (8, 8)}
TESTED = JudgeTested(LIMITS, FOUND, UNTOUCHED)


class GivenJudge(Judge):
    """Its measures are the features of a look: how unlike the dataset it is, its grain, and how near it is to an image."""

    def __init__(self, captions: Sequence[str] = ("a cat", "a dog")) -> None:
        self.captions = list(captions)

    @property
    def has_encoder(self) -> bool:
        return False

    def measure(self, look: Look, without: Collection[int] = ()) -> dict[str, float]:
        assert look.features is not None
        return dict(zip(LIMITS, look.features.tolist(), strict=False))

    def suits(self, look: Look, caption: str, without: Collection[int] = ()) -> float:
        return 1.0 if caption == "a cat" else math.nan


def look_of(*measures: float) -> Look:
    return Look({}, 1.0, 1.0, torch.tensor(measures))


def sample(place: int, look: Look, prompt: str = "a cat") -> DrawnSample:
    return DrawnSample(prompt, place, 0, look)


def counts(part: VerdictPart) -> tuple[int | None, int | None]:
    assert part.measure is not None
    return part.measure.count, part.measure.of


def test_an_interval_is_wilsons_with_known_ends() -> None:
    half = Estimate.of_share(0.5, 10)
    assert (half.low, half.high) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    none = Estimate.of_share(0.0, 10)
    assert (none.low, none.high) == pytest.approx((0.0, 0.2775), abs=1e-4)
    whole = rate_of([True] * 12)
    assert (whole.value, whole.low, whole.high) == pytest.approx((1.0, 0.7575, 1.0), abs=1e-4)
    assert (whole.count, whole.of) == (12, 12)


def test_the_interval_is_wider_for_each_look_and_above_for_each_part() -> None:
    flags = [True] * 9 + [False] * 3
    one, four = rate_of(flags), rate_of(flags, 4)
    assert four.low < one.low < one.value == four.value == 0.75 < one.high < four.high
    assert one.low == Estimate.of_share(0.75, 12).low
    assert one.high == Estimate.of_share(0.75, 12, LEVEL / PARTS_COUNTED).high
    assert four.low == Estimate.of_share(0.75, 12, LEVEL / 4).low


@pytest.mark.parametrize("name", ["shows", "whole", "is_new"])
def test_twelve_samples_without_a_fault_pass_and_twelve_faulty_ones_are_refused(name: str) -> None:
    """In the first of four looks."""
    assert VerdictPart(name, rate_of([True] * 12, 4)).outcome() == "passed"
    assert VerdictPart(name, rate_of([False] * 12, 4)).outcome() == "refused"
    assert VerdictPart(name, rate_of([True] * 8 + [False] * 4, 4)).outcome() == "unresolved"


def test_a_lora_that_ignores_its_captions_is_refused() -> None:
    """Half of its samples suit them by chance."""
    assert VerdictPart("follows_captions", rate_of([True, False] * 24, 4)).outcome() == "refused"
    assert VerdictPart("follows_captions", rate_of([True] * 24, 4)).outcome() == "passed"


def test_six_pairs_of_seeds_that_differ_pass_and_twelve_that_do_not_are_refused() -> None:
    assert VerdictPart("varied", rate_of([True] * 6, 4)).outcome() == "passed"
    assert VerdictPart("varied", rate_of([False] * 6, 4)).outcome() == "unresolved"
    assert VerdictPart("varied", rate_of([False] * 12, 4)).outcome() == "refused"


def test_draws_are_paired_between_rates_of_as_many() -> None:
    one, same = rate_of([True, False, True, True]), rate_of([True, False, True, True])
    assert one.draws == same.draws
    assert sum(one.draws) / len(one.draws) == pytest.approx(0.75, abs=0.05)


def test_each_part_asks_for_its_own_measures() -> None:
    looks = [look_of(1, 1, 0), look_of(3, 1, 0), look_of(1, 3, 0), look_of(1, 1, 1), look_of(math.nan, 1, 0)]
    samples = [sample(place, look, "a cat" if place else "a dog") for place, look in enumerate(looks)]
    parts = subject_parts(GivenJudge(), TESTED, samples)
    assert counts(parts["shows"]) == (3, 5)
    assert counts(parts["whole"]) == (4, 5)
    assert counts(parts["is_new"]) == (4, 5)
    assert counts(parts["follows_captions"]) == (4, 4), "of the first prompt no word is known"


def test_what_the_judge_cannot_tell_is_not_measured() -> None:
    blind = JudgeTested(LIMITS, FOUND, UNTOUCHED | {"shows": (2, 8), "is_new": (2, 8), "follows_captions": (2, 8)})
    samples = [sample(0, look_of(1, 1, 0))] * 4
    parts = subject_parts(GivenJudge(), blind, samples)
    assert {name: part.is_needed for name, part in parts.items() if part.measure is None} == {
        "shows": True,
        "is_new": False,
        "follows_captions": True,
        "varied": False,
    }
    assert all(part.reason for part in parts.values() if part.measure is None)
    without = JudgeTested({"unlike": 2.0}, FOUND, UNTOUCHED)
    assert subject_parts(GivenJudge(), without, samples)["whole"].measure is None, "no measure has a limit"


def test_captions_that_are_all_alike_need_not_be_followed() -> None:
    part = subject_parts(GivenJudge(["a cat"] * 2), TESTED, [sample(0, look_of(1, 1, 0))])["follows_captions"]
    assert (part.measure, part.is_needed) == (None, False)


def test_two_seeds_of_one_prompt_are_a_pair() -> None:
    """The third prompt has one seed only, and the second gives the same image twice."""

    def shape(left: int) -> Look:
        image = Image.new("RGB", (128, 128), "white")
        ImageDraw.Draw(image).rectangle((left, 20, left + 40, 100), fill="blue")
        return Look(look_at(image).patterns, 1.0, 1.0, torch.tensor([1.0, 1.0, 0.0]))

    drawn = [sample(0, shape(10)), sample(0, shape(70)), sample(1, shape(10)), sample(1, shape(10))]
    part = subject_parts(GivenJudge(), TESTED, [*drawn, sample(2, shape(10))])["varied"]
    assert counts(part) == (1, 2)
    assert subject_parts(GivenJudge(), TESTED, [sample(0, shape(10)), sample(1, shape(70))])["varied"].measure is None


def test_a_leak_is_half_of_the_way_to_the_dataset() -> None:
    """From the base's sample at 5 to 1, where the dataset is."""
    pairs = [(look_of(5.0), look_of(after)) for after in (5.0, 3.1, 2.9, math.nan)]
    assert counts(away_part(GivenJudge(), TESTED, pairs, 1)) == (2, 4)
    alike = (look_of(1.5), look_of(1.0))
    assert counts(away_part(GivenJudge(), TESTED, [*pairs, alike], 1)) == (2, 4), "it says nothing"
    assert away_part(GivenJudge(), TESTED, [alike], 1).measure is None
    assert away_part(GivenJudge(), JudgeTested({}, {}, UNTOUCHED), pairs, 1).measure is None
    alone = [(None, look_of(after)) for after in (3.0, 1.0)]
    assert counts(away_part(GivenJudge(), TESTED, alone, 1)) == (1, 2), "without the base's, beyond the limit"


def test_other_things_count_by_the_measure_that_tells_them() -> None:
    """Where `unlike` tells lumps alone, the base's samples are not beyond it."""

    class TwoMeasures(GivenJudge):
        def measure(self, look: Look, without: Collection[int] = ()) -> dict[str, float]:
            assert look.features is not None
            return dict(zip(("unlike", "strange"), look.features.tolist(), strict=True))

    tested = JudgeTested({"unlike": 2.0, "strange": 2.0}, FOUND, UNTOUCHED)
    pairs = [(look_of(1.0, 5.0), look_of(1.0, after)) for after in (5.0, 4.0, 1.0)]
    assert counts(away_part(TwoMeasures(), tested, pairs, 1)) == (2, 3)


def unrelated(place: int, bases: tuple[float, float], lora: Look | float) -> list[Unrelated]:
    """Two seeds of a prompt, as the base draws them, and the same with the LoRA."""
    look = look_of(lora) if isinstance(lora, float) else lora
    return [
        Unrelated(place, seed, look_of(base), look, (torch.zeros(1), torch.zeros(1))) for seed, base in enumerate(bases)
    ]


def test_a_prompt_is_kept_where_its_sample_is_nearest_to_its_own() -> None:
    first, others = unrelated(0, (0.0, 0.1), 0.2), [*unrelated(1, (10.0, 9.9), 0.3), *unrelated(2, (20.0, 20.1), 19.0)]
    assert counts(kept_part([*first, *others])) == (4, 6)
    unclear = unrelated(3, (30.0, 5.0), 30.0)
    assert counts(kept_part([*first, *others, *unclear])) == (4, 6), "the base does not draw it alike twice"
    broken = Look({}, math.nan, math.nan, torch.tensor([math.nan]))
    assert counts(kept_part([*unrelated(0, (0.0, 0.1), broken), *others])) == (2, 6)


def test_a_base_whose_own_samples_say_nothing_is_not_asked() -> None:
    alike = [each for place in range(4) for each in unrelated(place, (float(place), 10.0 - place), float(place))]
    assert kept_part(alike).measure is None
    broken = [Unrelated(place, 0, look_at(None), look_at(None), (torch.zeros(1), torch.zeros(1))) for place in (0, 1)]
    assert kept_part(broken).measure is None


def test_every_part_that_is_counted_is_in_the_correction() -> None:
    assert len(SCALES) - 1 == PARTS_COUNTED


def test_one_prompt_alone_says_nothing_of_what_is_kept() -> None:
    assert kept_part(unrelated(0, (1.0, 1.1), 1.0)).measure is None
