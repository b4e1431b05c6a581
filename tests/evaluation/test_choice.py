"""Strengths and steps compared on a tiny base model: exact strengths, paired differences, advice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lora_trainer.evaluation.advice import advice_on
from lora_trainer.evaluation.choice import FRESH, choose, compare_candidates, compared
from lora_trainer.evaluation.compute import ON_CPU, Compute
from lora_trainer.evaluation.evidence import RealImages, Studio
from lora_trainer.evaluation.likeness import Values
from lora_trainer.evaluation.lora_check import LoraGate, OpenLora, check_lora, open_lora
from lora_trainer.evaluation.lora_choice import Candidate, CandidateScore, LoraChoice
from lora_trainer.evaluation.part_words import WORDS
from lora_trainer.evaluation.sample_rates import Unrelated
from lora_trainer.evaluation.validation_loss import EncodedSample
from lora_trainer.evaluation.verdict import LINE, SCALES, Cost, Estimate, VerdictPart
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import read_lora
from tests.lora_format.tiny import facts, random_lora

FAMILY = FAMILIES["sd15"]
CPU = torch.device("cpu")
PROMPTS = ("", "a red circle")
GATE = LoraGate(check="lite", prompts=PROMPTS)
CAPTIONS = ("a red ring", "a blue ring", "a red box", "a blue box", "a green ring", "a green box")


@pytest.fixture(scope="module")
def images() -> RealImages:
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(4, 8, 8, generator=generator)
    samples = [
        EncodedSample(
            f"s{index}",
            0.8 * common + 0.2 * torch.randn(4, 8, 8, generator=generator),
            {"embeds": torch.randn(77, 32, generator=generator)},
            torch.zeros(6),
            caption,
        )
        for index, caption in enumerate(CAPTIONS)
    ]
    return RealImages(samples[:4], samples[4:])


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA on the denoiser and the text encoder."""
    modules = dict(random_lora(FAMILY.denoiser.load(base, torch.float32, CPU), size=0.1).modules)
    generator = torch.Generator().manual_seed(1)
    for end in ("q_proj", "out_proj"):
        name = f"text_encoder.text_model.encoder.layers.0.self_attn.{end}"
        down, up = (0.3 * torch.randn(shape, generator=generator) for shape in ((2, 32), (32, 2)))
        modules[name] = LoraPair(down, up, 2.0)
    return write_lora(tmp_path_factory.mktemp("lora"), "cat", LoraWeights(modules), facts())[0]


def opened(lora: Path, base: Path, images: RealImages, strengths: Sequence[float]) -> OpenLora:
    found = open_lora(lora, base, FAMILY, images, replace(GATE, strengths=tuple(strengths)), ON_CPU)
    assert isinstance(found, OpenLora)
    return found


def test_strength_0_is_the_base_and_half_is_half_of_the_change(lora: Path, base: Path, images: RealImages) -> None:
    """In the denoiser and in the text encoder."""
    found = opened(lora, base, images, (0.0, 0.5, 1.0))
    texts = {strength: each.samples[0].cond["embeds"] for strength, each in found.texts.items()}
    original = found.studio.original.samples[0].cond["embeds"]
    assert torch.equal(texts[0.0], original)
    assert not torch.allclose(texts[0.5], original, atol=1e-4)
    assert not torch.allclose(texts[0.5], texts[1.0], atol=1e-4)
    with found.at(0.0) as studio:
        assert all(torch.equal(*each.latents) for each in studio.sample_unrelated(0, 1))
    half = read_lora(lora)
    halved = {name: replace(pair, alpha=pair.alpha / 2) for name, pair in half.modules.items()}
    other = write_lora(lora.parent, "half", replace(half, modules=halved), facts())[0]
    with found.at(0.5) as studio:
        strong = studio.sample_subject((0, 1), (0, 1), CAPTIONS)
    with opened(other, base, images, (1.0,)).at(1.0) as studio:
        weak = studio.sample_subject((0, 1), (0, 1), CAPTIONS)
    for one, same in zip(strong, weak, strict=True):
        assert one.latents is not None
        assert same.latents is not None
        assert torch.allclose(one.latents, same.latents, rtol=1e-2, atol=1e-2)


