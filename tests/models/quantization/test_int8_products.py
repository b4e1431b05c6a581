"""Int8 matmuls: near full precision in both directions, independent of batch splits, and skipped where unsupported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.models.quantization import store
from lora_trainer.models.quantization.int8_products import LinearProduct
from lora_trainer.models.quantization.store import counted_products, int8_products, make_quantizer, store_layers

CPU = torch.device("cpu")


def multiplying(layer: nn.Linear) -> nn.Linear:
    narrow = make_quantizer("int8", products=True)
    assert narrow is not None
    store_layers(nn.Sequential(layer.requires_grad_(False)), narrow)
    return layer


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_backward_are_near_full_precision(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, bias=bias).to(dtype)
    x = (torch.randn(2, 24, 64) * torch.logspace(-3, 3, 24)[:, None]).to(dtype)  # rows of very different sizes
    pull = torch.randn(2, 24, 96).to(dtype)

    def both() -> tuple[Tensor, Tensor]:
        inputs = x.clone().requires_grad_()
        y = layer(inputs)
        return y.detach(), torch.autograd.grad(y, inputs, pull)[0]

    exact = both()
    multiplying(layer)
    assert type(layer) is LinearProduct
    found = both()
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert 0 < distance(one, other) < 0.015
        # Row by row too: none is lost beside a larger one.
        assert max(distance(*rows) for rows in zip(one[0], other[0], strict=True)) < 0.03


def test_a_sample_is_computed_the_same_in_every_batch() -> None:
    torch.manual_seed(0)
    layer = multiplying(nn.Linear(64, 64))
    x, few = torch.randn(3, 20, 64), torch.randn(40, 64)
    assert torch.equal(layer(x)[1], layer(x[1:2])[0])
    assert distance(layer(few)[:2], layer(few[:2])) < 1e-6  # no rows within a sample: never rounded


def test_autograd_saves_the_quantized_weight_and_no_activation() -> None:
    layer, kept = multiplying(nn.Linear(64, 64)), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(1, 32, 64, requires_grad=True))
    assert sorted(tensor.nbytes for tensor in kept) == [4 * 64, 64 * 64]


def test_nonfinite_values_stay_nonfinite() -> None:
    layer = multiplying(nn.Linear(64, 64))
    x = torch.randn(1, 20, 64)
    x[0, 3, 5], x[0, 4, 5] = float("inf"), float("nan")
    finite = torch.isfinite(layer(x)[0]).all(dim=1)
    assert finite.tolist() == [row not in (3, 4) for row in range(20)]


def test_unsupported_shapes_are_quantized_only_in_storage() -> None:
    odd, even = nn.Linear(60, 64), nn.Linear(64, 64)
    model = nn.Sequential(multiplying(odd), multiplying(even))
    assert [type(each) is LinearProduct for each in model] == [False, True]
    assert counted_products(model).startswith("int8 matmul: 1 of 2 linear layers")
    assert model[0](torch.randn(1, 20, 60)).shape == (1, 20, 64)


def test_an_unsupported_device_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert int8_products(True, "int8", CPU) == (True, None)
    assert int8_products(False, "int8", CPU) == (False, None)
    used, line = int8_products(True, "fp8", CPU)
    assert not used
    assert line is not None
    assert "fp8" in line
    monkeypatch.setattr(store, "why_not", lambda device: "no such product")
    assert int8_products(True, "int8", CPU) == (False, "int8 matmul: none, cpu cannot: no such product")
