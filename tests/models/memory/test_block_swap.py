"""Block swap: bit-identical results, two blocks at a time, in execution order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.config.schema import Precision
from lora_trainer.models.compiled import compile_blocks
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory import block_swap
from lora_trainer.models.memory.block_swap import (
    ALIGNMENT,
    BLOCK_SWAP,
    _spread,
    freed_by_swapping,
    frozen_bytes,
    move_to_device,
    streamed_blocks,
    swap_blocks,
    swappable_blocks,
    swapped_count,
)
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from lora_trainer.models.quantization.store import make_quantizer, store_layers
from tests.lora_format.tiny import tiny_transformer, tiny_unet

pytestmark = pytest.mark.exact
CPU = torch.device("cpu")
LAYERS = ("to_q", "to_v", "add_k_proj", "ff.net.2")


def tiny_flux(heads: int = 2) -> nn.Module:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


def tiny_sd3() -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def ask_flux(denoiser: Any) -> Tensor:
    return denoiser(
        hidden_states=drawn(2, 16, 4),
        encoder_hidden_states=drawn(2, 5, 32),
        pooled_projections=drawn(2, 16),
        timestep=torch.tensor([0.3, 0.6]),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(5, 3),
        guidance=torch.ones(2),
    ).sample


def ask_sd3(denoiser: Any) -> Tensor:
    return denoiser(
        hidden_states=drawn(2, 4, 8, 8),
        encoder_hidden_states=drawn(2, 5, 32),
        pooled_projections=drawn(2, 16),
        timestep=torch.tensor([300.0, 600.0]),
    ).sample


def ask_sdxl(denoiser: Any) -> Tensor:
    added = {"text_embeds": drawn(2, 16), "time_ids": drawn(2, 6)}
    return denoiser(
        drawn(2, 4, 16, 16), torch.tensor([3, 600]), encoder_hidden_states=drawn(2, 5, 56), added_cond_kwargs=added
    ).sample


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "flux": (tiny_flux, ask_flux),
    "sd3": (tiny_sd3, ask_sd3),
    "sdxl": (lambda: tiny_unet("sdxl"), ask_sdxl),
}


class Tried:
    """A small denoiser of a family with a nonzero LoRA."""

    def __init__(self, kind: str, *, stored: Precision = "bf16") -> None:
        torch.manual_seed(0)
        make, self.ask = KINDS[kind]
        self.denoiser = make().requires_grad_(False).train()
        names = [name for name, part in self.denoiser.named_modules() if isinstance(part, nn.Linear)]
        names = [name for name in names if name.endswith(LAYERS)]
        self.trained = list(inject_lora(self.denoiser, names, AdapterOptions(4, 4.0), 0).values())
        for each in self.trained:
            nn.init.normal_(each, std=0.1)
        if narrow := make_quantizer(stored):
            store_layers(self.denoiser, narrow)

    def step(self) -> list[Tensor]:
        """The prediction and gradients of a step."""
        for each in self.trained:
            each.grad = None
        predicted = self.ask(self.denoiser)
        predicted.square().mean().backward()
        return [predicted.detach(), *(each.grad.clone() for each in self.trained)]

    def looked_at(self) -> list[Tensor]:
        """Only the prediction, as in validation."""
        self.denoiser.eval()
        try:
            with torch.no_grad():
                return [self.ask(self.denoiser)]
        finally:
            self.denoiser.train()


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@contextmanager
def watched(denoiser: nn.Module) -> Iterator[list[int]]:
    """How many blocks are in memory after each layer and at each gradient."""
    counts: list[int] = []

    def count(*_: Any) -> None:
        counts.append(sum(guest.storage.nbytes() > 0 for guest in denoiser.__dict__[BLOCK_SWAP].swapped))

    def counted(module: nn.Module, given: Any, result: Any) -> None:
        count()
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(count)

    handles = [module.register_forward_hook(counted) for module in denoiser.modules()]
    yield counts
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("kind", "stored"), [("flux", "bf16"), ("sd3", "fp8"), ("sdxl", "bf16"), ("sdxl", "int8")])
def test_block_swap_changes_no_bit_and_loads_at_most_two_blocks(kind: str, stored: Precision) -> None:
    """With and without checkpointing, for several block counts in turn, two steps each, and without training."""
    tried = Tried(kind, stored=stored)
    denoiser = tried.denoiser
    expected, seen = tried.step(), tried.looked_at()
    blocks = len(swappable_blocks(denoiser))
    for checkpointed in (0, 99):
        checkpoint_blocks(denoiser, checkpointed)
        for count in (1, blocks, 3):
            assert swap_blocks(denoiser, count, CPU) == swapped_count(denoiser) == min(count, blocks)
            with watched(denoiser) as counts:
                assert same(tried.step(), expected)
                assert same(tried.looked_at(), seen)
                assert same(tried.step(), expected)
            assert max(counts) == min(2, count)
    swap_blocks(denoiser, 0, CPU)
    assert swapped_count(denoiser) == 0
    assert same(tried.step(), expected)


def test_every_family_has_blocks_that_can_be_swapped() -> None:
    """diffusers names the repeated blocks of most denoisers, and not those of Anima, SD3 and the U-Nets."""
    makers = {"unet": tiny_unet, "transformer": tiny_transformer}
    for name, family in FAMILIES.items():
        assert swappable_blocks(makers[family.denoiser.component](name).requires_grad_(False)), name


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_listed_in_the_order_in_which_they_run(kind: str) -> None:
    tried, ran = Tried(kind), list[nn.Module]()
    blocks = swappable_blocks(tried.denoiser)
    for block in blocks:
        block.register_forward_pre_hook(lambda module, given: ran.append(module))
    tried.looked_at()
    assert ran == blocks
    assert len(blocks) >= 3


def test_weights_are_copied_only_to_the_gpu_and_only_as_often_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks on the GPU at the end of a pass are reused by the next one."""
    tried = Tried("sd3")
    swap_blocks(tried.denoiser, 3, CPU)
    guests = tried.denoiser.__dict__[BLOCK_SWAP].swapped
    came: list[int] = []
    for place, guest in enumerate(guests):
        monkeypatch.setattr(
            guest, "load", lambda *args, place=place, true=guest.load: (came.append(place), true(*args))
        )
    homes = [guest.host.clone() for guest in guests]
    tried.step()
    assert came == [0, 1, 2, 0]
    tried.step()
    assert came == [0, 1, 2, 0, 2, 0]
    assert tried.denoiser.__dict__[BLOCK_SWAP].copied == sum(guests[place].size for place in came)
    assert all(torch.equal(guest.host, home) for guest, home in zip(guests, homes, strict=True))


