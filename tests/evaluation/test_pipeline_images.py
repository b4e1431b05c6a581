"""`lora-trainer sample` generates what diffusers' own pipeline does with the model's folder and the LoRA's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from lora_trainer.cli.main import main
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of
from tests.lora_format.tiny import facts, random_lora, tiny_pipeline

CPU = torch.device("cpu")
CASES = {"flux2": ("flux2", 4.0), "flux2-distilled": ("flux2", None), "chroma": ("chroma", 5.0)}
ENDINGS = ("to_q", "to_out.0", "to_qkv_mlp_proj", "proj_out")


@pytest.mark.parametrize("kind", CASES)
def test_images_equal_those_of_diffusers(kind: str, tmp_path: Path) -> None:
    name, guidance = CASES[kind]
    family, base = FAMILIES[name], tmp_path / "base"
    tiny_pipeline(tmp_path / "tokenizer", kind).save_pretrained(base)
    weights = random_lora(family.denoiser.load(base, torch.float32, CPU), size=0.3, alpha=4.0, endings=ENDINGS)
    modules = {f"transformer.{key.partition('.')[2]}": pair for key, pair in weights.modules.items()}
    version, _ = family.lora_files.base_names(family.describe(base))
    kohya, diffusers = write_lora(
        tmp_path,
        "cat",
        type(weights)(modules),
        facts(base_version=version),
        FileLayout(names=names_of(family), dtype=torch.float32),
    )
    flags = ("--prompt", "a ring", "--size", "96x64", "--output", str(tmp_path / "out"), "--num-inference-steps", "4")
    assert main(["sample", str(kohya), "--model", str(base), *flags]) == 0
    recipe = json.loads((tmp_path / "out" / "cat_before_after.json").read_text(encoding="utf-8"))
    assert recipe["guidance"] == guidance
    pipeline: Any = DiffusionPipeline.from_pretrained(base, local_files_only=True)
    asked: dict[str, Any] = {"prompt": "a ring"}
    if name == "chroma":  # whose pipeline would add its mask to the scores
        with torch.no_grad():
            embeds, _, mask, other, _, other_mask = pipeline.encode_prompt("a ring", "")
        asked = {"prompt_embeds": embeds, "prompt_attention_mask": mask.bool()}
        asked |= {"negative_prompt_embeds": other, "negative_prompt_attention_mask": other_mask.bool()}
    for side in ("without", "with"):
        if side == "with":
            pipeline.load_lora_weights(str(diffusers.parent), weight_name=diffusers.name)
        generator = torch.Generator("cpu").manual_seed(recipe["images"][0]["seed"])
        sizes = {"width": 96, "height": 64, "num_inference_steps": 4, "guidance_scale": guidance or 1.0}
        theirs = np.asarray(pipeline(**asked, **sizes, generator=generator).images[0], dtype=int)
        ours = np.asarray(Image.open(tmp_path / "out" / f"cat_before_after_00_{side}.png"), dtype=int)
        assert np.abs(ours - theirs).max() <= 1, side
