from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.cli.check import check_command
from lora_trainer.config.schema import Config, SourceSection
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.views import Framing
from lora_trainer.dataset_check import DataReport, DatasetGate, check_dataset, estimate_tokens
from lora_trainer.models.published import public_architecture
from tests.data.conftest import Draw
from tests.data.drawings import photo


def check(
    folder: Path,
    *,
    allow_missing: bool = False,
    allow_upscale: bool = False,
    limit: int | None = 77,
    words: tuple[str, ...] = (),
    vectors: int = 1,
) -> DataReport:
    manifest, findings = read_manifest([folder], allow_missing_captions=allow_missing)
    gate = DatasetGate([Framing((128,), 16)], allow_upscale, limit, learned_tokens=words, num_vectors=vectors)
    return check_dataset(manifest, findings, gate)


def codes(report: DataReport) -> set[tuple[str, str]]:
    return {(finding.code, finding.severity) for finding in report.findings}


def test_no_upscale_refuses_only_what_is_smaller_than_a_step(tmp_path: Path, draw: Draw) -> None:
    for number, width in enumerate((15, 16, 100)):
        draw(tmp_path / f"{number}.png", width, 60, seed=number)
    manifest, findings = read_manifest([tmp_path])
    report = check_dataset(manifest, findings, DatasetGate([Framing((128,), 16, no_upscale=True)]))
    (found,) = (finding for finding in report.findings if finding.code in ("too_small", "upscaled"))
    assert (found.path, found.severity) == (tmp_path / "0.png", "error")
    assert "15×60; a bucket's sides are at least 16 px" in found.message
    assert [str(bucket) for bucket in sorted(report.plan.counts)] == ["16x32", "96x48"]


def test_a_learned_token_may_be_written_like_a_placeholder(tmp_path: Path, draw: Draw) -> None:
    for number in range(5):
        draw(tmp_path / f"{number}.png", 128, 128, seed=number, caption=f"<trigger> on hill {number}")
    assert ("literal_trigger", "warning") in codes(check(tmp_path))
    assert ("literal_trigger", "warning") not in codes(check(tmp_path, words=("<trigger>",)))


def cut_short(path: Path) -> None:
    """Damage the pixels, not the header."""
    path.write_bytes(path.read_bytes()[:2000])


def test_a_clean_dataset_passes(good_folder: Path) -> None:
    report = check(good_folder)
    assert report.score == 1.0
    assert report.passed
    assert report.findings == ()
    assert len(report.samples) == 20


def test_half_broken_is_refused(good_folder: Path) -> None:
    for path in sorted(good_folder.glob("*.png"))[::2]:
        cut_short(path)
    report = check(good_folder)
    assert report.score == pytest.approx(0.8 ** (0.5 / 0.1))
    assert not report.passed
    assert str(report.refusals[0]).startswith("10 of 20 files cannot be read (first: 00.png")
    assert len(report.samples) == 10


def test_half_without_captions_is_refused_unless_allowed(good_folder: Path) -> None:
    for path in sorted(good_folder.glob("*.txt"))[::2]:
        path.unlink()
    report = check(good_folder)
    assert report.score <= 0.5
    assert "10 of 20 files have no caption" in str(report.refusals[0])
    assert "data.allow_missing_captions=true" in report.refusals[0].fix
    assert check(good_folder, allow_missing=True).passed


def test_nothing_usable_scores_zero(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"nonsense")
    report = check(tmp_path)
    assert report.score == 0.0
    assert report.samples == ()
    assert len(report.refusals) == 1


@pytest.mark.parametrize("seed", range(3))
def test_breaking_one_more_file_never_raises_the_score(good_folder: Path, draw: Draw, seed: int) -> None:
    draw(good_folder / "small.png", 100, 100, seed=100)
    draw(good_folder / "wide.png", 700, 128, seed=101)
    for copy in ("copy1.png", "copy2.png"):
        draw(good_folder / copy, 128, 128, seed=3)
    (good_folder / "05.txt").unlink()
    Image.new("RGB", (128, 128)).save(good_folder / "black.png")
    waiting = sorted(good_folder.glob("*.png"))
    random.Random(seed).shuffle(waiting)
    before = check(good_folder).score
    for path in waiting:
        cut_short(path) if len(path.name) % 2 else path.write_bytes(b"")
        if path.name == "black.png":
            path.write_bytes(b"")
        after = check(good_folder).score
        assert after <= before
        before = after
    assert before == 0.0


