"""Activations in host memory: bit-identical gradients, and little on the GPU between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.config.schema import Precision
from lora_trainer.models.memory import offload
from lora_trainer.models.memory.block_swap import swap_blocks
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from lora_trainer.models.memory.offload import LEAVING, Offload, offloaded
from tests.models.memory.test_block_swap import CPU, Tried, same


@pytest.fixture(autouse=True)
def _everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 64)


@pytest.mark.parametrize("kind", ["flux", "sd3", "sdxl"])
def test_offloading_changes_no_bit(kind: str) -> None:
    """With and without checkpointing, with block swap, two steps each."""
    tried = Tried(kind)
    expected = tried.step()
    tried.ask = offloaded(tried.ask, CPU, tried.denoiser)
    for checkpointed, swapped in ((0, 0), (99, 0), (1, 3)):
        checkpoint_blocks(tried.denoiser, checkpointed)
        swap_blocks(tried.denoiser, swapped, CPU)
        assert same(tried.step(), expected)
        assert same(tried.step(), expected)
        assert same(tried.looked_at(), expected[:1])


def on_gpu(of: Offload) -> list[bool]:
    """The offloaded tensors that are on the GPU."""
    return [(away := ref()) is not None and away.flat is not None for ref in of.order]


def test_little_stays_between_forward_and_backward_and_nothing_after() -> None:
    of, x = Offload(CPU, nn.Identity()), torch.randn(8, 64, requires_grad=True)
    with of.keeping():
        y = x
        for _ in range(20):
            y = torch.tanh(y * 1.1)
    assert len(of.order) >= 20
    assert sum(on_gpu(of)) == LEAVING
    seen: list[int] = []
    y.register_hook(lambda _: seen.append(sum(on_gpu(of))))
    x.register_hook(lambda _: seen.append(sum(on_gpu(of))))
    y.sum().backward()
    assert max(seen) <= LEAVING + offload.AHEAD
    assert not any(on_gpu(of))


def test_a_storage_moves_once_and_views_come_back_as_they_were() -> None:
    of, x = Offload(CPU, nn.Identity()), torch.randn(6, 64, requires_grad=True)
    kept: list[Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            wide = value * 2
            first, second = wide.chunk(2, dim=1)
            context.save_for_backward(wide, first, second.t(), first)
            return wide.sum(dim=1)

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            kept.extend(context.saved_tensors)
            return gradient[:, None].expand(-1, 64)

    with of.keeping():
        y = Keeps.apply(x)  # type: ignore[no-untyped-call]
    assert len(of.order) == 1
    y.sum().backward()
    wide = x.detach() * 2
    expected = [wide, wide[:, :32], wide[:, 32:].t(), wide[:, :32]]
    assert all(map(torch.equal, kept, expected))
    assert [each.stride() for each in kept] == [each.stride() for each in expected]
    assert len({each.untyped_storage().data_ptr() for each in kept}) == 1


def test_weights_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1024)
    layer = nn.Linear(64, 64)
    of = Offload(CPU, layer)
    x = torch.randn(2, 64, requires_grad=True)
    with of.keeping():
        layer(x).sum().backward()
    assert not of.order
    with of.keeping():
        layer(torch.randn(4, 64)).sum().backward()
    assert len(of.order) == 1


@pytest.mark.parametrize("stored", ["bf16", "int8", "nf4"])
def test_only_activations_of_swapped_blocks_and_quantized_layers_move(stored: Precision) -> None:
    """Scales are buffers, in one storage with the rest of a swapped block."""
    if stored == "nf4":
        pytest.importorskip("bitsandbytes")
    tried = Tried("flux", stored=stored)
    expected = tried.step()
    moved: list[tuple[int, int]] = []
    for swapped in (0, 5):
        swap_blocks(tried.denoiser, swapped, CPU)
        of = Offload(CPU, tried.denoiser)
        with of.keeping():
            predicted = tried.ask(tried.denoiser)
        sizes = [away.host.nbytes for ref in of.order if (away := ref()) is not None]
        moved.append((len(sizes), sum(sizes)))
        for each in tried.trained:
            each.grad = None
        predicted.square().mean().backward()
        assert same([predicted.detach(), *(each.grad.clone() for each in tried.trained)], expected)
    assert moved[0] == moved[1]


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    of, x = Offload(CPU, nn.Identity()), torch.randn(8, 64, requires_grad=True)
    with pytest.raises(ZeroDivisionError), of.keeping():
        torch.tanh(x * 1.1).exp().sum().item().__floordiv__(0)
    with of.keeping():
        y = torch.tanh(x).exp()
    y.sum().backward()
    assert torch.allclose(x.grad, y.detach() * (1 - torch.tanh(x.detach()) ** 2))
