"""Well-known SDXL models are recognized by their metadata, their keys or their names, and reported when a run starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.presets import preset_layers
from lora_trainer.config.schema import ModelSection
from lora_trainer.core.errors import UsageError
from lora_trainer.models.family import PREDICTIONS
from lora_trainer.models.noise_schedule import make_process
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single import tokenizers
from lora_trainer.models.single.recognize import recognize
from lora_trainer.run.bases.find import find_base
from lora_trainer.run.messages import known_base_line, unmarked_velocity_line
from lora_trainer.run.sampling import prefixed
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.recipes.recipe import draw_images

SDXL = replace(public_architecture("sdxl").facts, path=Path("/laid/out"), named="")


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("ponyDiffusionV6XL_v6StartWithThisOne.safetensors", "pony"),
        ("autismmixSDXL_autismmixPony.safetensors", "pony"),
        ("OnomaAIResearch/Illustrious-xl-early-release-v0", "illustrious"),
        ("waiIllustriousSDXL_v160.safetensors", "illustrious"),
        ("Laxhar/noobai-XL-Vpred-1.0", "noobai"),
        ("NoobAI-XL-v1.1.safetensors", "noobai"),
        ("noobaiIllustriousMerge.safetensors", "noobai"),
        ("ponytail-xl.safetensors", None),
    ],
)
def test_recognized_by_its_name(path: str, known: str | None) -> None:
    line = known_base_line(resolve([]), replace(SDXL, named=path))
    assert (line or "").startswith(f"base model: {known} by its name " if known else "")
    assert bool(line) == bool(known)


def test_metadata_counts_before_the_name_and_only_the_family_of_the_preset() -> None:
    named = replace(SDXL, named="pony-like.safetensors")
    titled = replace(named, title="Illustrious-XL-v1.0")
    line = known_base_line(resolve([]), titled)
    assert line == (
        "base model: illustrious by the title 'Illustrious-XL-v1.0' in its metadata."
        " --preset illustrious sets captions and sample prompts for it"
    )
    prefixed_by_hand = resolve([Layer("--set", {"sample": {"prompt_prefix": "masterpiece"}})])
    assert "--preset" not in str(known_base_line(prefixed_by_hand, titled))
    assert known_base_line(resolve([]), replace(titled, family="flux")) is None


def test_a_chosen_preset_is_not_advised_again_and_a_contradiction_is_a_warning() -> None:
    named = replace(SDXL, named="ponyDiffusionV6XL.safetensors")
    cleared = Layer("--set", {"sample": {"prompt_prefix": ""}})
    chosen = resolve([*preset_layers(["pony"]).layers, cleared])
    assert known_base_line(chosen, named) == "base model: pony by its name ponyDiffusionV6XL.safetensors"
    other = known_base_line(resolve([*preset_layers(["illustrious"]).layers, cleared]), named)
    assert other == (
        "warning: base model: pony by its name ponyDiffusionV6XL.safetensors, and --preset illustrious is for another."
        " --preset pony is for this one"
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("zobo, on grass", "masterpiece, best quality, zobo, on grass"),
        ("zobo, best quality", "masterpiece, zobo, best quality"),
        ("", "masterpiece, best quality"),
    ],
)
def test_a_prefix_adds_the_tags_that_a_prompt_lacks(prompt: str, expected: str) -> None:
    assert prefixed(prompt, "masterpiece, best quality") == expected
    assert prefixed(prompt, "") == prompt


def planned(folder: Path, file: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What a dry run on a checkpoint prints, in one line."""
    data = folder / "data"
    if not data.exists():
        draw_images(data, 6)
    command = ["train", "--model", str(file), "--data", str(data), "--output", str(folder / "runs"), "--dry-run"]
    usual = ("data.resolution=64", "gates.dataset=0", f"cache.dir={folder / 'cache'}")
    assert main([*command, *(word for each in usual for word in ("--set", each)), *more]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_checkpoint_that_predicts_velocity_says_by_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NoobAI's V-Pred files hold two empty tensors, and merges keep them; a title in the metadata names the base."""
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    tensors = unet_checkpoint(tiny_pipeline(tmp_path / "words", "sdxl", "epsilon"), "sdxl")
    marks = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    file = write(tensors | marks, tmp_path / "merge.safetensors", {"modelspec.title": "NoobAI-XL V-Pred 1.0"})
    printed = planned(tmp_path, file, capsys, "--preset", "noobai")
    assert "base model: noobai by the title 'NoobAI-XL V-Pred 1.0' in its metadata" in printed
    assert "prediction: velocity (v_prediction) by its key v_pred and its key ztsnr;" in printed
    assert "the last timestep holds no signal (zero terminal SNR)" in printed


def test_a_checkpoint_that_is_v_pred_by_its_name_alone_warns_until_its_prediction_type_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Merges lose the key `v_pred`. The folder `pony` is not the model's name."""
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    tensors = unet_checkpoint(tiny_pipeline(tmp_path / "words", "sdxl", "epsilon"), "sdxl")
    (tmp_path / "pony").mkdir()
    file = write(tensors, tmp_path / "pony" / "mergeXL_vPred10.safetensors")
    printed = planned(tmp_path, file, capsys)
    assert "warning: mergeXL_vPred10.safetensors looks like a model that predicts velocity (V-Pred)" in printed
    assert "set model.prediction_type=v_prediction" in printed
    assert "base model:" not in printed
    velocity = planned(tmp_path, file, capsys, "--set", "model.prediction_type=v_prediction")
    assert "looks like" not in velocity
    assert "prediction: velocity (v_prediction) by model.prediction_type;" in velocity
    assert "the last timestep holds some signal" in velocity
    noise = planned(tmp_path, file, capsys, "--set", "model.prediction_type=epsilon")
    assert "looks like" not in noise
    assert "velocity" not in noise
    folders = [find_base(ModelSection(path=str(file), prediction_type=each)).folder for each in PREDICTIONS]
    assert [make_process(folder).prediction for folder in folders] == [*PREDICTIONS], "each has a folder of its own"


@pytest.mark.parametrize(
    ("named", "title", "warned"),
    [
        ("noobaiXL_vPred10.safetensors", "", "set model.prediction_type=v_prediction"),
        ("Laxhar/noobai-XL-Vpred-1.0", "", "set prediction_type in it to v_prediction"),
        ("merge.safetensors", "NoobAI V_Pred", "NoobAI V_Pred looks like"),
        ("improved.safetensors", "", None),
    ],
)
def test_v_pred_in_a_name_or_title_is_compared_with_the_prediction_type(
    named: str, title: str, warned: str | None
) -> None:
    facts = replace(SDXL, named=named, title=title)
    line = unmarked_velocity_line(resolve([]).config, facts)
    assert line is None if warned is None else warned in str(line)
    assert unmarked_velocity_line(resolve([]).config, replace(facts, prediction="v_prediction")) is None


def test_a_prediction_type_is_refused_where_files_decide_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_pipeline(tmp_path / "words", "sdxl", "epsilon").save_pretrained(folder)
    with pytest.raises(UsageError, match="a folder with a scheduler of its own"):
        find_base(ModelSection(path=str(folder), prediction_type="v_prediction"))
    flow = write({"joint_blocks.0.x_block.attn.qkv.weight": torch.zeros(6, 2)}, tmp_path / "sd3.safetensors")
    with pytest.raises(UsageError, match="flow model"):
        recognize(flow, prediction="epsilon")
