"""`bench challenge`: each aim beside what was found, and whether that was measured or predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lora_trainer
from lora_trainer.benchmarks.bench_challenge import (
    FULL,
    MINIATURE,
    RECORDS,
    aim_row,
    challenge_settings,
    conclude,
    step_rows,
)
from lora_trainer.benchmarks.measure_row import settle_settings
from lora_trainer.benchmarks.measures import Row
from lora_trainer.cli.main import main
from tests.recipes.recipe import Bench, draw_images, save_tiny_model


def challenged(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["bench", "challenge", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_without_a_gpu_time_and_memory_are_predicted(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    document = challenged(capsys, "--filter", "p")  # step and peak
    rows = document["rows"]
    assert {row["how"] for row in rows} == {"predicted"}
    assert [row["name"] for row in rows] == 2 * [*(f"step, {record.gpu}" for record in RECORDS), "peak"]
    assert all(row["reached"] == (row["found"] < row["aim"]) for row in rows)
    assert all(row["ratio"] == pytest.approx(row["found"] / row["aim"]) for row in rows)
    for record in RECORDS:
        reason = next(note for note in document["notes"] if note.startswith(f"step, {record.gpu}: "))
        assert f"{record.share:.0%} are reached ({record.source})" in reason
    # Each is the plan's floor over the assumed share.
    settings = challenge_settings(settle_settings({}), "sdxl")
    floor = lora_trainer.plan(settings=settings).to_json()["seconds_per_step_at_least"]
    found = {row["name"]: row["seconds_median"] for row in rows[: len(RECORDS)]}
    assert all(
        found[f"step, {record.gpu}"] * record.share == pytest.approx(floor[record.gpu], rel=1e-3)
        for record in RECORDS
        if record.gpu in floor
    )


def test_your_settings_win_and_what_is_missed_is_named(capsys):
    small, large = (
        challenged(capsys, "--filter", "step", "--set", "model.family=sdxl", "--set", f"data.resolution={side}")
        for side in (512, 1024)
    )
    assert all(one["found"] < other["found"] for one, other in zip(small["rows"], large["rows"], strict=True))
    slow = challenged(capsys, "--filter", "step", "--set", "model.family=sdxl", "--set", "train.effective_batch_size=4")
    assert {row["reached"] for row in slow["rows"]} == {True, False}
    missed = [row for row in slow["rows"] if not row["reached"]]
    assert {row["model"] for row in missed} == {"sdxl, 1024 px"}
    assert all(row["name"] in slow["notes"][-1] for row in missed)


def test_a_row_that_does_not_exist(capsys):
    assert main(["bench", "challenge", "--filter", "speed"]) == 2
    assert "There are: step, peak, score." in capsys.readouterr().err


def test_the_score_of_a_family_is_not_measured(capsys, monkeypatch):
    """It is not that of the built-in miniature, which has a challenge of its own."""
    monkeypatch.setattr("lora_trainer.benchmarks.bench_challenge.produce_run", lambda asked: [])
    rows = challenged(capsys, "--filter", "score")["rows"]
    assert [(row["name"], row["model"], row["how"], row["reached"]) for row in rows] == [
        ("score", "sdxl", "not measured", None),
        ("score", "sd15", "not measured", None),
    ]
    rows = challenged(capsys, "--set", "model.family=sdxl")["rows"]
    assert {row["model"] for row in rows} == {"sdxl, 1024 px"}
    assert [row["name"] for row in rows if row["reached"] is None] == ["score"]


def test_the_miniature_has_aims_of_its_size():
    step, peak = (aim_row(name, "m", 1.5, "measured", "", MINIATURE) for name in ("step", "peak"))
    assert (step["aim"], step["reached"], peak["unit"], peak["reached"]) == (1.0, False, "MB", True)
    assert (MINIATURE.score, FULL.score) == (0.9, 0.9)
    good = aim_row("score", "m", 0.95, "measured", "", MINIATURE)
    assert ["step" in line for line in conclude([step, peak, good])] == [True]


def test_measured_steps_and_those_that_failed():
    figures = {"reserved_gib": 3.2, "precision": "fp8", "checkpointed": 18}
    measured = Row("step", "sdxl", 1.5, 1.4, 1.6, peak_gib=3.0, figures=figures)
    step, peak = step_rows(measured, "a GPU")
    assert (step["found"], step.seconds_p90, step["reached"], step["how"]) == (1.5, 1.6, True, "measured")
    assert peak["found"] == pytest.approx((3.2 + 0.7) * 2**30 / 1e9)
    assert peak["reached"]
    failed = step_rows(Row("step", "sdxl", figures={"failed": "out of memory"}), "a GPU")
    assert {(row["found"], row["reached"], row["reason"]) for row in failed} == {(None, None, "out of memory")}


def test_a_score_is_better_when_it_is_higher():
    good, bad, none = (aim_row("score", "m", found, "measured", "") for found in (0.95, 0.5, 0.0))
    assert (good["reached"], bad["reached"], none["reached"]) == (True, False, False)
    assert good.ratio is not None
    assert bad.ratio is not None
    assert good.ratio < 1 < bad.ratio


@pytest.mark.slow
def test_the_score_is_that_of_a_whole_run(tmp_path: Path, capsys):
    place = Bench(save_tiny_model(tmp_path), draw_images(tmp_path / "data", 10), tmp_path / "runs", tmp_path / "cache")
    arguments = place.arguments("x", command="bench", gates__lora_check="lite", gates__dataset=0)
    document = challenged(capsys, *arguments[1:])
    rows = {row["name"].partition(",")[0]: row for row in document["rows"]}
    assert {row["how"] for row in rows.values()} == {"measured"}
    assert list(rows) == ["step", "peak", "score", "all"]
    assert (rows["step"]["aim"], rows["peak"]["unit"]) == (2.0, "GB"), "a model that is named has the full aims"
    assert rows["all"]["ratio"] == max(rows[name]["ratio"] for name in ("step", "peak", "score"))
    assert rows["all"]["reached"] is False
    assert rows["step"]["found"] > 0
    assert rows["score"]["reached"] is False, "six steps teach nothing"
    assert "6 steps" in rows["score"]["reason"]
    assert not place.folder("x").exists()
