"""The page of a run shows each part of the LoRA's verdict, and says what is not decided."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_trainer.core.grid import image_name
from lora_trainer.core.io import write_json
from lora_trainer.evaluation.lora_findings import part_findings
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.part_words import LOOK_AT_THEM, WORDS, own_value
from lora_trainer.evaluation.remedies import with_remedies
from lora_trainer.evaluation.verdict import LINE, SCALES, Cost, Estimate, VerdictPart
from lora_trainer.report.gallery import KINDS
from lora_trainer.report.write import write_comparison, write_report


def rate(count: int, of: int) -> Estimate:
    """As of so many samples: the interval is a tenth to both sides."""
    share = count / of
    return Estimate(share, max(0.0, share - 0.1), min(1.0, share + 0.1), (), count, of)


GOOD = {
    "works": Estimate(1.0, 1.0, 1.0),
    "shows": rate(11, 12),
    "whole": rate(12, 12),
    "follows_captions": rate(11, 12),
    "is_new": rate(12, 12),
    "varied": rate(5, 6),
    "stays_away": rate(15, 16),
    "keeps_base": rate(14, 16),
}
OPEN = GOOD | {"varied": rate(3, 6)}
BAD = GOOD | {"keeps_base": rate(3, 16)}
PARTS = "What was counted in its samples"  # a heading


def words_of(page: str) -> str:
    """The text of a page, without its tags."""
    return " ".join(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL).split())


def page_of(
    folder: Path,
    status: str,
    parts: Mapping[str, Estimate | None],
    /,
    *,
    dataset: float = 1.0,
    gates: Mapping[str, Any] | None = None,
    **lora: Any,
) -> str:
    """The text of the page of a run that ended so, and the page itself after it; `lora` is added to the record's."""
    found = {
        name: VerdictPart(name, measure, "" if measure else "no images of the dataset")
        for name, measure in parts.items()
    }
    report = LoraReport(
        LINE, found, with_remedies(part_findings(found, LINE, may_grow=False), found), cost=Cost(312, 4.5)
    )
    record: dict[str, Any] = {
        "name": "cat",
        "status": status,
        "steps": 6,
        "arithmetic": {"total": 6},
        "scores": {"dataset": dataset, "lora": report.score},
        "outcome": report.outcome,
        "lora": report.to_json() | lora,
        "config": {"gates": {"dataset": 0.8, "lora": 0.9, **(gates or {})}},
        "released": {"step": 6, "reason": "the last: no validation images"},
        "files": {"kohya": "cat.safetensors", "before_after": "samples/before_after.png"},
    }
    write_json(folder / "run.json", record)
    (folder / "cat.safetensors").touch()
    page = write_report(folder).read_text(encoding="utf-8")
    return words_of(page) + page


def draw_image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (200, 20, 20)).save(path)


def shown(folder: Path, kind: str, number: int, *files: str) -> dict[str, Any]:
    """A sample that the verdict kept, with its files."""
    names = {what: f"samples/verdict/{number:02d}_{what}.webp" for what in files}
    for name in names.values():
        draw_image(folder / name)
    about = {"kind": kind, "prompt": f"prompt {number}", "seed": number, "ratio": 0.5}
    return about | names | ({"nearest_path": "/data/cat.png"} if "nearest" in files else {})


def recipe(folder: Path, name: str, prompts: list[str], strengths: Sequence[float] = (1.0,)) -> None:
    """Sample images of these prompts, without the LoRA and with it."""
    images = [{"prompt": prompt, "seed": 7} for prompt in prompts]
    for row in range(len(prompts)):
        for strength in (None, *strengths):
            draw_image(folder / "samples" / image_name(name, row, strength))
    write_json(folder / "samples" / f"{name}.json", {"strengths": strengths, "images": images})


def test_each_part_has_its_interval_beside_the_minimum(tmp_path: Path) -> None:
    text = page_of(tmp_path, "done", {**GOOD, "varied": None})
    assert "Yes, you can use it" in text
    for name in ("shows", "whole", "is_new"):
        assert own_value(name, GOOD[name]).partition(" (")[0] in text
    assert f"{WORDS['varied'].title} {WORDS['varied'].question} – not measured no images of the dataset" in text
    assert "14 of 16" in text
    assert "at least 50 % required" in text
    assert text.count('class="drawn" role="img"') == len(SCALES) - 1
    assert 'aria-label="88 %, interval 78 to 98 %, at least 50 % required"' in text
    assert '<i class="above" style="left:50.0%">' in text


