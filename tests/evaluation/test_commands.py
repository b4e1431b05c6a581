"""`validate` and `sample` through the command, on a tiny base model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lora_trainer.cli.main import main
from lora_trainer.cli.sample import GridFolder, sample_command
from lora_trainer.cli.validate import validate_command
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import UsageError
from lora_trainer.core.io import write_json
from lora_trainer.data.manifest import read_manifest
from lora_trainer.evaluation.evidence import RealImages
from lora_trainer.evaluation.lora_check import LORA_CHECKS, LoraGate, check_lora
from lora_trainer.evaluation.sample_rates import BY_SAMPLES
from lora_trainer.evaluation.verdict import SCALES
from lora_trainer.lora_format.keys import OWN_VERSION
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import write_learned_tokens, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import read_lora
from lora_trainer.run import encoding
from lora_trainer.run.reading import read_as_trained
from tests.lora_format.tiny import facts, random_lora, tiny_pipeline

LITE = ("--set", "gates.lora_check=lite")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_pipeline(folder / "tokenizer").save_pretrained(folder)
    return folder


@pytest.fixture
def lora(base: Path, tmp_path: Path) -> Path:
    unet = FAMILIES["sd15"].denoiser.load(base, torch.float32, torch.device("cpu"))
    return write_lora(tmp_path / "run", "cat", random_lora(unet, size=0.05), facts())[0]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(9):
        Image.new("RGB", (64, 64), (index * 20, 90, 30)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text("a red circle", encoding="utf-8")
    return folder


def on(base: Path, **sample: object) -> Config:
    return Config.model_validate({"model": {"path": str(base)}, "sample": sample})


def test_a_file_in_kohya_format_gets_the_same_score(lora: Path, base: Path, tmp_path: Path) -> None:
    theirs, judged = tmp_path / "peft.safetensors", {}
    own = {f"base_model.model.{name.removeprefix('unet.')}": pair for name, pair in read_lora(lora).modules.items()}
    save_file(
        {
            f"{name}.lora_{half}.weight": t
            for name, pair in own.items()
            for half, t in (("A", pair.down), ("B", pair.up))
        },
        theirs,
    )
    for path in (lora, theirs):
        judged[path] = check_lora(path, base, FAMILIES["sd15"], RealImages(), LoraGate(check="lite"))
    one, other = (judged[path] for path in (lora, theirs))
    assert one.numbers["drift"] == pytest.approx(other.numbers["drift"], rel=1e-3)
    assert one.score == pytest.approx(other.score)


def test_json_is_one_document_on_stdout(
    lora: Path, base: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["validate", str(lora), "--model", str(base), "--data", str(images), "--json", *LITE])
    output = capsys.readouterr()
    document = json.loads(output.out)
    measured = document["numbers"]["images"]
    assert (measured["trained"], measured["unseen"]) == (9, 0)
    assert measured["decibels"] < 24, "the autoencoder of the tiny model has random weights"
    assert document["cannot_tell"]
    assert list(document["parts"]) == list(SCALES)
    assert all({"value", "low", "high", "measured"} <= part.keys() for part in document["parts"].values())
    assert document["outcome"] in ("passed", "refused", "unresolved")
    assert code == (0 if document["outcome"] == "passed" else 4)
    assert document["cost"]["forward_passes"] > 0
    assert "9 images" in output.err


def test_a_lora_of_the_base_is_drawn_and_judged_on_the_distilled_model(
    lora: Path,
    base: Path,
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its own four steps without a guidance scale, where the base takes more and guides."""
    monkeypatch.setitem(LORA_CHECKS, "lite", replace(LORA_CHECKS["lite"], steps=8))
    distilled = tmp_path / "distilled"
    shutil.copytree(base, distilled)
    path = distilled / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "timestep_spacing": "trailing"}))
    main(["validate", str(lora), "--model", str(distilled), "--data", str(images), "--json", *LITE])
    output = capsys.readouterr()
    assert json.loads(output.out)["outcome"] in ("passed", "refused", "unresolved")
    assert "in 4 steps each" in output.err
    drawn = ["sample", str(lora), "--model", str(distilled), "--prompt", "a ring", "--size", "64x64"]
    assert main([*drawn, "--output", str(tmp_path / "drawn")]) == 0
    (recipe,) = (tmp_path / "drawn").rglob("*.json")
    document = json.loads(recipe.read_text())
    assert (document["steps"], document["guidance"]) == (4, None)


