"""Agreement of captions and images by the base model: its formulas on made-up losses, and the command on drawn shapes."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from builtin_base.drawing import draw, random_scene
from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Sample
from lora_trainer.dataset_check.doubts import CaptionAgreement, Doubt
from lora_trainer.evaluation.caption_fit import compare_fits, mean_share
from lora_trainer.run import caption_agreement, choices
from lora_trainer.run_folder.record import Record

COLORS = ("red", "green", "blue", "purple", "orange", "white", "yellow", "black")
TEXTS = tuple(f"{color} thing" for color in COLORS)


def losses_of(true: Sequence[int], noise: float = 0.3, seed: int = 0) -> np.ndarray:
    """Losses [N, K, T] of a model for which caption `true[i]` suits image i most; images and captions differ, too."""
    draw = np.random.default_rng(seed)
    images, captions, timesteps = len(true), len(TEXTS), 6
    found = 5.0 * draw.random((images, 1, timesteps)) + 3.0 * draw.random((1, captions, timesteps))
    found += noise * draw.standard_normal((images, captions, timesteps))
    found[np.arange(images), list(true)] -= 1.0
    return found * np.array([0.01, 0.1, 1, 10, 100, 1000])


def test_own_captions_are_preferred_though_captions_and_timesteps_differ() -> None:
    found = compare_fits(losses_of(range(8)), range(8), TEXTS)
    share = mean_share(found.own)
    assert share.value == 1.0
    assert found.margin.max() == 0.0
    assert mean_share(found.apart).value == 1.0


def test_swapped_captions_are_the_first_two() -> None:
    true = [0, 1, 5, 3, 4, 2, 6, 7]
    found = compare_fits(losses_of(true), range(8), TEXTS)
    assert set(np.argsort(-found.margin)[:2].tolist()) == {2, 5}
    assert [found.better[place] for place in (2, 5)] == [5, 2]
    assert found.own[[2, 5]].max() < 0.8


def test_mixed_up_captions_are_distinguished_and_unknown_ones_are_not() -> None:
    rotated = compare_fits(losses_of([*range(1, 8), 0]), range(8), TEXTS)
    assert mean_share(rotated.own).high < 0.6
    assert mean_share(rotated.apart).value > 0.9
    unknown = compare_fits(losses_of(range(8), noise=1e4), range(8), TEXTS)
    assert mean_share(unknown.apart).value < 0.8


def test_captions_of_the_same_words_are_not_compared() -> None:
    texts = [TEXTS[0], "thing, red", *TEXTS[2:]]
    true = [1, 0, *range(2, 8)]
    found = compare_fits(losses_of(true), range(8), texts)
    assert found.better[0] != 1
    assert found.better[1] != 0
    assert np.isnan(compare_fits(losses_of([0] * 8)[:, :1], [0], ["thing"] * 8).own).all()


def write_shapes(folder: Path, count: int, side: int = 128) -> list[Path]:
    """Shapes that the built-in base model knows, no color or shape of one like that of the next."""
    folder.mkdir()
    drawn = random.Random(3)
    paths = []
    for number in range(count):
        scene = random_scene(drawn)
        paths.append(folder / f"{number}.png")
        draw(scene, side, side).save(paths[-1])
        paths[-1].with_suffix(".txt").write_text(scene.caption("a {color} {shape} on a {background} background"))
    return paths


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    main(["check", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_command_names_a_swapped_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_shapes(tmp_path / "shapes", 6)
    one, other = (paths[place].with_suffix(".txt") for place in (1, 4))
    texts = one.read_text(), other.read_text()
    one.write_text(texts[1])
    other.write_text(texts[0])
    page = tmp_path / "page.html"
    found = check(capsys, str(paths[0].parent), "--model", str(BASE_FOLDER), "--html", str(page))
    agreement = found["caption_agreement"]
    assert agreement["measured"]
    assert agreement["comparisons"] == 30
    assert {Path(each["path"]).name for each in agreement["doubts"][:2]} == {"1.png", "4.png"}
    assert agreement["doubts"][0]["better"] in texts
    doubtful = {
        Path(each["path"]).name
        for each in found["files"]
        if any(f["code"] == "doubtful_caption" for f in each["findings"])
    }
    assert doubtful == {"1.png", "4.png"}
    assert "suits it better: " in page.read_text("utf-8")


def test_what_cannot_be_compared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_shapes(tmp_path / "shapes", 5)
    assert check(capsys, str(paths[0].parent))["caption_agreement"] == {
        "measured": False,
        "reason": "no --model was named, and no gates.encoder",
    }
    for path in paths:
        path.with_suffix(".txt").write_text("a shape")
    named = ("--model", str(BASE_FOLDER))
    assert check(capsys, str(paths[0].parent), *named)["caption_agreement"]["reason"] == "all captions are alike"
    for number, path in enumerate(paths):
        path.with_suffix(".txt").write_text("red shape" + "," * number)
    reason = check(capsys, str(paths[0].parent), *named)["caption_agreement"]["reason"]
    assert reason == "all captions have the same words"
    assert "--quick" in check(capsys, str(paths[0].parent), *named, "--quick")["caption_agreement"]["reason"]


@pytest.mark.slow
def test_produce_compares_captions_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_shapes(tmp_path / "shapes", 6)
    texts = [path.with_suffix(".txt").read_text() for path in paths]
    for path, text in zip(paths, texts[1:] + texts[:1], strict=True):
        path.with_suffix(".txt").write_text(text)
    arguments = ["--data", str(tmp_path / "shapes"), "--output", str(tmp_path), "--name", "a", "--max-steps", "1"]
    assert main(["produce", *arguments]) == 3
    assert "captions and images: " in capsys.readouterr().out
    assert not (tmp_path / "a" / "a.safetensors").exists()


def produce(folder: Path, *arguments: str) -> int:
    """Of the drawn shapes in the folder, by the built-in base model, as run `a`."""
    named = ["--data", str(folder / "shapes"), "--output", str(folder), "--name", "a"]
    return main(
        [
            "produce",
            *named,
            "--set",
            "gates.lora_check=off",
            "--set",
            "gates.lora=0",
            "--set",
            "data.resolution=64",
            *arguments,
        ]
    )


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Sample]]:
    """Twelve images, and the samples of each comparison; it doubts two of the captions."""
    write_shapes(tmp_path / "shapes", 12)
    given: list[Sequence[Sample]] = []

    def compare(config: Config, samples: Sequence[Sample], *, before_run: bool) -> CaptionAgreement:
        assert before_run
        given.append(samples)
        doubts = [
            Doubt(one.path, one.caption, other.path, other.caption, worse=0.9, margin=5.0)
            for one, other in itertools.pairwise(samples[:3])
        ]
        return CaptionAgreement(0.94, 0.9, 1.0, 1.0, images=12, of_images=12, comparisons=132, doubts=doubts)

    monkeypatch.setattr(caption_agreement, "measure_agreement", compare)
    return given


def test_a_run_resumed_from_elsewhere_keeps_what_was_found_of_captions(
    tmp_path: Path, compared: list[Sequence[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert produce(Path(), "--max-steps", "1") == 0
    first = Record.read(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "shapes")
    assert produce(tmp_path, "--max-steps", "2", "--resume") == 0
    resumed = Record.read(tmp_path / "a")
    assert len(compared) == 1
    assert resumed.steps == 2
    assert resumed.scores["dataset"] == first.scores["dataset"] < 1
    assert resumed.dataset["caption_agreement"] == first.dataset["caption_agreement"]
    doubtful = [each["path"] for each in resumed.dataset["findings"] if each["code"] == "doubtful_caption"]
    assert len(doubtful) == 2


def test_a_dry_run_says_that_captions_are_compared_later(
    tmp_path: Path, compared: list[Sequence[Sample]], capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for extra in ((), ("--set", "gates.captions=false")):
        assert produce(tmp_path, "--max-steps", "1", "--dry-run", *extra) == 0
        said.append("captions and images: " in capsys.readouterr().out)
    assert said == [True, False]
    assert produce(tmp_path, "--max-steps", "1", "--set", "gates.captions=false") == 0
    assert not compared


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no kernel"), MemoryError()]
)
def test_a_comparison_that_fails_ends_no_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shapes(tmp_path / "shapes", 6)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    workspaces = []

    def fail(*_: object, **__: object) -> None:
        workspaces.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        raise error

    monkeypatch.setattr(caption_agreement, "_compare", fail)
    assert produce(tmp_path, "--max-steps", "1", "--set", "train.deterministic=true") == 0
    assert workspaces == [":4096:8"]
    assert "captions and images: not compared" in capsys.readouterr().out
    agreement = Record.read(tmp_path / "a").dataset["caption_agreement"]
    assert agreement["value"] is None
    assert agreement["reason"]


@pytest.mark.parametrize(
    ("most_weights", "swapped", "usable"),
    [(10, 0, None), (10**10, 1, None), (10**10, 0, 2**20)],
)
def test_a_large_or_swapped_base_is_not_asked_before_a_run(
    most_weights: int, swapped: int, usable: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shapes(tmp_path / "shapes", 6)
    samples = read_manifest([tmp_path / "shapes"])[0].samples
    monkeypatch.setattr(caption_agreement, "LARGE_BEFORE_RUN", most_weights)
    monkeypatch.setattr(choices, "usable_bytes", lambda config, device: usable)
    config = Config.model_validate({"memory": {"blocks_to_swap": swapped}})
    found = caption_agreement.measure_agreement(config, samples, before_run=True)
    assert found.value is None
    assert "lora-trainer check" in found.reason
