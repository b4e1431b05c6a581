"""Block swap and activation offloading on a GPU: the same bits in less memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lora_trainer.models.memory.block_swap import (
    BLOCK_SWAP,
    freed_by_swapping,
    frozen_bytes,
    move_to_device,
    swap_blocks,
    swappable_blocks,
)
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from lora_trainer.models.memory.offload import offloaded
from tests.models.memory.test_block_swap import KINDS, Tried, ask_flux, same, tiny_flux

pytestmark = pytest.mark.gpu
ALLOCATOR = 2**21  # bytes: torch's allocator gives such tensors their own blocks


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    return device


@pytest.mark.parametrize("kind", ["flux", "sd3", "sdxl"])
def test_block_swap_on_the_gpu_changes_no_bit(gpu: torch.device, kind: str) -> None:
    """While it is busy, so that copies and computation overlap, for several numbers of blocks."""
    tried = Tried(kind)
    tried.ask = on(gpu, tried.ask)
    move_to_device(tried.denoiser, gpu)
    expected = tried.step()
    assert same(tried.step(), expected), "this GPU's own kernels differ from step to step"
    busy = torch.randn(2048, 2048, device=gpu)
    for checkpointed in (0, 99):
        checkpoint_blocks(tried.denoiser, checkpointed)
        for count in (1, 99, 2, 0):
            swap_blocks(tried.denoiser, count, gpu)
            for _ in range(3):
                for _ in range(20):
                    busy = busy @ busy / 2048**0.5
                assert same(tried.step(), expected)
    swap_blocks(tried.denoiser, 99, gpu)
    assert all(guest.pinned for guest in tried.denoiser.__dict__[BLOCK_SWAP].swapped)
    move_to_device(tried.denoiser, torch.device("cpu"))
    move_to_device(tried.denoiser, gpu)
    assert same(tried.step(), expected)


def test_at_most_two_blocks_are_on_the_gpu(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "wide", (partial(tiny_flux, heads=64), ask_flux))
    before = torch.cuda.memory_allocated(gpu)
    tried = Tried("wide")
    tried.ask = on(gpu, tried.ask)
    blocks = swappable_blocks(tried.denoiser)
    swap_blocks(tried.denoiser, len(blocks), gpu)
    move_to_device(tried.denoiser, gpu)
    tried.step()
    allocated = torch.cuda.memory_allocated(gpu) - before
    stays = frozen_bytes(tried.denoiser) - freed_by_swapping(tried.denoiser)[-1]
    assert allocated < stays + 4 * sum(each.nbytes for each in tried.trained) + ALLOCATOR


def test_offloaded_activations_change_no_bit_and_save_memory(gpu: torch.device) -> None:
    x = torch.randn(2**20, device=gpu, requires_grad=True)

    def chain(start: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            start = torch.tanh(start * 1.1)
        return start

    def step(work: object) -> tuple[torch.Tensor, int]:
        x.grad = None
        torch.cuda.reset_peak_memory_stats(gpu)
        work(x).sum().backward()  # type: ignore[operator]
        assert x.grad is not None
        return x.grad.clone(), torch.cuda.max_memory_allocated(gpu)

    expected, whole = step(chain)
    moving = offloaded(chain, gpu, torch.nn.Identity())
    for _ in range(3):
        found, less = step(moving)
        assert torch.equal(found, expected)
        assert less < whole - 20 * x.nbytes


def on(device: torch.device, ask: object) -> object:
    """The same prediction with all inputs on the GPU."""

    def prediction_of(denoiser: object) -> torch.Tensor:
        return ask(lambda *args, **kwargs: denoiser(*moved(args), **moved(kwargs)))  # type: ignore[operator]

    def moved(value: object) -> object:
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)

    return prediction_of
