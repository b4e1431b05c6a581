"""Runs with each kind of adapter: resumed exactly, planned, exported, inspected, read back; and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.cli.main import main
from lora_trainer.core.errors import UsageError
from lora_trainer.lora_format.layer_updates import LayerUpdate
from lora_trainer.models.lora_names import read_adapter, read_lora
from tests.recipes.recipe import Bench, exported, losses, record, save_tiny_model

TITLES = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr", "loha": "LoHa", "oft": "OFT"}
EXACT = {"checkpoint__export_weights": "last", "checkpoint__export_dtype": "fp32"}
STILL = {**EXACT, "optimizer__learning_rate": 1e-12, "optimizer__weight_decay": 0}


def test_every_kind_is_tested():
    assert set(TITLES) == set(ADAPTERS)


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
    readers = f"{TITLES[kind]} files: exact in LyCORIS"
    assert (readers in " ".join(capsys.readouterr().out.split())) == (kind != "lora")
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
    if kind != "lora":
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


def change_of(update: LayerUpdate) -> torch.Tensor:
    """Of a weight of other numbers for each entry."""
    shape = update.weight_shape if len(update.weight_shape) > 1 else (*update.weight_shape, 3)
    return update.delta(torch.linspace(-1.0, 1.0, int(torch.tensor(shape).prod())).reshape(shape))


@pytest.mark.parametrize(("kind", "family"), [("lokr", "flux"), ("dora", "sd3"), ("dora", "flux"), ("lokr", "sd3")])
def test_transformers_with_fused_layers(
    kind: str, family: str, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Both files hold the trained change of each of q, k and v, and another run starts from it."""
    bench = replace(bench, model=save_tiny_model(tmp_path, family))
    settings = {"lora__type": kind, "lora__target_modules": "attention+ff", "data__resolution": 64}
    assert bench.run("first", steps=2, checkpoint__every_n_steps=2, **settings, **EXACT) == 0
    folder = bench.folder("first")
    values = load_file(folder / "checkpoints" / "step-000002" / "adapter.safetensors")
    trained = ADAPTERS[kind].load().updates(values, "transformer", AdapterOptions(4, 4.0))
    for path in (folder / "first.safetensors", folder / "first.diffusers.safetensors"):
        read = read_adapter(path).modules
        assert read.keys() == trained.keys()
        for name, update in trained.items():
            torch.testing.assert_close(change_of(read[name]), change_of(update), rtol=1e-5, atol=1e-7)
    start = {"lora__network_weights": folder / "first.safetensors", **STILL, "lora__alpha": 3}
    assert bench.run("second", steps=1, **settings, **start) == 0
    assert f"starts from first.safetensors, {len(trained)} modules" in " ".join(capsys.readouterr().out.split())
    for name, update in read_adapter(bench.folder("second") / "second.safetensors").modules.items():
        torch.testing.assert_close(change_of(update), change_of(trained[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_header_names_lora_plus_and_t_lora(kind: str, bench: Bench, capsys: pytest.CaptureFixture[str]):
    settings = {"lora__loraplus_lr_ratio": 4.0, "lora__timestep_min_rank": 2, "lora__type": kind}
    assert bench.run("plus", steps=1, **settings, **EXACT) == 0
    assert "T-LoRA: trains 2 rows" in capsys.readouterr().out
    assert main(["inspect", str(bench.folder("plus") / "plus.safetensors"), "--json"]) == 0
    args = json.loads(json.loads(capsys.readouterr().out)["header"]["ss_network_args"])
    assert (args["loraplus_lr_ratio"], args["timestep_min_rank"], args["timestep_rank_exponent"]) == (4.0, 2, 1.0)


def test_files_that_a_run_cannot_start_from(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of another kind, of several kinds, with other factors: nothing is loaded, and the message has the fix."""
    linear = {"lora__target_modules": '["*.attn1.to_q","*.attn1.to_k"]'}
    assert bench.run("first", steps=1, lora__type="lokr", **linear, **EXACT) == 0
    assert bench.run("plain", steps=1, **linear, **EXACT) == 0
    lokr, plain = (bench.folder(name) / f"{name}.safetensors" for name in ("first", "plain"))
    mixed = {key: each for key, each in load_file(lokr).items() if "to_q" in key}
    save_file(
        mixed | {key: each for key, each in load_file(plain).items() if "to_k" in key}, tmp_path / "mixed.safetensors"
    )
    capsys.readouterr()
    for settings, expected in (
        (
            {"lora__network_weights": lokr},
            "It is LoKr, and lora.type=lora trains LoRA. Set lora.type=lokr, or write it as",
        ),
        (
            {"lora__network_weights": plain, "lora__type": "oft"},
            "It is LoRA, and lora.type=oft trains OFT. Set lora.type=lora",
        ),
        (
            {"lora__network_weights": tmp_path / "mixed.safetensors", "lora__type": "lokr"},
            "and a run trains one. Write it as a LoRA",
        ),
        ({"lora__network_weights": lokr, "lora__type": "lokr", "lora__lokr_factor": 2}, "Set lora.lokr_factor=-1."),
    ):
        assert bench.run("refused", **linear, **settings) == 2
        assert expected in " ".join(capsys.readouterr().err.split())
    assert not (bench.folder("refused") / "run.json").exists()


@pytest.mark.parametrize("kind", ["dora", "lokr", "loha", "oft"])
def test_a_rank_above_a_layers_size_is_refused(kind: str, bench: Bench, capsys: pytest.CaptureFixture[str]):
    assert bench.run("refused", lora__type=kind, lora__rank_pattern='{"*.to_q" = 4000}') == 2
    assert "lora.rank_pattern: rank 4000 is above the size of" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("kind", "setting", "reason"),
    [
        ("lora", "lokr_factor=4", "only a Kronecker product has factors. Set lora.type=lokr"),
        ("dora", "init_lora_weights=pissa", "its magnitudes start at the norms"),
        ("lokr", "loraplus_lr_ratio=4", "it is about the up and down projections of a LoRA"),
        ("lokr", "timestep_min_rank=2", "a whole w2 has no rows"),
        ("loha", "timestep_min_rank=2", "a matrix of its own as large as the weight"),
        ("loha", "loraplus_lr_ratio=4", "up and down projections"),
        ("oft", "timestep_min_rank=2", "its rank is the size of a block"),
        ("oft", 'alpha_pattern={"*" = 2.0}', "a rotation has no scale"),
    ],
)
def test_a_refusal_has_its_reason(
    kind: str, setting: str, reason: str, bench: Bench, capsys: pytest.CaptureFixture[str]
):
    assert bench.run("refused", "--set", f"lora.{setting}", lora__type=kind) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