def test_at_strength_1_a_candidate_is_measured_as_by_the_verdict(lora: Path, base: Path, images: RealImages) -> None:
    plain = check_lora(lora, base, FAMILY, images, GATE)
    candidates = [Candidate(lora, 6, strength) for strength in (1.0, 0.2)]
    choice = compare_candidates(candidates, base, FAMILY, images, GATE, ON_CPU)
    assert choice is not None
    first = choice.usual
    if first.samples == 8:  # later rounds have more samples than a lite verdict
        for name, part in first.parts.items():
            expected = plain.parts[name].measure
            assert (part.measure is None) == (expected is None)
            if part.measure is not None and expected is not None:
                assert (part.measure.count, part.measure.of) == (expected.count, expected.of)
                assert part.measure.low <= expected.low, "it looks more often"
    document = json.loads(json.dumps(choice.to_json(), allow_nan=False))
    assert [each["strength"] for each in document["candidates"]] == [1.0, 0.2]
    assert document["cost"]["forward_passes"] > 0
    assert document["advice"]


def test_a_chosen_candidate_is_measured_with_seeds_that_took_no_part_in_the_choice(
    lora: Path, base: Path, images: RealImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, int]] = []
    subject, unrelated = Studio.sample_subject, Studio.sample_unrelated

    def sample_subject(self: Studio, places: Sequence[int], seeds: Sequence[int], captions: Sequence[str]) -> object:
        drawn.extend(("subject", seed) for seed in seeds)
        return subject(self, places, seeds, captions)

    def sample_unrelated(self: Studio, number: int, each: int) -> list[Unrelated]:
        found = unrelated(self, number, each)
        drawn.extend(("unrelated", sample.seed) for sample in found)
        return found

    monkeypatch.setattr(Studio, "sample_subject", sample_subject)
    monkeypatch.setattr(Studio, "sample_unrelated", sample_unrelated)
    other = Candidate(lora, 6, 0.2)
    monkeypatch.setattr("lora_trainer.evaluation.choice.choose", lambda scores: other)
    before = len(drawn)
    choice = compare_candidates([Candidate(lora, 6), other], base, FAMILY, images, GATE, ON_CPU)
    assert choice is not None
    assert choice.chosen == other
    assert choice.fresh is not None
    of_both = Counter(drawn[before:])
    fresh = [each for each in drawn if of_both[each] == 1]
    assert sum(kind == "subject" for kind, _ in fresh) == FRESH
    assert any(kind == "unrelated" for kind, _ in fresh)
    assert not set(drawn[-len(fresh) :]) & set(drawn[: -len(fresh)]), "no seed is used for both"


def part(name: str, value: float, spread: Values) -> VerdictPart:
    draws = value + spread
    return VerdictPart(name, Estimate(value, float(draws.min()), float(draws.max()), tuple(draws)))


def measured(
    values: dict[Candidate, dict[str, float]], noise: float, own: float = 0.0
) -> dict[Candidate, CandidateScore]:
    """Candidates whose parts have these scores: with a noise that is common to all, as of the same seeds, and their own, both in
    the parts' own units."""
    random = np.random.default_rng(0)
    common = noise * random.standard_normal(1000)
    parts = {
        candidate: {
            name: part(name, SCALES[name].at(score), common + own * random.standard_normal(1000))
            for name, score in found.items()
        }
        for candidate, found in values.items()
    }
    return compared(parts, next(iter(values)), 8)


def chosen(scores: dict[Candidate, CandidateScore], minimum: float = LINE) -> LoraChoice:
    ordered = tuple(scores.values())
    choice = LoraChoice(ordered, choose(ordered), Cost(), minimum)
    return replace(choice, advice=advice_on(choice))


FILE = Path("cat.safetensors")
USUAL = Candidate(FILE, 720)


