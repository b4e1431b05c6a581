"""The adapted layer in one sum: what peft computes, in every case that it is meant for; and the Triton kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from lora_trainer.models.kernels import update
from lora_trainer.models.kernels.update import SummedLinear, add_update, sum_updates, use_own_kernels

PROCESSOR = torch.device("cpu")

# Triton looks for a card when it is imported, so its interpreter has a process of its own.
INTERPRETED = """
import sys, torch
from lora_trainer.models.kernels.triton_update import add_update as own
from lora_trainer.models.kernels.update import add_update
torch.manual_seed(0)
for (m, n, r), dtype, close in [((70, 33, 4), torch.float32, 1e-5), ((64, 128, 80), torch.float32, 1e-5), ((5, 7, 16), torch.float16, 5e-3)]:
    given = [torch.randn(*shape, dtype=dtype) for shape in ((m, n), (m, r), (n, r))]
    results = []
    for way in (own, add_update):
        leaves = [each.clone().requires_grad_() for each in given]
        out = way(*leaves, 0.3)
        out.backward(torch.arange(m * n, dtype=dtype).view(m, n) / (m * n))
        results.append([out.detach(), *(each.grad for each in leaves)])
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)
print("same")
"""


def layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4, bias=False)).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=2, lora_dropout=dropout, target_modules=["0", "2"]), made)
    for name, value in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value)
    return made


def results(made: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = made(x)
    out.square().mean().backward()
    assert x.grad is not None
    found = [value.grad for value in made.parameters() if value.grad is not None]
    return [out.detach(), x.grad, *found]


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_it_computes_what_peft_computes(shape: tuple[int, ...]) -> None:
    plain, made, x = layers().double(), layers().double(), torch.randn(*shape, dtype=torch.float64)
    sum_updates(made)
    assert [type(each) for each in made] == [SummedLinear, nn.Tanh, SummedLinear]
    for found, wanted in zip(results(made, x), results(plain, x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_in_bf16_it_is_no_further_from_the_truth() -> None:
    x = torch.randn(64, 8)
    plain, made, exact = layers().bfloat16(), layers().bfloat16(), layers().bfloat16().double()
    sum_updates(made)
    with torch.no_grad():
        truth = exact(x.bfloat16().double())
        errors = [(each(x.bfloat16()).double() - truth).abs().mean() for each in (made, plain)]
    assert errors[0] <= 1.1 * errors[1]


def test_whatever_else_is_asked_peft_does() -> None:
    plain, made, x = layers(dropout=0.5), layers(dropout=0.5), torch.randn(5, 8)
    sum_updates(made)
    for found, wanted in zip(results(made, x), results(plain, x), strict=True):
        assert torch.equal(found, wanted)
    for net in (plain, made):
        for layer in net:
            if isinstance(layer, Linear):
                layer.enable_adapters(False)
    assert torch.equal(made(x), plain(x))


def test_on_a_processor_or_without_triton_torchs_own_operation_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers()
    sum_updates(made)
    assert use_own_kernels(made, PROCESSOR) == "own kernels: not used, they are for cards"
    assert not any(layer.own_kernel for layer in made if isinstance(layer, SummedLinear))
    monkeypatch.setitem(sys.modules, "lora_trainer.models.kernels.triton_update", None)
    update.why_not.cache_clear()
    assert "Triton is not installed" in use_own_kernels(made, torch.device("cuda"))
    update.why_not.cache_clear()


def test_the_reference_is_the_formula() -> None:
    base, small, up = torch.randn(5, 7), torch.randn(5, 3), torch.randn(7, 3)
    torch.testing.assert_close(add_update(base, small, up, 0.3), base + 0.3 * small @ up.T)


def test_the_triton_kernel_gives_what_its_reference_gives() -> None:
    """In Triton's interpreter, which computes on a processor what a card would."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton (Linux)")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.endswith("same\n"), done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_card_the_triton_kernel_gives_what_its_reference_gives(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    assert update.why_not(device) is None
    from lora_trainer.models.kernels.triton_update import add_update as own

    base, small, up = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((300, 70), (300, 20), (70, 20)))
    torch.testing.assert_close(own(base, small, up, 0.3), add_update(base, small, up, 0.3), rtol=2e-2, atol=2e-2)