def test_a_part_is_asked_in_words_and_measured_in_its_own_unit() -> None:
    assert set(WORDS) == set(SCALES)
    assert all(meaning.question.endswith("?") for meaning in WORDS.values())
    assert "41 of 48" in own_value("shows", Estimate(0.85, 0.73, 0.93, (), 41, 48))
    assert "(73 to 93 %)" in own_value("shows", Estimate(0.85, 0.73, 0.93, (), 41, 48))
    assert "85 %" in own_value("shows", Estimate(0.85, 0.73, 0.93)), "without counts"
    assert "at least 65 % required" in own_value("shows", Estimate(0.85, 0.73, 0.93))
    assert "at least 33 % required" in own_value("shows", Estimate(0.85, 0.73, 0.93), 0.33)


def test_another_minimum_is_named_in_the_unit_of_each_part(tmp_path: Path) -> None:
    lower = LoraReport(0.45, {name: VerdictPart(name, measure) for name, measure in GOOD.items()}).to_json()
    text = page_of(tmp_path, "done", GOOD, **lower)
    assert "Yes, you can use it" in text
    assert "at least 25 % required" in text, "of keeps_base"


@pytest.mark.parametrize("status", ["unresolved", "done"])
def test_what_is_not_decided_is_named_with_what_would_decide_it(status: str, tmp_path: Path) -> None:
    text = page_of(tmp_path, status, OPEN)
    assert "Not decided yet" in text
    assert f"{WORDS['varied'].title}: not decided" in text
    assert "3 of 6" in text
    assert LOOK_AT_THEM in text
    assert "Yes, " not in text


@pytest.mark.parametrize("status", ["refused", "done"])
def test_a_refused_part_is_named(status: str, tmp_path: Path) -> None:
    text = page_of(tmp_path, status, BAD)
    assert "No, do not use it" in text
    assert f"{WORDS['keeps_base'].refused}: 3 of 16" in text


def test_the_first_screen_says_which_strength_and_step_to_use(tmp_path: Path) -> None:
    text = page_of(tmp_path, "done", GOOD)
    assert "At which strength? 1.0 Other strengths were not compared. To compare them, in the run" in text
    assert "lora-trainer validate cat.safetensors --compare strengths" in text
    assert "From which step? 6 of 6 The last: no validation images." in text
    choice = {
        "strength": 0.8,
        "step": 4,
        "advice": "Use step 4 at strength 0.8.",
        "candidates": [
            {"step": 6, "strength": 1.0, "score": 0.93, "score_low": 0.9, "score_high": 0.95, "standing": "tie"},
            {"step": 4, "strength": 0.8, "score": 0.99, "standing": "better", "gain": 0.06, "parts": {}},
            {"strength": "high"},
        ],
    }
    text = page_of(tmp_path, "done", GOOD, choice=choice)
    assert "At which strength? 0.8 Use step 4 at strength 0.8." in text
    assert "From which step? 4 The exported file has step 6 of 6." in text
    assert "6 1.0 0.93 as good" in text
    assert "4 0.8 0.99 better, +0.06 – use this" in text
    assert text.count("– use this") == 2, "in the text and in the page"


def test_a_refused_strength_is_not_to_be_used(tmp_path: Path) -> None:
    advice = "No step or strength passes; the least bad is step 4."
    rows = [{"step": 6, "strength": 1.0, "standing": "tie"}, {"step": 4, "strength": 0.8, "standing": "tie"}]
    choice = {"strength": 0.8, "step": 4, "outcome": "refused", "advice": advice}
    choice["candidates"] = [row | {"score": 0.5, "outcome": "refused"} for row in rows]
    text = page_of(tmp_path, "refused", BAD, choice=choice)
    assert f"At which strength? none is advised {advice}" in text
    assert "From which step? 6 of 6 The last: no validation images." in text
    assert "4 0.8 0.50 as bad – chosen, but refused" in text
    assert "use this" not in text
    assert "as good" not in text


def test_a_lora_that_was_not_measured_has_the_command_that_measures_it(tmp_path: Path) -> None:
    text = page_of(tmp_path, "done", {}, gates={"lora_check": "off"})
    assert "Not known: the LoRA was not measured" in text
    assert "gates.lora_check=off" in text
    assert "lora-trainer validate cat.safetensors" in text
    assert "Yes, " not in text