def test_a_common_noise_does_not_hide_a_difference() -> None:
    """The scores' intervals overlap widely, and the paired difference is clear."""
    better = Candidate(FILE, 720, 0.8)
    scores = measured({USUAL: {"is_new": 0.81}, better: {"is_new": 0.904}}, noise=0.1, own=0.003)
    assert scores[USUAL].score.high > scores[better].score.low
    assert scores[better].standing == "better"
    assert chosen(scores).chosen == better
    alone = measured({USUAL: {"is_new": 0.81}, better: {"is_new": 0.904}}, noise=0.0, own=0.1)
    assert alone[better].standing == "unclear"
    assert alone[better].is_open
    assert "Not decided: step 720 at strength 0.8 may be better" in chosen(alone).advice


def test_what_is_no_better_than_it_need_be_is_not_chosen() -> None:
    """From 0.93 to 0.96: surely better, and not worth it."""
    other = Candidate(FILE, 720, 0.8)
    scores = measured({USUAL: {"varied": 0.93}, other: {"varied": 0.96}}, noise=0.0, own=0.001)
    assert scores[other].gain.low > 0
    assert scores[other].standing == "tie"
    assert not scores[other].is_open
    assert chosen(scores).chosen == USUAL


def test_of_several_good_ones_the_nearest_is_chosen() -> None:
    strengths = {1.0: 0.36, 0.8: 0.904, 0.6: 0.91, 0.4: 0.18}
    values = {Candidate(FILE, 720, each): {"is_new": score, "shows": 1.0} for each, score in strengths.items()}
    choice = chosen(measured(values, noise=0.001))
    assert choice.chosen.strength == 0.8
    assert choice.advice.startswith("Use strength 0.8: it scores 0.90 in place of 0.36")
    assert "At 0.4 and 1 it copies the images." in choice.advice


def test_ties_keep_the_last_step_and_say_from_where_it_copies() -> None:
    steps = {720: 0.98, 400: 0.98, 600: 0.982, 900: 0.36, 1000: 0.18}
    values = {Candidate(FILE, step): {"is_new": score, "shows": 1.0} for step, score in steps.items()}
    choice = chosen(measured(values, noise=0.01))
    assert choice.chosen == USUAL
    assert choice.advice == (
        "Use step 720, as exported. Steps 400, 600 and 720 tie: no reason to choose an earlier one."
        " From step 900 on it copies the images."
    )
    later = {Candidate(FILE, step): {"shows": 0.95} for step in (400, 720)}
    assert "Steps 400 and 720 tie: no reason to leave 400." in chosen(measured(later, noise=0.01)).advice


def test_the_recipes_of_its_images_are_listed() -> None:
    strengths = chosen(measured({Candidate(FILE, 720, each): {"shows": 0.95} for each in (1.0, 0.8)}, noise=0.01))
    assert strengths.to_json()["recipes"] == [], "no sheet was drawn"
    sheet = Path("samples/compared.png")
    assert replace(strengths, sheet=sheet).to_json()["recipes"] == ["compared.json"]
    files = {720: FILE, 400: Path("400.safetensors")}
    steps = chosen(measured({Candidate(file, step): {"shows": 0.95} for step, file in files.items()}, noise=0.01))
    listed = replace(steps, sheet=sheet).to_json()["recipes"]
    assert listed == ["compared-step-000400.json", "compared-step-000720.json"]


