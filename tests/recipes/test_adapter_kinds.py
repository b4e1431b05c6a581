"""Runs with each kind of adapter: resumed exactly, planned, exported, inspected, read back; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.core.errors import UsageError
from lora_trainer.models.lora_names import read_adapter, read_lora
from tests.recipes.recipe import Bench, exported, losses, record

TITLES = {"dora": "DoRA", "lokr": "LoKr", "loha": "LoHa", "oft": "OFT"}


@pytest.mark.parametrize("kind", TITLES)
def test_a_run_of_each_kind(kind: str, bench: Bench, capsys: pytest.CaptureFixture[str]):
    """With a text encoder, on bf16 layers whose masters are fp32, and convolutions."""
    settings = {
        "lora__type": kind,
        "lora__target_modules": '["*.attn1.to_q","*.conv1"]',
        "memory__weight_dtype": "bf16",
        "checkpoint__every_n_steps": 2,
        "text_encoder__learning_rates": "[1e-2]",
    }
    assert bench.run("straight", steps=3, **settings) == 0
    assert f"{TITLES[kind]} files: exact in LyCORIS" in " ".join(capsys.readouterr().out.split())
    assert bench.run("resumed", steps=2, **settings) == 0
    assert bench.run("resumed", "--resume", steps=3, **settings) == 0
    files = exported(bench.folder("straight"))
    assert exported(bench.folder("resumed")) == files
    assert len(set(losses(bench.folder("straight")))) == 3
    kohya = bench.folder("straight") / "straight.safetensors"
    one, other = read_adapter(kohya), read_adapter(kohya.with_suffix(".diffusers.safetensors"))
    assert {name.partition(".")[0] for name in one.modules} == {"unet", "text_encoder"}
    for name, update in one.modules.items():
        weight = torch.ones(*update.weight_shape, *([3] if len(update.weight_shape) == 1 else []))
        assert torch.equal(update.delta(weight), other.modules[name].delta(weight)), name
    with pytest.raises(UsageError, match=f"is {TITLES[kind]}, not a plain LoRA"):
        read_lora(kohya)
    capsys.readouterr()
    assert main(["inspect", str(kohya), "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert inspected["kind"].startswith(TITLES[kind])
    assert inspected["modules"] == len(one.modules)
    assert main(bench.arguments("planned", command="plan", **settings)) == 0
    assert "GiB" in capsys.readouterr().out


def test_the_gate_and_samples_work_with_another_kind(bench: Bench):
    settings = {"lora__type": "lokr", "gates__lora_check": "lite", "gates__lora": 0}
    bench.run("checked", steps=2, **settings)
    report = record(bench.folder("checked"))["lora"]
    assert report["parts"]["works"]["value"] == 1.0
    assert report["numbers"]["health"]["rank_used"] is None
    assert list(bench.folder("checked").rglob("*.png"))


def test_settings_that_a_kind_lacks_are_refused(bench: Bench, capsys: pytest.CaptureFixture[str]):
    settings = {"lora__type": "oft", "lora__alpha": 2, "lora__dropout": 0.1}
    assert bench.run("refused", **settings) == 2
    said = " ".join(capsys.readouterr().err.split())
    for setting in ("alpha", "dropout"):
        assert f"lora.{setting}" in said
        assert f"Set lora.type=lora, or remove lora.{setting}." in said
