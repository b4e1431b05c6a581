"""8-bit weights: near the originals, the same in forward and backward, and not saved dequantized by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.config.schema import Precision
from lora_trainer.models.quantization.eight_bits import widened
from lora_trainer.models.quantization.store import make_quantizer, store_layers


class Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += 1
        return function(*arguments, **(named or {}))


LAYERS = {
    "linear": (lambda: nn.Linear(48, 96), (3, 5, 48)),
    "convolution": (lambda: nn.Conv2d(32, 48, 3, stride=2, padding=1), (2, 32, 9, 8)),
    "grouped": (lambda: nn.Conv2d(64, 64, 3, groups=2, bias=False, dilation=2), (1, 64, 8, 8)),
    "uneven": (lambda: nn.Conv2d(32, 32, (1, 3), stride=(3, 2), padding=(0, 1)), (1, 32, 8, 11)),
}
ERRORS: dict[Precision, float] = {"fp8": 0.04, "int8": 0.012}
EIGHT = pytest.mark.parametrize("stored", ERRORS)


def store(stored: Precision, *layers: nn.Module) -> None:
    narrow = make_quantizer(stored)
    assert narrow is not None
    store_layers(nn.Sequential(*layers), narrow)


def pulled(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input for a fixed pull."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).view_as(y))
    return y.detach(), gradient


@EIGHT
def test_a_meta_layer_is_quantized_like_one_with_data(stored: Precision) -> None:
    """One operator per tensor: a plan quantizes hundreds of the largest this way."""
    real, empty = nn.Linear(48, 96), nn.Linear(48, 96, device="meta")
    with Operators() as operators:
        store(stored, empty)
    store(stored, real)
    assert {name: (each.shape, each.dtype) for name, each in (*empty.named_parameters(), *empty.named_buffers())} == {
        name: (each.shape, each.dtype) for name, each in (*real.named_parameters(), *real.named_buffers())
    }
    assert operators.count < 8


@EIGHT
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_computes_with_its_rounded_weight(kind: str, stored: Precision) -> None:
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer, x = make().requires_grad_(False), torch.randn(shape)
    exact, exact_back = pulled(layer, x)
    store(stored, layer)
    found, found_back = pulled(layer, x)
    assert layer.weight.element_size() == 1
    for one, other in ((found, exact), (found_back, exact_back)):
        assert 0 < float((one - other).norm() / other.norm()) < ERRORS[stored]
    # A plain layer with the dequantized weight gives exactly the same numbers.
    plain = make().requires_grad_(False)
    plain.load_state_dict({"weight": widened(layer.weight, layer.weight_scale, torch.float32), **bias_of(layer)})
    for one, other in zip((found, found_back), pulled(plain, x), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def bias_of(layer: nn.Module) -> dict[str, Tensor]:
    return {} if layer.bias is None else {"bias": layer.bias}


@EIGHT
def test_autograd_saves_the_quantized_weight(stored: Precision) -> None:
    layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
    store(stored, layer)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True))
    assert sorted(tensor.numel() * tensor.element_size() for tensor in kept) == [4 * 64, 64 * 64]


@EIGHT
def test_trained_input_and_already_quantized_layers_are_not_quantized(stored: Precision) -> None:
    trained, facing_latents = nn.Linear(64, 64), nn.Conv2d(4, 64, 3).requires_grad_(False)
    layer = nn.Linear(64, 64).requires_grad_(False)
    store(stored, trained, facing_latents, layer)
    assert trained.weight.dtype == facing_latents.weight.dtype == torch.float32
    before = layer.weight
    store(stored, layer)
    assert layer.weight is before


@EIGHT
def test_small_weights_are_as_precise_in_fp16(stored: Precision) -> None:
    layer = nn.Linear(32, 32, bias=False).requires_grad_(False)
    layer.weight.mul_(0.01)
    exact = layer.half().weight.detach().float().clone()
    store(stored, layer)
    out = layer(torch.eye(32).half()).float().t()
    assert float((out - exact).norm() / exact.norm()) < ERRORS[stored]


@EIGHT
def test_rows_of_zeros_and_of_very_large_and_small_numbers_stay_finite(stored: Precision) -> None:
    layer = nn.Linear(32, 32, bias=False).requires_grad_(False).bfloat16()
    layer.weight[3] = 0.0
    layer.weight[4] *= 1e15
    layer.weight[5] *= 1e-36
    exact = layer.weight.detach().float().clone()
    store(stored, layer)
    y = layer(torch.randn(4, 32).bfloat16())
    assert torch.isfinite(y).all()
    assert float(y[:, 3].abs().max()) == 0.0
    wide = widened(layer.weight, layer.weight_scale, torch.float32)
    assert float((wide - exact)[4].norm() / exact[4].norm()) < ERRORS[stored]


@EIGHT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adapters_on_quantized_layers_equal_those_on_others(stored: Precision, dtype: torch.dtype) -> None:
    def adapted(*, before: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.Conv2d(32, 32, 3)).to(dtype).requires_grad_(False)
        if before:
            store(stored, model)
        torch.manual_seed(1)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["0", "1"]), model)
        model[0](torch.ones(2, 32, dtype=dtype)).sum().backward()
        model[1](torch.ones(2, 32, 5, 5, dtype=dtype)).sum().backward()
        return {name: each for name, each in model.named_parameters() if each.requires_grad}

    narrow, wide = adapted(before=True), adapted(before=False)
    assert len(wide) == 4
    assert narrow.keys() == wide.keys()
    assert all(narrow[name].dtype == dtype and torch.equal(narrow[name], wide[name]) for name in wide)
