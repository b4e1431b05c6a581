"""`validate --samples`: the verdict on images that another program drew."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from PIL import Image

from builtin_base.drawing import draw_anything
from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import UsageError
from lora_trainer.evaluation import judge
from lora_trainer.evaluation.faults import FAULTS
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.sample_rates import BY_SAMPLES
from lora_trainer.evaluation.verdict import SCALES
from lora_trainer.run.judge_folder import judge_images
from tests.recipes.recipe import save_tiny_model

FUNGO = sorted((Path(__file__).resolve().parents[1] / "data_sets" / "fungo").glob("*.webp"))
SAMPLES = 8  # the last ones of the subject's images are taken for a LoRA's


@pytest.fixture(scope="module", autouse=True)
def few_planted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "MOST_PLANTED", 6)
        yield


def copied(files: Sequence[Path], folder: Path) -> Path:
    """The images, numbered, with their captions."""
    for number, path in enumerate(files):
        with Image.open(path) as image:
            image.save(folder / f"{number:02}.png")
        shutil.copy(path.with_suffix(".txt"), folder / f"{number:02}.txt")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(FUNGO[:-SAMPLES], tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a perfect LoRA would draw."""
    return copied(FUNGO[-SAMPLES:], tmp_path_factory.mktemp("good"))


@pytest.fixture
def samples(good: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(good, tmp_path / "samples"))


def judged(samples: Path, data: Path, unrelated: Path | None = None) -> LoraReport:
    return judge_images(samples, data, unrelated, Config(), lambda line: None)


def refused(samples: Path, data: Path, unrelated: Path | None = None) -> str:
    """The code of the one problem."""
    with pytest.raises(UsageError) as caught:
        judged(samples, data, unrelated)
    (problem,) = caught.value.problems
    return problem.code


def validated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    code = main(["validate", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_good_images_pass_and_the_document_counts_them(
    good: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others, rng = tmp_path / "others", random.Random(0)
    others.mkdir()
    for number in range(8):
        draw_anything(rng, 128, 128).save(others / f"{number}.webp")
    lower = ("--set", "gates.lora=0.1")  # eight images of which one fails leave the usual minimum open
    code, printed = validated(capsys, "--samples", good, "--data", data, "--unrelated", others, "--json", *lower)
    document = json.loads(printed)
    assert (document["outcome"], code) == ("passed", 0)
    assert list(document["parts"]) == list(SCALES)
    assert not document["parts"]["works"]["measured"]
    assert not document["parts"]["keeps_base"]["measured"]
    assert document["parts"]["shows"]["of"] == SAMPLES
    assert document["parts"]["shows"]["count"] >= SAMPLES - 1
    assert document["parts"]["whole"]["count"] >= SAMPLES - 2
    assert document["parts"]["stays_away"]["of"] == 8
    found = document["numbers"]["judge"]["found"]
    assert set(document["cannot_tell"]) == {
        fault.words for name, fault in FAULTS.items() if found[name][0] < judge.LEAST_FOUND * found[name][1]
    }
    assert document["numbers"]["images"]["decibels"] is None
    assert document["encoder"] == "none"


def test_images_that_are_all_faulty_are_refused(samples: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in samples.glob("*.png"):
        with Image.open(path) as file:
            image = file.convert("RGB")
        FAULTS["lump"].plant(image, [image], random.Random(path.name)).save(path)
    code, printed = validated(capsys, "--samples", samples, "--data", data)
    assert code == 4
    assert "refused" in printed


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--unrelated", "."), "arguments_conflict"),
        (("--samples", "."), "arguments_conflict"),
        (("lora.safetensors", "--samples", ".", "--data", "."), "arguments_conflict"),
        (("--samples", ".", "--data", ".", "--compare", "strengths"), "arguments_conflict"),
        ((), "argument_missing"),
    ],
)
def test_arguments_that_do_not_suit_each_other_are_refused(
    arguments: tuple[str, ...], code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[str] = []
    made = UsageError.__init__

    def init(error: UsageError, problems: object) -> None:
        made(error, problems)  # type: ignore[arg-type]
        raised.extend(problem.code for problem in error.problems)

    monkeypatch.setattr(UsageError, "__init__", init)
    assert main(["validate", *arguments]) == 2
    assert raised[-1] == code


def test_samples_that_cannot_be_judged_are_wrong_usage(samples: Path, data: Path, tmp_path: Path) -> None:
    (samples / "03.txt").unlink()
    assert refused(samples, data) == "prompt_missing"
    (samples / "03.png").unlink()
    whole = (samples / "04.png").read_bytes()
    (samples / "04.png").write_bytes(whole[: len(whole) // 2])
    assert "04.png" in problem_of(samples, data)
    (samples / "04.png").write_bytes(whole)
    (samples / "05.txt").write_bytes(b"\xff\xfe\x00\xd8")
    assert refused(samples, data) == "sample_unreadable"
    for path in sorted(samples.glob("*.png"))[3:]:
        path.unlink()
    assert refused(samples, data) == "too_few_samples"
    assert refused(tmp_path / "absent", data) == "folder_missing"


def test_other_images_that_cannot_be_judged_are_wrong_usage(samples: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(samples, data, tmp_path / "empty") == "too_few_samples"
    assert refused(samples, data, tmp_path / "absent") == "folder_missing"
    few = tmp_path / "few"
    few.mkdir()
    for number in range(3):
        shutil.copy(data / f"{number:02}.png", few)
    assert refused(samples, few) == "too_few_images"
    broken = Path(shutil.copytree(data, tmp_path / "broken"))
    (broken / "03.png").write_bytes((broken / "03.png").read_bytes()[:-400])
    assert "03.png" in problem_of(samples, broken)
    with pytest.raises(UsageError):
        judged(samples, tmp_path / "absent")


def problem_of(samples: Path, data: Path) -> str:
    with pytest.raises(UsageError) as caught:
        judged(samples, data)
    return caught.value.problems[0].message


def test_an_autoencoder_that_keeps_too_little_leaves_it_open(good: Path, data: Path, tmp_path: Path) -> None:
    """Of random weights, it keeps nothing."""
    model = save_tiny_model(tmp_path)
    config = Config.model_validate({"model": {"path": str(model)}, "data": {"resolution": 64}})
    report = judge_images(good, data, None, config, lambda line: None)
    assert report.outcome == "unresolved"
    assert not any(report.parts[name].measure for name in BY_SAMPLES)
    assert report.numbers["images"]["decibels"] < 24
