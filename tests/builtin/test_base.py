"""The built-in model as shipped in the package."""

from __future__ import annotations

import json

import pytest

from builtin_base.judge import fixed_prompts, judge, sample, shares
from lora_trainer.builtin import BASE_FOLDER

pytestmark = pytest.mark.skipif(not (BASE_FOLDER / "unet").is_dir(), reason="the base has not been trained yet")


def test_size_format_and_card() -> None:
    files = [path for path in BASE_FOLDER.rglob("*") if path.is_file()]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert {path.parent.name for path in weights} == {"text_encoder", "unet", "vae"}
    sizes = {path.parent.name: path.stat().st_size for path in weights}
    assert sum(sizes.values()) <= 40_000_000
    assert sizes["vae"] <= 12_000_000
    assert not [path for path in files if path.suffix not in {".safetensors", ".json", ".txt", ".md"}]
    card = (BASE_FOLDER / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card


def test_is_a_stable_diffusion_1_5_by_its_files() -> None:
    index = json.loads((BASE_FOLDER / "model_index.json").read_text(encoding="utf-8"))
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["unet"][1] == "UNet2DConditionModel"
    assert index["vae"][1] == "AutoencoderKL"


def test_images_follow_their_prompts() -> None:
    prompts, scenes = fixed_prompts()
    found = shares([judge(image) for image in sample(BASE_FOLDER, prompts[:8], batch=8)], scenes[:8])
    # 95 % of 64 is what the script measures; of eight, one may be wrong.
    assert found["wholly right"] >= 7 / 8