def test_small_images(good_folder: Path, draw: Draw) -> None:
    draw(good_folder / "slightly.png", 100, 100, seed=30)
    draw(good_folder / "far.png", 60, 60, seed=31)
    report = check(good_folder)
    assert {("upscaled", "warning"), ("too_small", "error")} == codes(report)
    (problem,) = report.refusals
    assert "1 of 22 files" in problem.message
    assert "60×60" in problem.message
    assert "data.allow_small_images=true" in problem.fix
    allowed = check(good_folder, allow_upscale=True)
    assert codes(allowed) == {("upscaled", "warning")}
    assert allowed.passed


def test_if_every_image_is_too_small_one_problem_names_the_resolution_that_fits(tmp_path: Path, draw: Draw) -> None:
    for number, side in enumerate((40, 50, 56)):
        draw(tmp_path / f"{number}.png", side, side, seed=number)
    report = check(tmp_path, allow_missing=True)
    (problem,) = report.refusals
    assert "3 of 3 files" in problem.message
    assert problem.fix.startswith("--set data.resolution=32 ")
    manifest, findings = read_manifest([tmp_path], allow_missing_captions=True)
    refitted = check_dataset(manifest, findings, DatasetGate([Framing((32,), 16)]))
    assert len(refitted.samples) == 3
    assert not refitted.refusals


def test_duplicates_uniform_animated_misnamed_cropped(good_folder: Path, draw: Draw) -> None:
    draw(good_folder / "copy.png", 128, 128, seed=4)
    Image.new("RGB", (128, 128), "navy").save(good_folder / "plain.png")
    frames = [photo(128, 128, seed) for seed in (50, 51)]
    frames[0].save(good_folder / "moving.gif", save_all=True, append_images=frames[1:])
    photo(128, 128, 52).save(good_folder / "really.jpg", format="PNG")
    photo(900, 128, 53).save(good_folder / "panorama.png")
    for name in ("plain", "moving", "really", "panorama"):
        (good_folder / f"{name}.txt").write_text(name, encoding="utf-8")
    report = check(good_folder)
    assert codes(report) == {
        ("duplicate", "warning"),
        ("uniform", "warning"),
        ("animated", "note"),
        ("wrong_ending", "note"),
        ("cropped", "warning"),
    }
    assert report.passed
    assert report.score == pytest.approx(0.8 ** ((1 / 0.45 + 1 / 0.2 + 1 / 0.5) / 25))
    assert report.score <= min(report.parts.values())


def test_captions_too_long_and_all_the_same(tmp_path: Path, draw: Draw) -> None:
    caption = " ".join(f"a word {number}" for number in range(60))
    for seed in range(6):
        draw(tmp_path / f"{seed}.png", 128, 128, seed=seed, caption=caption)
    report = check(tmp_path)
    assert codes(report) == {("long_caption", "note"), ("same_caption", "note")}
    assert report.score == 1.0


def test_a_placeholder_token_counts_as_its_number_of_vectors(tmp_path: Path, draw: Draw) -> None:
    for seed in range(6):
        caption = f"a <zobo> with one red ball and two dry hats and six new cups and {seed}"
        draw(tmp_path / f"{seed}.png", 128, 128, seed=seed, caption=caption)
    few, many = (check(tmp_path, words=("<zobo>",), vectors=vectors) for vectors in (4, 64))
    assert codes(few) == set()
    assert codes(many) == {("long_caption", "note")}
    assert "of about 81 tokens, 64 of them learned; the model reads 77" in many.findings[0].message


def test_a_placeholder_token_in_only_some_captions_is_noted(tmp_path: Path, draw: Draw) -> None:
    for seed in range(6):
        caption = f"a {'<Zobo>' if seed else 'robot'} number {seed}"
        draw(tmp_path / f"{seed}.png", 128, 128, seed=seed, caption=caption)
    (found,) = check(tmp_path, words=("<zobo>",)).findings
    assert (found.code, found.severity) == ("word_in_some", "note")
    assert found.message.startswith("5 of 6 captions contain the learned token '<zobo>'")


