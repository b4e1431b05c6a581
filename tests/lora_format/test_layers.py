"""The change of each layer, recomputed from the raw tensors of both files, equals that of the trained network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of
from tests.lora_format.tiny import UNETS, facts, random_lora, tiny_pipeline, tiny_unet, weights_from_peft
from tests.recipes.recipe import Bench, draw_images, save_tiny_model

RANK, ALPHA = 4, 2.6
OTHER_RANK, OTHER_ALPHA = 3, 5.0  # of the ResNet blocks
PARTS = (".attentions.", ".resnets.", ".downsamplers.", ".upsamplers.")
KOHYA = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
DIFFUSERS = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


def changes_of(unet: nn.Module) -> dict[str, Tensor]:
    """What peft itself adds to each weight, `[out, in]` or `[out, in, k, k]`."""
    return {
        name: module.get_delta_weight(module.active_adapters[0]).detach().reshape(module.base_layer.weight.shape)
        for name, module in unet.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def trained_unet(family: str) -> tuple[nn.Module, dict[str, float]]:
    """A U-Net with a random LoRA on linears and convolutions, of two ranks; alpha by module."""
    unet = tiny_unet(family)
    names = [
        name
        for name, module in unet.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and any(part in name for part in PARTS)
    ]
    others = [name for name in names if ".resnets." in name]
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=names,
        rank_pattern=dict.fromkeys(others, OTHER_RANK),
        alpha_pattern=dict.fromkeys(others, OTHER_ALPHA),
    )
    inject_adapter_in_model(config, unet)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in unet.named_parameters():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    return unet, {name: OTHER_ALPHA if name in others else ALPHA for name in names}


def from_kohya(path: Path) -> dict[str, Tensor]:
    """By kohya's name: up · down · alpha / rank."""
    raw = load_file(path)
    names = {key.partition(".")[0] for key in raw}
    assert set(raw) == {f"{name}.{part}" for name in names for part in ("lora_down.weight", "lora_up.weight", "alpha")}
    changes = {}
    for name in names:
        down, up = raw[f"{name}.lora_down.weight"].float(), raw[f"{name}.lora_up.weight"].float()
        scale = float(raw[f"{name}.alpha"]) / len(down)
        changes[name] = torch.einsum("or,r...->o...", up.flatten(1), down) * scale
    return changes


def from_diffusers(path: Path) -> dict[str, Tensor]:
    """By diffusers' name: B · A · alpha / rank, with alpha and rank from the header as diffusers takes them."""
    raw = load_file(path)
    with safe_open(path, framework="numpy") as file:
        config = json.loads(file.metadata()["lora_adapter_metadata"])
    names = {key.split(".lora_")[0] for key in raw}
    assert set(raw) == {f"{name}.lora_{half}.weight" for name in names for half in "AB"}
    assert set(config["unet.target_modules"]) == {name.removeprefix("unet.") for name in names}
    changes = {}
    for name in names:
        down, up, short = raw[f"{name}.lora_A.weight"].float(), raw[f"{name}.lora_B.weight"].float(), name[5:]
        rank = config["unet.rank_pattern"].get(short, config["unet.r"])
        assert rank == len(down)
        scale = config["unet.alpha_pattern"].get(short, config["unet.lora_alpha"]) / rank
        changes[name] = torch.einsum("or,r...->o...", up.flatten(1), down) * scale
    return changes


def assert_same_changes(expected: dict[str, Tensor], kohya: Path, diffusers: Path, tolerance: float) -> None:
    assert max(float(change.abs().max()) for change in expected.values()) > 100 * tolerance
    in_kohya = {f"lora_unet_{name.replace('.', '_')}": change for name, change in expected.items()}
    in_diffusers = {f"unet.{name}": change for name, change in expected.items()}
    for wanted, found in ((in_kohya, from_kohya(kohya)), (in_diffusers, from_diffusers(diffusers))):
        assert set(wanted) == set(found)
        for name, change in wanted.items():
            assert change.shape == found[name].shape
            assert torch.allclose(change, found[name], rtol=0.0, atol=tolerance), name


@pytest.mark.parametrize("family", UNETS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-4)])
def test_both_formats_hold_the_change_of_every_layer(family, dtype, tolerance, tmp_path):
    unet, alphas = trained_unet(family)
    weights = weights_from_peft(unet.state_dict(), "unet", alphas)
    kohya, diffusers = write_lora(tmp_path, "cat", weights, facts(), FileLayout(dtype=dtype))
    expected = changes_of(unet)
    assert {change.ndim for change in expected.values()} == {2, 4}
    assert_same_changes(expected, kohya, diffusers, tolerance)
    assert f"{KOHYA}.alpha" in load_file(kohya)
    assert f"{DIFFUSERS}.lora_A.weight" in load_file(diffusers)


@pytest.mark.parametrize("family", UNETS)
def test_diffusers_takes_every_module_that_can_be_trained(family, tmp_path):
    """Both formats, with a LoRA on each linear layer and convolution of the U-Net."""
    pipeline = tiny_pipeline(tmp_path / "made", family)
    weights = random_lora(pipeline.unet, endings=("",), size=0.02)
    paths = write_lora(tmp_path, "cat", weights, facts(), FileLayout(names=names_of(FAMILIES[family])))
    for path in paths:
        pipeline.load_lora_weights(tmp_path, weight_name=path.name)
        changes = {f"unet.{name}": change for name, change in changes_of(pipeline.unet).items()}
        assert changes.keys() == weights.modules.keys()
        for name, pair in weights.modules.items():
            assert torch.allclose(changes[name], pair.delta(), rtol=0.0, atol=1e-4), name
        pipeline.unload_lora_weights()


def test_a_run_writes_what_it_trained(tmp_path):
    """Through the command: linears and convolutions, alpha ≠ rank, against the last checkpoint merged by peft."""
    bench = Bench(save_tiny_model(tmp_path), draw_images(tmp_path / "data"), tmp_path / "runs", tmp_path / "cache")
    patterns = '["*.attentions.*", "*.resnets.*"]'
    assert bench.run("cat", lora__alpha=ALPHA, lora__target_modules=patterns, lora__use_rslora="true") == 0
    folder = bench.folder("cat")
    masters = load_file(folder / "checkpoints" / "step-000006" / "adapter.safetensors")
    unet = UNet2DConditionModel.from_pretrained(bench.model / "unet")
    names = sorted({key.split(".lora_")[0] for key in masters})
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, use_rslora=True), unet)
    own = dict(unet.named_parameters())
    with torch.no_grad():
        for name, value in masters.items():
            own[name].copy_(value)
    assert_same_changes(changes_of(unet), folder / "cat.safetensors", folder / "cat.diffusers.safetensors", 1e-4)
