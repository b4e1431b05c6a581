"""Bases of other shapes, untrained: the project recognizes them and trains on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import CLIPTokenizer

from builtin_base.architecture import LATENT_CHANNELS
from builtin_base.judge import sample
from builtin_base.shapes import SHAPES, T5_TOKENS, TOKENS, encode, flow_prediction
from builtin_base.train import main as train
from lora_trainer.builtin import BASE_FOLDER, DATA_FOLDER
from lora_trainer.cli.main import main

FAMILIES = {"sd15": "sd15", "sdxl": "sdxl", "flow": "sd3"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_base_is_made_resumed_and_trained_on(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [str(tmp_path / "base"), "--work", str(tmp_path / "work"), "--vae", str(BASE_FOLDER / "vae")]
    for steps in ("1", "2", "2"):
        train([shape, *places, "--images", "6", "--views", "0", "--batch", "2", "--steps", steps])
    assert "base: 2 steps" in capsys.readouterr().out
    assert sample(tmp_path / "base", ["red ring, blue background"], steps_and_guidance=(1, 5.0))[0].size == (128, 128)
    data = ["--model", str(tmp_path / "base"), "--data", str(DATA_FOLDER), "--output", str(tmp_path), "--name", "lora"]
    settings = ("gates.lora_check=off", "sample.every_n_steps=0", "sample.count=1", "sample.num_inference_steps=1")
    assert main(["train", *data, "--max-steps", "1", *(part for each in settings for part in ("--set", each))]) == 0
    assert (tmp_path / "lora" / "lora.safetensors").is_file()
    assert json.loads((tmp_path / "lora" / "run.json").read_text())["model"]["family"] == FAMILIES[shape]


def test_training_continues_from_a_base(tmp_path: Path) -> None:
    """After no step of its own it is the base that it started from."""
    quick = ["--images", "6", "--views", "0", "--batch", "2", "--minutes", "0"]
    train(["sd15", str(tmp_path / "base"), "--work", str(tmp_path / "work"), "--start", str(BASE_FOLDER), *quick])
    for part in ("unet", "text_encoder", "vae"):
        (ours,), (theirs,) = ((place / part).glob("*.safetensors") for place in (tmp_path / "base", BASE_FOLDER))
        assert ours.read_bytes() == theirs.read_bytes(), part


def test_one_zero_that_counts_many_times_is_as_many_zeros() -> None:
    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(BASE_FOLDER / "tokenizer", model_max_length=TOKENS, local_files_only=True)
    parts = SHAPES["flow"].make(tokenizer).double().eval()
    for parameter in parts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.tensor(tokenizer(["red ring, blue background"], padding="max_length").input_ids)
    noisy, timestep = torch.randn(1, LATENT_CHANNELS, 16, 16).double(), torch.tensor([300.0]).double()
    with torch.no_grad():
        outputs = [encode(parts[name], ids) for name in ("text_encoder", "text_encoder_2")]
        context = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        context = torch.cat([context, context.new_zeros(1, T5_TOKENS, context.shape[-1])], dim=1)
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
        whole = parts["transformer"](noisy, context, pooled, timestep).sample
        torch.testing.assert_close(flow_prediction(parts, noisy, ids, timestep), whole)
