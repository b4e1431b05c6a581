"""ComfyUI's own results: each change that this program reads is the same there, with alpha unlike rank, in mixed ranks.

`comfyui.safetensors` has random tensors of this program's making, of one layer in each case, and what ComfyUI changes the weight
by: `comfy.lora.load_lora` and `calculate_weight` at commit a125cd84b054a57729b5eecab930ca9408719832 (0.3.64, 11 October 2025).
A copy of ComfyUI 0.33.0 gives the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.lora_format.kinds.dora import DecomposedUpdate
from lora_trainer.lora_format.layer_updates import LayerUpdate
from lora_trainer.lora_format.reading import read_adapter
from lora_trainer.lora_format.weights import AdapterWeights, shapes_of
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of
from lora_trainer.models.lora_names import read_adapter as read_of_any_family
from tests.lora_format.tiny import facts, tiny_transformer

GOLDEN = load_file(Path(__file__).with_name("comfyui.safetensors"))
CASES = sorted({key.partition("/")[0] for key in GOLDEN})
LAYER = "lora_unet_mid_block_attentions_0_proj_in"


def case(name: str) -> dict[str, Tensor]:
    return {key.partition("/")[2]: tensor for key, tensor in GOLDEN.items() if key.partition("/")[0] == name}


def read(name: str, folder: Path) -> tuple[LayerUpdate, Tensor, Tensor]:
    """The change of a case's layer as this program reads it, its weight, and ComfyUI's change."""
    tensors = case(name)
    weight, theirs = tensors.pop("weight"), tensors.pop("theirs")
    save_file({f"{LAYER}.{end}": tensor for end, tensor in tensors.items()}, folder / "theirs.safetensors")
    (update,) = read_adapter(folder / "theirs.safetensors").modules.values()
    return update, weight, theirs


def gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.reshape(theirs.shape) - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_that_of_comfyui(name: str, tmp_path: Path):
    """But for a DoRA by outputs, which ComfyUI divides by |W|, not by |W + D|."""
    update, weight, theirs = read(name, tmp_path)
    if "of outputs" not in name and not name.startswith("dora of lo"):
        assert gap(update.delta(weight), theirs) < 1e-4
        return
    assert gap(update.delta(weight), theirs) > 0.02
    assert isinstance(update, DecomposedUpdate)
    moved = weight + update.change.delta(weight).reshape(weight.shape)
    norms = weight.flatten(1).norm(dim=1).reshape(update.magnitude.shape)
    assert gap(moved * update.magnitude / norms - weight, theirs) < 1e-4


@pytest.mark.parametrize(
    ("family", "module", "name"),
    [
        ("anima", "transformer_blocks.0.attn1.to_q", "lora_unet_blocks_0_self_attn_q_proj"),
        ("qwen_image", "transformer_blocks.0.attn.to_q", "lora_unet_transformer_blocks_0_attn_to_q"),
        ("flux", "transformer_blocks.0.attn.to_q", "lycoris_transformer_blocks_0_attn_to_q"),
    ],
)
def test_a_transformer_without_fused_layers_has_names_that_comfyui_knows(
    family: str, module: str, name: str, tmp_path: Path
):
    """It knows LyCORIS' names of all families but Anima."""
    kind, options, denoiser = ADAPTERS["lokr"].load(), AdapterOptions(4, 6.0), tiny_transformer(family)
    shapes = shapes_of({"transformer": denoiser})
    parameters = kind.inject(denoiser, [module], options, 1)
    values = {key: torch.randn(each.shape) for key, each in parameters.items()}
    weights = AdapterWeights(kind.updates(values, "transformer", options))
    layout = FileLayout(torch.float32, shapes, names_of(FAMILIES[family]), kind.forms)
    for path in write_lora(tmp_path, "cat", weights, facts(base_version="", architecture=f"{family}/lora"), layout):
        back = read_of_any_family(path)
        assert list(back.modules) == [f"transformer.{module}"]
        ours = weights.modules[f"transformer.{module}"].delta()
        assert gap(back.modules[f"transformer.{module}"].delta(), ours) < 1e-5
    assert all(key.startswith(f"{name}.") for key in load_file(tmp_path / "cat.safetensors"))


@pytest.mark.parametrize(
    ("kind", "family", "loads"),
    [("lokr", "flux2", True), ("lokr", "flux", False), ("dora", "flux", True), ("loha", "flux2", False)],
)
def test_a_run_reports_whether_diffusers_loads_its_files(kind: str, family: str, loads: bool):
    line = ADAPTERS[kind].read_by(FAMILIES[family].lora_files.readers)
    assert line.startswith("exact in LyCORIS")
    assert ("diffusers loads NAME.diffusers.safetensors" in line) == loads
    assert ("diffusers cannot load them" in line) != loads
