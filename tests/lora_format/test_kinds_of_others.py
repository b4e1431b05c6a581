"""Files of other programs with other kinds than LoRA: what is read is what their own code computes, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_trainer.core.errors import UsageError
from lora_trainer.lora_format.kinds.lokr import KroneckerUpdate
from lora_trainer.lora_format.layouts import Names, fused
from lora_trainer.lora_format.reading import read_adapter

lycoris = pytest.importorskip("lycoris", reason="the dev extra has it")
from lycoris.modules.locon import LoConModule  # noqa: E402
from lycoris.modules.loha import LohaModule  # noqa: E402
from lycoris.modules.lokr import LokrModule  # noqa: E402

NAME, MODULE = "lora_unet_mid_block_conv1", "unet.mid_block.conv1"
FUSED = Names(
    "fused", "transformer", {"transformer": "lora_unet"}, fused("blocks.{}.qkv", "blocks.{}.q", "blocks.{}.k")
)


@pytest.mark.parametrize("size", ["linear", "kernel"])
@pytest.mark.parametrize("options", [{}, {"weight_decompose": True}, {"weight_decompose": True, "wd_on_out": False}])
@pytest.mark.parametrize("kind", [LoConModule, LohaModule, LokrModule])
def test_what_lycoris_trains_is_read(kind: type, options: dict[str, bool], size: str, tmp_path: Path):
    """With a Tucker core on the kernel, LoKr with both factors in parts, alpha unlike rank."""
    torch.manual_seed(0)
    layer = nn.Linear(36, 48) if size == "linear" else nn.Conv2d(36, 48, 3, padding=1)
    more = {"decompose_both": True} if kind is LokrModule else {}
    module = kind(NAME, layer, 1.0, 2, 3.0, use_tucker=True, **more, **options)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter is not layer.weight and parameter is not layer.bias:
            parameter.data += 0.2 * torch.randn_like(parameter)
    tensors = {f"{NAME}.{end}": each.detach().clone() for end, each in module.custom_state_dict().items()}
    expected = (module.get_merged_weight(1, layer.weight.shape)[0] - layer.weight).detach()
    if kind is not LoConModule:  # their own merge applies alpha / rank twice; its training and ComfyUI once
        diff = module.get_weight(layer.weight.shape).detach()
        moved = layer.weight.detach() + diff
        expected = (module.apply_weight_decompose(moved) if options else moved).detach() - layer.weight.detach()
    save_file(tensors, tmp_path / "theirs.safetensors")
    update = read_adapter(tmp_path / "theirs.safetensors").modules[MODULE]
    found = update.delta(layer.weight.detach()).reshape(layer.weight.shape)
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def kronecker(rows: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"lokr_w1": torch.randn(4, 2), "lokr_w2_a": torch.randn(rows // 4, 2), "lokr_w2_b": torch.randn(2, 8)}


def test_a_change_of_a_fused_layer_is_divided_by_rows(tmp_path: Path):
    parts = kronecker(48, 1)
    save_file({f"lora_unet_blocks_3_qkv.{end}": each for end, each in parts.items()}, tmp_path / "theirs.safetensors")
    read = read_adapter(tmp_path / "theirs.safetensors", [FUSED]).modules
    whole = KroneckerUpdate(parts).delta()
    assert torch.equal(
        torch.cat([read["transformer.blocks.3.q"].delta(), read["transformer.blocks.3.k"].delta()]), whole
    )


def test_a_kind_for_each_layer_is_read_and_two_on_one_are_refused(tmp_path: Path):
    path, other = tmp_path / "theirs.safetensors", "lora_unet_mid_block_proj_in"
    pair = {f"{other}.lora_down.weight": torch.randn(2, 8), f"{other}.lora_up.weight": torch.randn(6, 2)}
    tensors = {f"{NAME}.{end}": each for end, each in kronecker(16, 2).items()}
    save_file(tensors | pair, path)
    assert {update.title for update in read_adapter(path).modules.values()} == {"LoRA", "LoKr"}
    save_file(tensors | {f"{NAME}.hada_w1_a": torch.randn(16, 2)}, path)
    with pytest.raises(UsageError, match="of several kinds"):
        read_adapter(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lokr_w2_b": None}, "does not fit together"),
        ({"lokr_w2_b": torch.randn(3, 8)}, "shapes do not fit"),
        ({"oft_blocks": torch.randn(4, 2, 3)}, "of several kinds"),
        ({"dora_scale": torch.ones(7, 1)}, "has a DoRA magnitude"),
        ({"lora_up.bias": torch.ones(16)}, "changes of biases"),
    ],
)
def test_damaged_files_are_refused(changes: dict[str, Tensor | None], message: str, tmp_path: Path):
    tensors = {end: each for end, each in (kronecker(16, 2) | changes).items() if each is not None}
    save_file({f"{NAME}.{end}": each for end, each in tensors.items()}, tmp_path / "bad.safetensors")
    with pytest.raises(UsageError, match=message):
        read_adapter(tmp_path / "bad.safetensors")
