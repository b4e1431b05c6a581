"""Well-known SDXL models are recognized by their metadata, their keys or their names, and reported when a run starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.config.presets import BASES, presets
from lora_trainer.config.schema import Config, ModelSection, SampleSection
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single import tokenizers
from lora_trainer.run.messages import KNOWN_BASES, known_base_line
from lora_trainer.run.sampling import prefixed
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.recipes.recipe import draw_images

SDXL = replace(public_architecture("sdxl").facts, path=Path("/laid/out"), named="")


def test_every_base_preset_has_its_names() -> None:
    assert set(KNOWN_BASES) == {name for name, preset in presets().items() if preset.kind == BASES}


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("models/ponyDiffusionV6XL_v6StartWithThisOne.safetensors", "pony"),
        ("autismmixSDXL_autismmixPony.safetensors", "pony"),
        ("OnomaAIResearch/Illustrious-xl-early-release-v0", "illustrious"),
        ("waiIllustriousSDXL_v160.safetensors", "illustrious"),
        ("Laxhar/noobai-XL-Vpred-1.0", "noobai"),
        ("NoobAI-XL-v1.1.safetensors", "noobai"),
        ("ponytail-xl.safetensors", None),
        ("/home/pony/models/sdxl/sd_xl_base_1.0.safetensors", None),
    ],
)
def test_recognized_by_its_name(path: str, known: str | None) -> None:
    line = known_base_line(Config(model=ModelSection(path=path)), SDXL)
    assert (line or "").startswith(f"base model: {known} by its name " if known else "")
    assert bool(line) == bool(known)


def test_metadata_counts_before_the_name_and_only_the_family_of_the_preset() -> None:
    config = Config(model=ModelSection(path="pony-like.safetensors"))
    titled = replace(SDXL, title="Illustrious-XL-v1.0")
    line = known_base_line(config, titled)
    assert line == (
        "base model: illustrious by the title 'Illustrious-XL-v1.0' in its metadata."
        " --preset illustrious sets captions and sample prompts for it"
    )
    chosen = config.model_copy(update={"sample": SampleSection(prompt_prefix="masterpiece")})
    assert "--preset" not in str(known_base_line(chosen, titled))
    assert known_base_line(config, replace(titled, family="flux")) is None


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


def test_a_checkpoint_that_predicts_velocity_says_by_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NoobAI's V-Pred files hold two empty tensors, and merges keep them; a title in the metadata names the base."""
    monkeypatch.setattr(tokenizers, "CLIP", tmp_path / "words")
    tensors = unet_checkpoint(tiny_pipeline(tmp_path / "words", "sdxl", "epsilon"), "sdxl")
    marks = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    file = write(tensors | marks, tmp_path / "merge.safetensors", {"modelspec.title": "NoobAI-XL V-Pred 1.0"})
    data = draw_images(tmp_path / "data", 6)
    command = ["train", "--model", str(file), "--data", str(data), "--output", str(tmp_path / "runs"), "--dry-run"]
    more = ["--set", "data.resolution=64", "--set", "gates.dataset=0", "--set", f"cache.dir={tmp_path / 'cache'}"]
    assert main([*command, *more, "--preset", "noobai"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "base model: noobai by the title 'NoobAI-XL V-Pred 1.0' in its metadata" in printed
    assert "prediction: velocity (v_prediction) by its key v_pred and its key ztsnr;" in printed
    assert "the last timestep holds no signal (zero terminal SNR)" in printed
