"""Selective checkpointing: bit-identical gradients, with memory and work between none and full."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lora_trainer.config.schema import CheckpointingMode, Precision
from lora_trainer.memory_plan.trace import make_subject, trace
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Architecture
from lora_trainer.models.memory import recompute
from lora_trainer.models.memory.block_swap import swap_blocks, swappable_blocks
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from lora_trainer.models.memory.recompute import recomputing
from lora_trainer.models.published import public_architecture
from lora_trainer.models.quantization.store import make_quantizer, store_layers
from tests.models.memory.test_block_swap import CPU, Tried, same


@pytest.mark.parametrize(("kind", "stored"), [("flux", "bf16"), ("sd3", "int8"), ("sdxl", "fp8")])
def test_recomputation_changes_no_bit(kind: str, stored: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with block swap, whose copies are not recomputed."""
    monkeypatch.setattr(recompute, "DEAR", 16)  # for layers as small as these
    tried = Tried(kind, stored=stored)
    expected, work = tried.step(), []
    for chosen in ("full", "selective"):
        checkpoint_blocks(tried.denoiser, 99, chosen)
        assert same(tried.step(), expected)
        with FlopCounterMode(display=False) as counted:  # this itself changes the computation of some layers
            tried.step()
        work.append(counted.get_total_flops())
    assert work[1] < work[0]
    swap_blocks(tried.denoiser, len(swappable_blocks(tried.denoiser)), CPU)
    assert same(tried.step(), expected)
    assert same(tried.step(), expected)


def kept_by(block: nn.Module, *arguments: torch.Tensor) -> list[str]:
    """The operators that a backward pass does not recompute."""
    ran: list[str] = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            ran.append(str(operator))
            return operator(*args, **(kwargs or {}))

    result = recomputing("selective")(block, *arguments)
    with Watched():
        result.sum().backward()
    return ran


def test_expensive_results_are_kept_and_cheap_ones_recomputed() -> None:
    """A matmul over 512 is kept; one over 16, as in an adapter, is not."""
    wide, narrow = nn.Linear(512, 16), nn.Linear(16, 24)
    ran = kept_by(lambda x: narrow(wide(x).sigmoid()).exp(), torch.randn(8, 512, requires_grad=True))
    assert sum("addmm" in name for name in ran) == 1
    assert any("sigmoid.default" in name for name in ran)


def test_int8_matmuls_are_recomputed() -> None:
    """Their int32 results take twice the bytes of the output. The second matmul is the backward pass's own."""
    layer = nn.Linear(512, 512).requires_grad_(False)
    store_layers(layer, make_quantizer("int8", products=True))
    ran = kept_by(lambda x: layer(x).sin(), torch.randn(1, 32, 512, requires_grad=True))
    assert sum("_int_mm" in name for name in ran) == 2


def test_attention_results_are_kept() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x.exp(), x, x).sin()

    ran = kept_by(block, torch.randn(1, 2, 8, 16, requires_grad=True))
    assert not [name for name in ran if "attention" in name and "backward" not in name]
    assert any("exp" in name for name in ran)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["full", "selective"])
def test_memory_lies_between_no_and_full_checkpointing(chosen: CheckpointingMode) -> None:
    """Of the published model, by the trace. `selective` adds almost no work."""
    architecture: Architecture = public_architecture("sd15")
    subject = make_subject(FAMILIES["sd15"], architecture, rank=16, targets="attention", dtype=torch.bfloat16)
    none, some = (
        trace(subject, micro=1, height=64, width=64, checkpointed=count, recompute=chosen)
        for count in (0, subject.blocks)
    )
    work = some.flops / none.flops
    assert (1.3 < work < 1.4) if chosen == "full" else (1.0 < work < 1.01)
    assert some.peak < (0.4 if chosen == "full" else 0.85) * none.peak
    assert some.peak > (0.2 if chosen == "full" else 0.6) * none.peak