def test_the_runs_own_validation_images_are_found(
    lora: Path, base: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"model": {"path": str(base)}, "data": {"sources": [str(images)]}, "validation": {"split": 0.1}}
    run = Config.model_validate(settings)
    data_hash = read_manifest([images])[0].data_hash
    document = {"config": run.model_dump(mode="json"), "data_hash": data_hash}
    write_json(lora.parent / "run.json", document)
    code = main(["validate", str(lora), *LITE])
    output = capsys.readouterr()
    assert "compared with 9 images of its run, 1 of them not trained on" in output.err
    assert code == 4
    assert "validation loss" in output.out


def test_images_of_changed_data_do_not_count_as_validation(
    lora: Path, base: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"model": {"path": str(base)}, "data": {"sources": [str(images)]}, "validation": {"split": 0.1}}
    run = Config.model_validate(settings)
    data_hash = read_manifest([images])[0].data_hash
    document = {"config": run.model_dump(mode="json"), "data_hash": data_hash}
    write_json(lora.parent / "run.json", document)
    (images / "3.txt").write_text("another caption", encoding="utf-8")
    for data in ([], ["--data", str(images)]):
        main(["validate", str(lora), "--json", *data, *LITE])
        output = capsys.readouterr()
        assert data or "the run's data has changed" in output.err
        found = json.loads(output.out)["numbers"]["images"]
        assert (found["trained"], found["unseen"]) == (9, 0)


def test_an_unreadable_image_is_named(lora: Path, base: Path, images: Path) -> None:
    whole = (images / "4.png").read_bytes()
    (images / "4.png").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(UsageError, match=r"4\.png"):
        validate_command(lora, images, True, on(base))


def test_a_lora_of_another_family_is_refused_before_images_are_encoded(
    base: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(encoding, "encode_samples", lambda *_: pytest.fail("images were encoded"))
    foreign = LoraWeights({"unet.mid_block.nowhere": LoraPair(torch.ones(2, 9), torch.ones(9, 2), 2.0)})
    assert validate_command(write_lora(tmp_path, "other", foreign, facts())[0], images, True, on(base)) == 4
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "key_does_not_fit"


def validated(lora: Path, base: Path, capsys: pytest.CaptureFixture[str], *extra: str) -> dict[str, Any]:
    """The report of the command, which ends with 4 unless the LoRA passes."""
    code = main(["validate", str(lora), "--model", str(base), "--json", *LITE, *extra])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if document["outcome"] == "passed" else 4)
    return document