@pytest.mark.parametrize(
    "earlier",
    [
        {"outcome": None, "parts": {"fidelity": 0.9, "works": 1.0}},
        {"outcome": "good"},
        {"parts": {"shows": {"value": 0.95}}},
    ],
)
def test_only_an_outcome_that_passed_says_yes(earlier: dict[str, Any], tmp_path: Path) -> None:
    """Runs of earlier versions have a score, but neither outcome nor intervals."""
    text = page_of(tmp_path, "done", GOOD, **earlier)
    assert "Not known: it was measured by an earlier version" in text
    assert "To measure it again, in the run&#39;s folder: lora-trainer validate cat.safetensors" in text
    assert "Yes, " not in text
    assert (PARTS in text) is ("fidelity" not in earlier.get("parts", {}))
    assert "()" not in words_of(text)


def test_a_dataset_below_its_minimum_is_named_beside_a_good_lora(tmp_path: Path) -> None:
    text = page_of(tmp_path, "done", GOOD, dataset=0.5)
    assert "Yes, but look at its dataset" in text
    assert "The dataset scores 0.50, below the minimum of 0.80." in text


def test_the_images_of_the_worst_part_are_beside_the_verdict(tmp_path: Path) -> None:
    kept = [
        shown(tmp_path, "odd", 0, "lora", "nearest"),
        shown(tmp_path, "copied", 1, "lora", "nearest"),
        shown(tmp_path, "unrelated", 2, "lora", "base"),
        {"kind": "odd", "prompt": "outside", "lora": "../../etc/passwd", "nearest": "a\0b", "nearest_path": 3},
        "no sample",
    ]
    text = page_of(tmp_path, "refused", GOOD | {"is_new": rate(1, 12)}, images=kept)
    first, rest = text.index(KINDS["copied"].heading), text.index("Samples to look at")
    assert first < text.index(PARTS) < rest < text.index(KINDS["odd"].heading)
    assert "prompt 1 seed 1 0.50 times" in text
    assert "dataset: cat.png" in text
    assert "outside" not in text
    assert text.count("data:image/webp;base64,") == 6


def test_prompts_by_steps_are_one_table(tmp_path: Path) -> None:
    for step in (2, 4):
        recipe(tmp_path, f"step-{step:06d}", ["a cat", "a dog"])
    recipe(tmp_path, "before_after", ["a cat"])
    text = page_of(tmp_path, "done", GOOD)
    assert "prompt without step 2 step 4 step 6, exported a cat seed 7 a dog seed 7 not made" in text
    assert 'alt="step 2: a dog"' in text


def test_only_images_of_the_comparison_are_beside_it(tmp_path: Path) -> None:
    """Not those that an earlier comparison, or one by `validate`, left in the folder."""
    recipe(tmp_path, "compared", ["a dog"], [0.4, 1.0])
    recipe(tmp_path, "compared-step-000002", ["a cat"])
    recipe(tmp_path, "compared-step-000004", ["a cat"])
    recipe(tmp_path, "compared-step-000006", ["a cat"], [0.4, 1.0])
    choice = {
        "strength": 1.0,
        "step": 6,
        "recipes": ["compared-step-000004.json", "compared-step-000006.json", "../run.json", 3],
        "candidates": [{"step": 6, "strength": 1.0}, {"step": 4, "strength": 1.0}],
    }
    text = page_of(tmp_path, "done", GOOD, choice=choice)
    assert "prompt without step 4 step 6 a cat seed 7" in text
    assert "a dog" not in text
    choice |= {"recipes": ["compared.json"], "candidates": [{"step": 6, "strength": each} for each in (1.0, 0.4)]}
    assert "prompt without strength 0.4 strength 1 a dog seed 7" in page_of(tmp_path, "done", GOOD, choice=choice)


def test_runs_are_compared_by_their_parts(tmp_path: Path) -> None:
    for name, parts in (("one", GOOD), ("two", OPEN)):
        (tmp_path / name).mkdir()
        recipe(tmp_path / name, "before_after", ["a cat"])
        page_of(tmp_path / name, "done", parts)
    write_comparison([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text("utf-8")
    text = words_of(page)
    assert "May I use it? Yes, you can use it Not decided yet" in text
    assert f"{WORDS['varied'].title} {WORDS['varied'].question} 5 of 6 passed 3 of 6 not decided" in text
    assert "a cat seed 7" in text
    assert page.count("data:image/webp;base64,") == 3, "without the LoRA once, and with each"
