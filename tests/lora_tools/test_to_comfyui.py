"""`convert --to comfyui`: a DoRA with which ComfyUI's own formula gives the trained change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.cli.main import main
from lora_trainer.lora_format.kinds.dora import DecomposedUpdate
from lora_trainer.lora_format.weights import AdapterWeights, adaptable_modules
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of, read_adapter
from tests.lora_format.tiny import facts
from tests.recipes.recipe import save_tiny_model


def by_comfyui(update: DecomposedUpdate, weight: Tensor, strength: float) -> Tensor:
    """What ComfyUI changes a weight by: its formula, which `tests/lora_format/test_comfyui.py` holds against its own results."""
    moved = weight + update.change.delta(weight).reshape(weight.shape)
    kept = weight.flatten(1).norm(dim=1).reshape(update.magnitude.shape)
    return strength * (moved * update.magnitude / kept - weight)


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", ["sd15", "flux", "sd3"])
def test_comfyui_computes_the_trained_change(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of a file of this program in fp32, on all layers of attention, fused ones and convolutions too; also at other strengths."""
    own, kind, options = FAMILIES[family], ADAPTERS["dora"].load(), AdapterOptions(4, 6.0)
    model = save_tiny_model(tmp_path, family)
    component = own.denoiser.component
    denoiser = own.denoiser.load(model, torch.float32, torch.device("cpu"), None)
    layers = {
        name.removeprefix(f"{component}."): each for name, each in adaptable_modules({component: denoiser}).items()
    }
    names = [name for name in layers if ".attn" in name or name.endswith("conv1")]
    bare = {name: layers[name].weight.detach().clone() for name in names}
    parameters = kind.inject(denoiser, names, options, 1)
    generator = torch.Generator().manual_seed(2)
    values = {
        name: each.detach() + 0.05 * torch.randn(each.shape, generator=generator) for name, each in parameters.items()
    }
    weights = AdapterWeights(kind.updates(values, component, options))
    _, architecture = own.lora_files.base_names(own.describe(model))
    layout = FileLayout(torch.float32, None, names_of(own), kind.forms)
    for path in write_lora(tmp_path, "cat", weights, facts(base_version="", architecture=architecture), layout):
        target = tmp_path / f"for {path.name}"
        assert (
            main(["convert", str(path), str(target), "--to", "comfyui", "--model", str(model), "--family", family]) == 0
        )
        raw = load_file(target)
        assert not any(
            key.startswith(f"{component}.") for key in raw
        )  # ComfyUI reads no magnitudes by diffusers' names
        found, before = read_adapter(target), read_adapter(path)
        assert found.modules.keys() == before.modules.keys() == weights.modules.keys()
        for name, trained in weights.modules.items():
            weight = bare[name.removeprefix(f"{component}.")]
            change, stored, unconverted = trained.delta(weight), found.modules[name], before.modules[name]
            assert isinstance(stored, DecomposedUpdate)
            assert isinstance(unconverted, DecomposedUpdate)
            assert gap(by_comfyui(unconverted, weight, 1.0), change) > 0.02
            for strength in (1.0, 0.5):
                assert gap(by_comfyui(stored, weight, strength), strength * change) < 1e-4, name
            assert gap(stored.delta(weight), change) < 1e-4  # this program knows what the file is
    capsys.readouterr()
    assert main(["inspect", str(target), "--json"]) == 0
    clients = {each["name"]: each["reads"] for each in json.loads(capsys.readouterr().out)["clients"]}
    shown = "unknown" if family == "sd3" else "whole"  # the header of these files does not name SD3
    assert (clients["ComfyUI"], clients["diffusers"]) == (shown, "not")
    plain = tmp_path / "plain.safetensors"
    names = [str(target), str(plain), "--model", str(model), "--family", family]
    assert main(["convert", *names, "--to", "lora", "--rank", "64", "--dtype", "fp32"]) == 0
    for name, pair in read_adapter(plain).modules.items():
        assert gap(pair.delta(), weights.modules[name].delta(bare[name.removeprefix(f"{component}.")])) < 1e-3
    assert "lora_trainer.dora_over" not in read_adapter(plain).metadata
    capsys.readouterr()
    again = ["convert", str(target), str(tmp_path / "again.safetensors"), "--to", "comfyui", "--model", str(model)]
    assert main(again) == 2
    assert "without magnitudes of outputs" in " ".join(capsys.readouterr().err.split())


def test_what_it_cannot_convert_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    layer = "lora_unet_mid_block_attentions_0_proj_in"
    plain = {f"{layer}.lora_down.weight": torch.ones(2, 8), f"{layer}.lora_up.weight": torch.ones(8, 2)}
    save_file(plain, tmp_path / "plain.safetensors")
    arguments = ["convert", str(tmp_path / "plain.safetensors"), str(tmp_path / "out.safetensors"), "--to", "comfyui"]
    assert main([*arguments, "--rank", "4", "--dtype", "fp16"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "is LoRA, without magnitudes of outputs" in error
    assert "--to kohya, which ComfyUI reads" in error
    assert "--rank is for --to lora" in error
    assert "--dtype is for --to kohya, diffusers and lora" in error
    assert main([*arguments, "--model", str(tmp_path / "base")]) == 2
    assert "is LoRA, without magnitudes of outputs" in " ".join(capsys.readouterr().err.split())