def test_without_images_nothing_is_decided_and_the_report_says_what_would(
    lora: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A LoRA that works and keeps the base: only its effect on images is unknown."""
    document = validated(lora, base, capsys)
    assert document["outcome"] == "unresolved"
    assert not any(document["parts"][name]["measured"] for name in BY_SAMPLES)
    assert document["parts"]["works"]["measured"]
    (warning,) = [finding for finding in document["findings"] if finding["severity"] == "warning"]
    assert warning["code"] == "not_compared"
    assert "--data" in warning["fix"]


def test_with_fewer_than_four_images_samples_are_not_compared(
    lora: Path, base: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3, 9):
        (images / f"{index}.png").unlink()
        (images / f"{index}.txt").unlink()
    document = validated(lora, base, capsys, "--data", str(images))
    for name in BY_SAMPLES:
        assert not document["parts"][name]["measured"]
        assert "3 images of the dataset" in document["parts"][name]["reason"]
    (warning,) = [each for each in document["findings"] if each["severity"] == "warning"]
    assert "3 images of the dataset" in warning["message"]
    assert "--data" not in warning["fix"]  # it was given


def test_a_lora_of_noise_does_not_pass(
    base: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unet = FAMILIES["sd15"].denoiser.load(base, torch.float32, torch.device("cpu"))
    noise = write_lora(tmp_path, "noise", random_lora(unet, size=0.5), facts())[0]
    document = validated(noise, base, capsys, "--data", str(images))
    assert document["outcome"] != "passed"
    assert document["parts"]["works"]["value"] == 1.0
    refused = {finding["code"] for finding in document["findings"] if finding["severity"] == "error"}
    assert refused <= set(SCALES) - {"works"}


def test_wrong_paths_are_wrong_usage(lora: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no LoRA file"):
        validate_command(tmp_path / "absent.safetensors", None, True, on(base))
    with pytest.raises(UsageError, match="no model"):
        validate_command(lora, None, True, on(tmp_path / "absent"))
    with pytest.raises(UsageError, match="no folder"):
        validate_command(lora, tmp_path / "absent", True, on(base))
    foreign = LoraWeights({"unet.mid_block.nowhere": LoraPair(torch.ones(2, 9), torch.ones(9, 2), 2.0)})
    other = write_lora(tmp_path, "other", foreign, facts())[0]
    with pytest.raises(UsageError, match="no module of the model"):
        sample_command(other, ["a red circle"], on(base))
    with pytest.raises(UsageError, match="no prompt"):
        sample_command(lora, [], on(base))


def test_sample_writes_a_sheet(lora: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = on(base, num_inference_steps=2)
    assert sample_command(lora, ["a red circle"], config, seeds=[5]) == 0
    sheet = Path(capsys.readouterr().out.strip())
    assert sheet == lora.parent / "samples" / "cat_before_after.png"
    assert {path.name for path in sheet.parent.iterdir()} == {
        "cat_before_after.png",
        "cat_before_after.json",
        "cat_before_after_00_with.png",
        "cat_before_after_00_without.png",
    }
    before = sheet.read_bytes()
    assert sample_command(lora, ["a blue square"], config, seeds=[5]) == 0
    again = Path(capsys.readouterr().out.strip())
    assert again == sheet.with_name("cat_before_after-2.png")
    assert again.is_file()
    assert sheet.read_bytes() == before
    (sheet.parent / "cat_before_after_07_with.png").write_bytes(b"of a larger grid")
    assert (
        sample_command(lora, ["a blue square"], config, seeds=[5], output=GridFolder(sheet.parent, overwrite=True)) == 0
    )
    assert Path(capsys.readouterr().out.strip()) == sheet
    assert sheet.read_bytes() != before
    assert not (sheet.parent / "cat_before_after_07_with.png").exists()
    assert again.is_file()


def test_caption_settings_come_from_the_run_next_to_the_file(
    lora: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Config.model_validate({"model": {"path": str(base)}, "text_encoder": {"max_tokens": 150}})
    write_json(lora.parent / "run.json", {"config": run.model_dump(mode="json")})
    assert sample_command(lora, ["a ring"], on(base, num_inference_steps=1)) == 0
    recipe = Path(capsys.readouterr().out.strip()).with_suffix(".json")
    assert json.loads(recipe.read_text(encoding="utf-8"))["text"]["clip_tokens"] == 150


def test_model_settings_come_from_the_run_next_to_the_file(
    lora: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They override those of the run, and are no reason to search for another model."""
    run = Config.model_validate({"model": {"path": str(base)}})
    write_json(lora.parent / "run.json", {"config": run.model_dump(mode="json")})
    drawn = ["sample", str(lora), "--prompt", "a ring", "--num-inference-steps", "1", "--size", "64x64"]
    assert main([*drawn, "--set", "model.without_t5=false"]) == 0
    assert f"base model: {base}" in capsys.readouterr().err
    for command in (drawn, ["validate", str(lora)]):
        assert main([*command, "--set", f"model.vae={tmp_path / 'absent'}"]) == 2
        assert "There is no VAE at" in capsys.readouterr().err


def test_the_header_sets_the_schedule_and_invalid_numbers_are_ignored() -> None:
    messages: list[str] = []
    header = {OWN_VERSION: "0", "ss_clip_skip": "99", "ss_zero_terminal_snr": "True"}
    read = read_as_trained(Config(), None, header, messages.append)
    assert read.text_encoder == Config().text_encoder
    assert read.noise.zero_terminal_snr
    assert "99" in messages[0]
    assert not read_as_trained(Config(), None, {"ss_zero_terminal_snr": "True"}).noise.zero_terminal_snr


def test_learned_tokens_next_to_a_file_are_evaluated_with_it(base: Path, tmp_path: Path) -> None:
    unet = FAMILIES["sd15"].denoiser.load(base, torch.float32, torch.device("cpu"))
    weights = replace(random_lora(unet, size=0.05), embeddings={"<zobo>.string_to_param.*": torch.randn(2, 32) * 9})
    written = write_lora(tmp_path, "cat", weights, facts())
    (word,) = write_learned_tokens(tmp_path, "cat", weights)
    drifts = [_drift(path, base) for path in written]
    word.unlink()
    assert drifts[0] == drifts[1] != _drift(written[1], base)


def _drift(lora: Path, base: Path) -> object:
    gate = LoraGate(check="lite", prompts=("a <zobo>",))
    return check_lora(lora, base, FAMILIES["sd15"], RealImages(), gate).numbers["drift"]