def test_weights_are_readable_between_steps() -> None:
    """State, moves to the CPU and back, and adapters, which stay on the GPU."""
    tried, plain = Tried("sdxl"), Tried("sdxl")
    expected = plain.step()
    swap_blocks(tried.denoiser, 99, CPU)
    assert same(tried.step(), expected)
    for each in (1, 2):
        state = tried.denoiser.state_dict()
        assert all(torch.equal(state[name], value) for name, value in plain.denoiser.state_dict().items())
        if each == 1:
            move_to_device(tried.denoiser, CPU)
            assert not any(guest.is_loaded for guest in tried.denoiser.__dict__[BLOCK_SWAP].swapped)
    assert same(tried.step(), expected)
    trained = {id(each) for each in tried.trained}
    assert not any(
        id(tensor) in trained for guest in tried.denoiser.__dict__[BLOCK_SWAP].swapped for tensor in guest.tensors
    )


def test_an_aborted_step_leaves_nothing_on_the_gpu() -> None:
    tried = Tried("flux")
    expected = tried.step()
    swap_blocks(tried.denoiser, 4, CPU)
    handle = swappable_blocks(tried.denoiser)[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tried.step()
    handle.remove()
    assert same(tried.step(), expected)
    for each in tried.trained:
        each.register_hook(lambda gradient: 1 / 0)
        break
    with pytest.raises(ZeroDivisionError):
        tried.step()
    assert same(tried.looked_at(), expected[:1])


def test_a_change_that_runs_out_of_memory_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried("flux")
    expected = tried.step()
    swap_blocks(tried.denoiser, 2, CPU)
    true, count = block_swap.SwappedBlock, iter(range(9))

    def guest(*args: Any) -> Any:
        if next(count):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return true(*args)

    monkeypatch.setattr(block_swap, "SwappedBlock", guest)
    with pytest.raises(torch.OutOfMemoryError):
        swap_blocks(tried.denoiser, 5, CPU)
    assert swapped_count(tried.denoiser) == 3
    assert same(tried.step(), expected)
    swap_blocks(tried.denoiser, 1, CPU)
    assert same(tried.step(), expected)


def test_a_failed_pinning_leaves_no_error_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps a thread's last error until the next launch raises it."""
    left: list[int] = []
    ones = torch.ones

    class Refuses:
        def cudaHostRegister(self, place: int, size: int, flags: int) -> int:  # noqa: N802
            left.append(2)
            return 2

    def launched(*args: Any, **kwargs: Any) -> Tensor:
        if left:
            raise RuntimeError(f"CUDA error {left.pop()}: out of memory")
        return ones(*args, **kwargs)

    guest = block_swap.SwappedBlock(nn.Linear(8, 8).requires_grad_(False), CPU)
    monkeypatch.setattr(torch.cuda, "cudart", Refuses)
    monkeypatch.setattr(torch, "ones", launched)
    assert not block_swap._pin(guest)
    assert launched(1, device=CPU) == 1


def test_memory_format_is_kept() -> None:
    tried = Tried("sdxl")
    tried.denoiser.to(memory_format=torch.channels_last)
    expected = tried.step()
    strides = [tensor.stride() for tensor in tried.denoiser.parameters()]
    swap_blocks(tried.denoiser, 99, CPU)
    assert same(tried.step(), expected)
    assert [tensor.stride() for tensor in tried.denoiser.parameters()] == strides


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.integers(0, 70))
def test_swapped_blocks_are_spread_evenly(blocks: int, count: int) -> None:
    """The blocks of each count are among those of the next, and gaps are at most twice the minimum."""
    order = _spread(blocks)
    assert sorted(order) == list(range(blocks))
    chosen = sorted(order[:count])
    gaps = [second - first for first, second in pairwise(chosen)]
    assert not gaps or max(gaps) <= 2 * -(-blocks // len(chosen))


def test_resident_memory_is_known_without_weights() -> None:
    """As in the plan: on the meta device, and less with each swapped block."""
    with torch.device("meta"):
        denoiser = tiny_flux().requires_grad_(False)
    sizes = [frozen_bytes(block) for block in swappable_blocks(denoiser)]
    assert frozen_bytes(denoiser) > sum(sizes)
    swapped = [[*map(frozen_bytes, streamed_blocks(denoiser, count))] for count in range(len(sizes) + 1)]
    # Two of the largest are there: one computes while the next loads.
    freed = [sum(each) + 2 * (-max(each, default=0) // ALIGNMENT) * ALIGNMENT for each in swapped]
    assert max(0, freed[3]) < freed[4] < freed[5]
    assert freed_by_swapping(denoiser) == [max(0, each) for each in freed]


class Line:
    """A stream that only records calls. `done` is the other stream's work known to be complete."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events = 0
        self.waited = set[int]()

    def wait_stream(self, other: Line) -> None:
        self.calls.append("wait")

    def record_event(self) -> int:
        assert self.calls[-1] == "wait", "a copy began into memory that earlier work may still use"
        self.calls.append("copy")
        self.events += 1
        return self.events

    def wait_event(self, event: int) -> None:
        self.waited.add(event)


def test_the_gpu_waits_for_each_copy_and_the_cpu_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a GPU needs, on streams that only record it: a copy comes after the last use of its memory, a
    computation after its copy, and the next block is copied while one computes."""
    tried = Tried("flux")
    expected = tried.step()
    computing, copying, under_way = Line(), Line(), list[int]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    swap_blocks(tried.denoiser, 5, CPU)
    visits = tried.denoiser.__dict__[BLOCK_SWAP]
    visits.stream = copying

    def computes(module: nn.Module, given: Any) -> None:
        (guest,) = [guest for guest in visits.swapped if guest.block is module]
        assert guest.is_loaded
        assert guest.copied is None, "a block computes with weights that are not there yet"
        under_way.append(copying.events - len(computing.waited))

    for guest in visits.swapped:
        guest.block.register_forward_pre_hook(computes)
    for _ in range(2):
        assert same(tried.step(), expected)
    visits.send_away()
    assert computing.waited == set(range(1, copying.events + 1)), "memory was freed that a copy may still write"
    assert under_way == [1, 1, 1, 1, 0, 0, 1, 1, 1, 0]  # the second step finds its first two blocks loaded


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_are_swapped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """This compiles nothing again. Traced by torch's dynamo and autograd, without Inductor."""
    true = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, *, mode, **args: true(function, backend="aot_eager", **args))
    tried = Tried("sd3")
    compiled = compile_blocks(tried.denoiser, mode="default", dynamic=False, fullgraph=False)
    expected = tried.step()
    assert compiled.news()
    for checkpointed in (0, 99):
        checkpoint_blocks(tried.denoiser, checkpointed)
        for count in (1, 3, 2, 0):
            swap_blocks(tried.denoiser, count, CPU)
            assert same(tried.step(), expected)
            assert same(tried.step(), expected)
    assert compiled.news() is None
    torch._dynamo.reset()
