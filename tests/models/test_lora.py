"""The fused LoRA layer computes the same as PEFT in every case it supports."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from lora_trainer.adapters.lora import SummedLinear, sum_updates


def layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4, bias=False)).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=2, lora_dropout=dropout, target_modules=["0", "2"]), model)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value)
    return model


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = model(x)
    out.square().mean().backward()
    assert x.grad is not None
    found = [value.grad for value in model.parameters() if value.grad is not None]
    return [out.detach(), x.grad, *found]


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_outputs_equal_those_of_peft(shape: tuple[int, ...]) -> None:
    plain, model, x = layers().double(), layers().double(), torch.randn(*shape, dtype=torch.float64)
    sum_updates(model)
    assert [type(each) for each in model] == [SummedLinear, nn.Tanh, SummedLinear]
    for found, wanted in zip(results(model, x), results(plain, x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_bf16_error_is_no_larger_than_that_of_peft() -> None:
    x = torch.randn(64, 8)
    plain, model, exact = layers().bfloat16(), layers().bfloat16(), layers().bfloat16().double()
    sum_updates(model)
    with torch.no_grad():
        truth = exact(x.bfloat16().double())
        errors = [(each(x.bfloat16()).double() - truth).abs().mean() for each in (model, plain)]
    assert errors[0] <= 1.1 * errors[1]


def test_all_other_cases_use_peft() -> None:
    plain, model, x = layers(dropout=0.5), layers(dropout=0.5), torch.randn(5, 8)
    sum_updates(model)
    for found, wanted in zip(results(model, x), results(plain, x), strict=True):
        assert torch.equal(found, wanted)
    for net in (plain, model):
        for layer in net:
            if isinstance(layer, Linear):
                layer.enable_adapters(False)
    assert torch.equal(model(x), plain(x))
