"""Weights stored in 8 bits: near the originals, the same in both directions, and not kept wide by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.models.storage.eight_bits import STORAGE, store_in_fp8

LAYERS = {
    "linear": (lambda: nn.Linear(48, 96), (3, 5, 48)),
    "convolution": (lambda: nn.Conv2d(32, 48, 3, stride=2, padding=1), (2, 32, 9, 9)),
    "grouped": (lambda: nn.Conv2d(64, 64, 3, groups=2, bias=False), (1, 64, 8, 8)),
}


def pulled(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input for a fixed pull."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).view_as(y))
    return y.detach(), gradient


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_computes_with_its_rounded_weight(kind: str) -> None:
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer, x = make().requires_grad_(False), torch.randn(shape)
    exact, exact_back = pulled(layer, x)
    store_in_fp8(nn.Sequential(layer))
    stored, stored_back = pulled(layer, x)
    assert layer.weight.dtype == STORAGE
    for one, other in ((stored, exact), (stored_back, exact_back)):
        assert 0 < float((one - other).norm() / other.norm()) < 0.04
    # The very weight that is stored gives the very same numbers in a plain layer.
    plain = make().requires_grad_(False)
    plain.load_state_dict({"weight": layer.weight.float() * layer.weight_scale, **bias_of(layer)})
    for one, other in zip((stored, stored_back), pulled(plain, x), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def bias_of(layer: nn.Module) -> dict[str, Tensor]:
    return {} if layer.bias is None else {"bias": layer.bias}


def test_autograd_keeps_the_narrow_weight() -> None:
    layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
    store_in_fp8(nn.Sequential(layer))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True))
    assert sorted(tensor.numel() * tensor.element_size() for tensor in kept) == [4 * 64, 64 * 64]


def test_what_is_trained_or_narrow_stays() -> None:
    trained, facing_latents = nn.Linear(64, 64), nn.Conv2d(4, 64, 3).requires_grad_(False)
    store_in_fp8(nn.Sequential(trained, facing_latents))
    assert trained.weight.dtype == facing_latents.weight.dtype == torch.float32


def test_a_row_of_zeros_stays_zero() -> None:
    layer = nn.Linear(32, 32, bias=False).requires_grad_(False)
    layer.weight[3] = 0.0
    store_in_fp8(nn.Sequential(layer))
    y = layer(torch.randn(4, 32))
    assert torch.isfinite(y).all()
    assert float(y[:, 3].abs().max()) == 0.0