def test_few_images_cost_score(tmp_path: Path, draw: Draw) -> None:
    for seed in range(2):
        draw(tmp_path / f"{seed}.png", 128, 128, seed=seed, caption=str(seed))
    report = check(tmp_path)
    assert codes(report) == {("few_images", "warning")}
    assert report.score == pytest.approx(0.7)
    assert report.refusals == ()


@pytest.mark.parametrize(
    ("caption", "least", "most"), [("a cat", 4, 4), ("", 2, 2), ("photosynthesis", 3, 6), ("猫と犬", 4, 6)]
)
def test_token_estimate(caption: str, least: int, most: int) -> None:
    assert least <= estimate_tokens(caption) <= most


USUAL = public_architecture("sd15").facts
CONFIG = Config.model_validate({"data": {"resolution": 128}, "train": {"effective_batch_size": 4, "max_epochs": 3}})


def over(folder: Path, config: Config) -> Config:
    """The same settings for the folder's images."""
    return config.model_copy(
        update={"data": config.data.model_copy(update={"sources": (SourceSection(path=str(folder)),)})}
    )


def test_the_command_prints_one_json_document(good_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_short(good_folder / "03.png")
    code = check_command(over(good_folder, CONFIG), as_json=True, facts=USUAL)
    document = json.loads(capsys.readouterr().out)
    assert code == 3
    assert document["passed"] is False
    assert document["score"] == pytest.approx(0.8 ** (0.05 / 0.1), abs=1e-6)
    assert document["samples"] == 19
    broken = [row for row in document["files"] if row["findings"]]
    assert [Path(row["path"]).name for row in broken] == ["03.png"]
    assert broken[0]["findings"][0].keys() == {"code", "severity", "message", "fix"}
    steps = document["steps"]
    assert steps["images"] + steps["validation"] == 19
    assert steps["total"] == 3 * -(-steps["images"] * steps["repeats"] // 4)
    assert set(document["parts"]) >= {"readable", "captions", "sizes", "distinct", "count"}


def test_the_command_checks_at_the_training_resolution(good_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's own, limited by the VRAM preset."""
    buckets = []
    for ceiling in (None, 256):
        config = Config.model_validate({"data": {"resolution_ceiling": ceiling}, "train": {"effective_batch_size": 4}})
        check_command(over(good_folder, config), as_json=True, facts=USUAL)
        buckets.append(json.loads(capsys.readouterr().out)["buckets"])
    assert "512x512" in buckets[0]
    assert "256x256" in buckets[1]


def test_clip_hardly_reads_other_scripts(good_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But it reads accents, and T5 or Qwen beside it know more."""
    for number, caption in enumerate(("собака на траве", "강아지 사진", "ένα σπίτι", "un café à Paris", "ein Mädchen")):
        (good_folder / f"{number:02}.txt").write_text(caption, encoding="utf-8")
    for family, expected in (("sd15", ["00.png", "01.png", "02.png"]), ("flux", [])):
        check_command(over(good_folder, CONFIG), as_json=True, facts=public_architecture(family).facts)
        files = json.loads(capsys.readouterr().out)["files"]
        unread = [row["path"] for row in files if "unread_caption" in [each["code"] for each in row["findings"]]]
        assert [Path(path).name for path in unread] == expected


def test_the_command_prints_readable_text(good_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command(over(good_folder, CONFIG), as_json=False, facts=USUAL) == 0
    assert "score 1.000" in capsys.readouterr().out
    Image.new("RGB", (20, 20)).save(good_folder / "odd [red].png")
    assert check_command(over(good_folder, CONFIG), as_json=False, facts=USUAL) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "refused: 2 errors" in out
    assert "has no caption (first: odd [red].png" in out


def test_the_command_prints_each_reason_once_and_escapes_control_characters(
    good_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (good_folder / "a.png").write_bytes(b"")
    (good_folder / "b.png").write_bytes(b"")
    (good_folder / "\x1b[31mred.png").write_text("text", encoding="utf-8")
    Image.new("RGB", (160, 128)).save(good_folder / "\x1b[32mgreen.png")
    check_command(over(good_folder, CONFIG), as_json=False, facts=USUAL)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "Write one into \\x1b[32mgreen.txt" in out
    assert out.count("is empty (0 bytes)") == 1
    assert out.count("is not an image in a known format") == 1
