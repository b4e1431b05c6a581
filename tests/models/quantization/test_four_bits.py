"""4-bit weights: as precise as the format allows at any width, and not saved dequantized by autograd."""

from __future__ import annotations

import sys

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lora_trainer.core.errors import UsageError
from lora_trainer.lora_format.weights import shapes_of
from lora_trainer.models.quantization.store import make_quantizer, store_layers

ERROR = 0.11  # of normally distributed weights


def stored(*layers: nn.Module) -> nn.Module:
    narrow = make_quantizer("nf4")
    assert narrow is not None
    model = nn.Sequential(*layers).requires_grad_(False)
    store_layers(model, narrow)
    return model


@pytest.mark.parametrize(("width", "out"), [(64, 32), (16, 64), (48, 40), (33, 17), (96, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_backward_use_the_weight_within_its_error(width: int, out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(width, out).to(dtype)
    nn.init.normal_(layer.weight)
    exact = layer.weight.detach().float().clone()
    stored(layer)
    assert layer.weight.nbytes == (width * out + 1) // 2
    x = torch.eye(width, dtype=dtype).requires_grad_()
    y = layer(x)
    found = (y - layer.bias).detach().float().t()
    assert 0.05 < float((found - exact).norm() / exact.norm()) < ERROR
    pull = torch.randn(width, out).to(dtype)
    (back,) = torch.autograd.grad(y, x, pull)
    assert torch.allclose(back.float(), pull.float() @ found, rtol=0.02, atol=0.2)


def test_autograd_saves_the_quantized_weight() -> None:
    layer = nn.Linear(64, 64, bias=False)
    stored(layer)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True))
    assert sorted(tensor.nbytes for tensor in kept) == [64 * 64 // 64 * 2, 64 * 64 // 2]


def test_a_model_of_convolutions_and_names_and_shapes() -> None:
    model = stored(nn.Conv2d(32, 48, 3), nn.Conv2d(4, 64, 3), nn.Linear(64, 32))
    assert [module.weight.dtype for module in model] == [torch.int8, torch.float32, torch.uint8]
    assert shapes_of({"unet": model}) == {"unet.0": (48, 32, 3, 3), "unet.1": (64, 4, 3, 3), "unet.2": (32, 64)}


def test_an_adapter_has_the_compute_dtype() -> None:
    model = stored(nn.Linear(64, 32).bfloat16())
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["0"]), model)
    trained = [each for each in model.parameters() if each.requires_grad]
    assert [each.dtype for each in trained] == [torch.bfloat16] * 2
    model(torch.randn(2, 5, 64).bfloat16()).float().square().sum().backward()
    assert all(each.grad is not None for each in trained)


def test_sizes_without_memory_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real, empty = nn.Linear(48, 33), nn.Linear(48, 33, device="meta")
    stored(real)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    stored(empty)
    assert [each.nbytes for each in real.state_dict().values()] == [each.nbytes for each in empty.state_dict().values()]
    assert real.weight_scale.nbytes == empty.weight_scale.nbytes
    assert empty(torch.empty(2, 48, device="meta")).shape == (2, 33)


def test_without_the_library_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match="bitsandbytes") as refused:
        stored(nn.Linear(64, 64))
    assert "pip install bitsandbytes" in refused.value.problems[0].fix