def test_what_is_refused_is_never_advised() -> None:
    """Even where it is the best: at the gate's minimum, which may be another than the default."""
    values = {Candidate(FILE, 720, each): {"shows": score} for each, score in {1.0: 0.23, 0.8: 0.46, 0.6: 0.12}.items()}
    scores = measured(values, noise=0.001)
    refused = chosen(scores)
    assert refused.advice.startswith(
        "No strength passes; the least bad is strength 0.8: it scores 0.46 in place of 0.23"
    )
    document = refused.to_json()
    assert (document["outcome"], document["candidates"][0]["outcome"]) == ("refused", "refused")
    lower = chosen(scores, 0.4)
    assert lower.advice.startswith("Use strength 0.8: ")
    assert f"At 0.6 and 1 {WORDS['shows'].fault}." in lower.advice
    assert [each["outcome"] for each in lower.to_json()["candidates"]] == ["refused", "passed", "refused"]
    assert chosen(scores, 0.0).advice.count("At ") == 0, "a minimum of 0 refuses nothing"

    as_bad = {Candidate(FILE, step): {"shows": 0.35} for step in (720, 400)}
    assert chosen(measured(as_bad, noise=0.001)).advice.startswith(
        "No step passes; the least bad is step 720, as exported. Steps 400 and 720 tie"
    )
    undecided = chosen(measured(values | {USUAL: {"shows": 0.9}}, noise=0.05))
    assert undecided.advice.startswith("No strength surely passes with so few samples; the best is strength 1.")
    one_passes = {USUAL: {"shows": 0.88}, Candidate(FILE, 720, 0.8): {"shows": 0.92}}
    assert chosen(measured(one_passes, noise=0.001)).advice.startswith("Strength 1 is refused; strength 0.8 passes.")


def test_what_is_chosen_passes_by_samples_that_took_no_part_in_the_choice() -> None:
    better = Candidate(FILE, 720, 0.8)
    choice = chosen(measured({USUAL: {"shows": 0.3}, better: {"shows": 0.95}}, noise=0.001))
    assert (choice.chosen, choice.outcome) == (better, "passed")
    weak = {"shows": VerdictPart("shows", Estimate(0.2, 0.1, 0.3))}
    again = replace(choice, fresh=weak)
    assert again.outcome == again.to_json()["outcome"] == "refused"
    assert again.to_json()["fresh_parts"]["shows"]["own_value"] == 0.2


def test_what_is_not_finite_scores_nothing() -> None:
    broken = Candidate(FILE, 900)
    parts = {
        USUAL: {"varied": part("varied", 0.8, np.zeros(1000))},
        broken: {"varied": VerdictPart("varied", Estimate(float("nan"), float("nan"), float("nan")))},
    }
    scores = compared(parts, USUAL, 8)
    assert scores[broken].standing == "worse"
    assert json.dumps(scores[broken].to_json()["score"]) == "0.0"


def test_a_rare_outlier_of_one_candidate_widens_no_other_interval() -> None:
    random = np.random.default_rng(0)
    weak, odd = Candidate(FILE, 720, 0.4), Candidate(FILE, 720, 1.2)
    rare = np.where(np.arange(1000) % 50 == 0, -0.6, 0.0)
    parts = {
        USUAL: {"shows": part("shows", 0.8, np.zeros(1000))},
        weak: {"shows": part("shows", 0.4, 0.1 * random.standard_normal(1000))},
        odd: {"shows": part("shows", 0.8, rare)},
    }
    scores = compared(parts, USUAL, 8)
    assert scores[weak].standing == "worse"
    assert scores[odd].standing == "tie"


def test_what_was_not_measured_has_no_least_part() -> None:
    nothing = {"varied": VerdictPart("varied", None, "no prompt has samples of two seeds")}
    other = Candidate(FILE, 720, 0.8)
    scores = compared({USUAL: nothing, other: nothing}, USUAL, 8)
    assert scores[USUAL].to_json()["least"] == ""
    assert chosen(scores).chosen == USUAL


def test_with_a_cut_off_file_alone_there_is_nothing_to_compare(
    lora: Path, base: Path, images: RealImages, tmp_path: Path
) -> None:
    cut, lines = tmp_path / "cut.safetensors", list[str]()
    cut.write_bytes(lora.read_bytes()[:-100])
    candidates = [Candidate(lora, 6), Candidate(cut, 2)]
    assert compare_candidates(candidates, base, FAMILY, images, GATE, Compute(say=lines.append)) is None
    assert any(line.startswith("cut.safetensors is not compared: ") for line in lines)
