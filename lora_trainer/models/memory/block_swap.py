"""Frozen blocks that visit the GPU one after the other, from host memory and never back to it.

Weights that are not trained need not return: the copy in host memory stays. While a block computes, the one that is
needed next is copied in a stream of its own: the following block in a forward pass, the one before in a backward pass.
So two blocks stand on the GPU at any time, whatever their number.

Autograd keeps views of the weights that a block computed with. They stay valid: a visiting block always lies in the
same storage object, whose bytes come and go (as FSDP frees what it gathered, arXiv:2304.11277). So every kind of layer
can visit without being known here, checkpointed or not.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

ALIGNMENT = 512  # bytes, as CUDA's allocator aligns: kernels may choose by it
REPEATED = ("BasicTransformerBlock", "ResnetBlock2D", "JointTransformerBlock")  # where a denoiser does not name its own
LEAST_SHARE = 1 / 8  # of the largest block: what is smaller frees little, and would hide no copy
STAGES = {"down_blocks": 0, "mid_block": 1, "up_blocks": 2}  # of a U-Net, which registers its middle last
STREAMING = "_streaming"


def swappable_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """The blocks that can visit, in the order in which they run: those that repeat, without the smallest."""
    kinds = {*(getattr(denoiser, "_repeated_blocks", None) or ()), *REPEATED}
    found = {name: module for name, module in denoiser.named_modules() if type(module).__name__ in kinds}
    sizes = {name: frozen_bytes(module) for name, module in found.items()}
    least = LEAST_SHARE * max(sizes.values(), default=0)
    return [found[name] for name in sorted(found, key=_place_of) if sizes[name] and sizes[name] >= least]


def streamed_blocks(denoiser: nn.Module, count: int) -> list[nn.Module]:
    """The `count` blocks that visit, in the order in which they run; all where there are fewer.

    They are spread as evenly as can be, so that each copy has the work of the blocks between to hide behind; and each
    number's blocks are among those of the next, so that more of them always leave less on the GPU.
    """
    blocks = swappable_blocks(denoiser)
    return [blocks[index] for index in sorted(_spread(len(blocks))[:count])]


def freed_by_swapping(denoiser: nn.Module) -> list[int]:
    """Bytes that are not on the GPU when none, one, two, … blocks visit it: there lie two of the largest that do."""
    blocks = swappable_blocks(denoiser)
    sizes, freed, largest, count = [*map(frozen_bytes, blocks)], [0], 0, 0
    away = 0
    for index in _spread(len(blocks)):
        away, count = away + sizes[index], count + 1
        largest = max(largest, _aligned(sizes[index]))
        freed.append(max(0, away - 2 * largest) if count > 1 else 0)
    return freed


def frozen_bytes(block: nn.Module) -> int:
    """Of a block's weights that are not trained, as they are stored."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _frozen(block))


def swap_blocks(denoiser: nn.Module, count: int, device: torch.device) -> int:
    """Let `count` blocks visit `device`, and the others stay; can be called again with another number between steps.

    A block that begins to visit leaves the GPU, one that ceases to comes back to stay. Returns how many it is.
    Raises torch.OutOfMemoryError where the host, or the GPU, has no room for them.
    """
    streaming = denoiser.__dict__.get(STREAMING)
    if streaming is None:
        if not count:
            return 0
        streaming = denoiser.__dict__[STREAMING] = BlockSwap(device)
    blocks = streamed_blocks(denoiser, count)
    streaming.change(blocks, swappable_blocks(denoiser))
    return len(blocks)


def swapped_count(denoiser: nn.Module) -> int:
    """How many blocks visit now."""
    streaming = denoiser.__dict__.get(STREAMING)
    return len(streaming.guests) if streaming else 0


def swapped_storages(denoiser: nn.Module) -> set[int]:
    """The storages on the GPU, by address, that blocks lie in whenever they visit."""
    streaming = denoiser.__dict__.get(STREAMING)
    return {guest.storage._cdata for guest in streaming.guests} if streaming else set()


def block_swap_note(denoiser: nn.Module, asked: int) -> list[str]:
    """What is to be said of the blocks that visit, of which `asked` were asked for: a line, or none."""
    streaming = denoiser.__dict__.get(STREAMING)
    if streaming is None:
        return []
    count, on_gpu = len(streaming.guests), streaming.device.type == "cuda"
    place = "the GPU" if on_gpu else "the CPU, as if it were a GPU"
    more = f"; {asked} were asked for, and there are no more" if asked > count else ""
    slow = on_gpu and not all(guest.pinned for guest in streaming.guests)
    waits = "; host memory could not be locked, so their copies are waited for" if slow else ""
    return [f"streaming: {count} of {len(swappable_blocks(denoiser))} blocks visit {place}{more}{waits}"]


def move_to_device(denoiser: nn.Module, device: torch.device) -> None:
    """Bring a denoiser to a device, but for the weights of blocks that visit, which stay in host memory.

    In place of `denoiser.to(device)` wherever a denoiser may be streamed.
    """
    streaming = denoiser.__dict__.get(STREAMING)
    if streaming is None:
        denoiser.to(device)
        return
    streaming.send_away()
    visiting = {id(tensor) for guest in streaming.guests for tensor in guest.tensors}
    for module in denoiser.modules():
        module._apply(lambda tensor: tensor if id(tensor) in visiting else tensor.to(device), recurse=False)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _spread(count: int) -> list[int]:
    """The numbers under `count` so that the first of them, however many, lie spread (van der Corput's order)."""
    bits = max(1, math.ceil(math.log2(max(count, 1))))
    return [index for index in (int(f"{place:0{bits}b}"[::-1], 2) for place in range(2**bits)) if index < count]


def _place_of(name: str) -> tuple[Any, ...]:
    """Where a block runs: by stage, then by number; a U-Net's ResNet block before the attention of the same number."""
    parts = name.split(".")
    stage = STAGES.get(parts[0], 1 if parts[0].startswith("single") else 0)
    numbers = [int(part) for part in parts if part.isdigit()]
    number_of_stage = [numbers.pop(0)] if parts[0] in ("down_blocks", "up_blocks") else []
    layer = numbers.pop(0) if numbers else 0
    return (stage, number_of_stage, layer, "resnets" not in parts, numbers)


def _frozen(block: nn.Module) -> list[Tensor]:
    """The tensors of a block that are not trained: weights, scales and all else, however they are stored."""
    found = [tensor for tensor in (*block.parameters(), *block.buffers()) if not tensor.requires_grad]
    return [tensor for tensor in found if tensor.numel()]


class SwappedBlock:
    """One block's frozen tensors, side by side in host memory; on the GPU only while `visiting`."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.block, self.device, self.visiting = block, device, False
        self.tensors = _frozen(block)
        # Strides are kept: memory order may be another than that of the dimensions.
        self.strides = [torch.empty_like(tensor, device="meta").stride() for tensor in self.tensors]
        self.offsets, self.size = [0] * len(self.tensors), 0
        for index, tensor in enumerate(self.tensors):
            self.offsets[index] = self.size
            self.size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self.host = torch.empty(self.size, dtype=torch.uint8)
        self.at_home = self._views(self.host.untyped_storage())
        for tensor, view in zip(self.tensors, self.at_home, strict=True):
            view.copy_(tensor.detach())
        self.pinned = device.type == "cuda" and _pin(self)
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.flat: Tensor | None = None
        self.away: list[Tensor] = []
        self.copied: torch.cuda.Event | None = None  # where the compute stream has not yet waited for the copy
        self.stay_at_home()

    def _views(self, storage: torch.UntypedStorage) -> list[Tensor]:
        found = []
        for tensor, offset, stride in zip(self.tensors, self.offsets, self.strides, strict=True):
            view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
            found.append(view.set_(storage, offset // tensor.element_size(), tensor.shape, stride))
        return found

    def stay_at_home(self) -> None:
        """The layers' tensors are those in host memory, so that whoever reads them reads what is there."""
        for tensor, view in zip(self.tensors, self.at_home, strict=True):
            tensor.data = view

    def visit(self, stream: torch.cuda.Stream | None) -> None:
        """Begin to copy the block to the GPU, in `stream` where there is one."""
        # Allocated in the stream that computes: what was freed there before may be taken at once.
        self.storage.resize_(self.size)
        if self.flat is None:
            self.flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage, 0, (self.size,), (1,))
            self.away = self._views(self.storage)
        if stream is None:
            self.flat.copy_(self.host)
        else:
            stream.wait_stream(torch.cuda.current_stream(self.device))  # its earlier work used this very memory
            with torch.cuda.stream(stream):
                self.flat.copy_(self.host, non_blocking=True)
                self.copied = stream.record_event()
        self.visiting = True
        for tensor, view in zip(self.tensors, self.away, strict=True):
            tensor.data = view

    def arrive(self) -> None:
        """What is computed from here on waits for the copy, on the GPU."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.copied = None

    def leave(self) -> None:
        """Free the GPU of the block. Its memory serves the stream that computes, in its order, so nothing waits."""
        self.arrive()
        self.stay_at_home()
        self.storage.resize_(0)
        self.visiting = False

    def settle(self) -> None:
        """Become a block that stays, with weights of its own on the GPU."""
        if self.visiting:
            self.leave()
        for tensor, view in zip(self.tensors, self.at_home, strict=True):
            tensor.data = view.to(self.device, copy=True)


@dataclass(eq=False)
class BlockSwap:
    """The blocks of a denoiser that visit a GPU, in the order in which they run."""

    device: torch.device
    guests: list[SwappedBlock] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    stream: torch.cuda.Stream | None = None

    def change(self, blocks: list[nn.Module], swappable: list[nn.Module]) -> None:
        """Let these of the blocks that can visit do so, and no others."""
        known = {id(guest.block): guest for guest in self.guests}
        if [id(block) for block in blocks] == list(known):
            return
        if self.device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        self.send_away()
        try:
            for guest in [guest for key, guest in known.items() if key not in {id(block) for block in blocks}]:
                guest.settle()
                del known[id(guest.block)]
            for block in blocks:
                if id(block) not in known:
                    known[id(block)] = SwappedBlock(block, self.device)
        finally:  # where memory ran out, those that visit are those that came so far
            places = {id(block): place for place, block in enumerate(swappable)}
            self._take(sorted(known.values(), key=lambda guest: places[id(guest.block)]))

    def _take(self, guests: list[SwappedBlock]) -> None:
        """Let these, in the order in which they run, come when they are called."""
        self.guests = guests
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for place, guest in enumerate(self.guests):
            self.handles += [
                guest.block.register_forward_pre_hook(self._before(place)),
                guest.block.register_forward_hook(self._after(place)),
            ]

    def need(self, place: int) -> None:
        """Have the block on the GPU, the next one on its way, and no other there."""
        following = self._following(place)
        # Neither counted nor kept by what watches operators, such as selective checkpointing.
        with torch.no_grad(), _disable_current_modes():
            for other, guest in enumerate(self.guests):
                if guest.visiting and other not in (place, following):
                    guest.leave()
            if not self.guests[place].visiting:
                self.guests[place].visit(self.stream)
            self.guests[place].arrive()
            if not self.guests[following].visiting:
                self.guests[following].visit(self.stream)

    def send_away(self) -> None:
        """Take all visiting blocks off the GPU."""
        with torch.no_grad():
            for guest in self.guests:
                if guest.visiting:
                    guest.leave()

    def _following(self, place: int) -> int:
        """The block that is needed next. The last of a forward pass is the first of a backward pass."""
        last = len(self.guests) - 1
        if _in_backward():
            return place - 1 if place else min(1, last)
        if place < last:
            return place + 1
        return max(0, last - 1) if torch.is_grad_enabled() else 0

    def _before(self, place: int) -> Callable[..., None]:
        return lambda *_: self.need(place)

    def _after(self, place: int) -> Callable[..., None]:
        def arrived(gradient: Tensor) -> None:
            self.need(place)

        def watch(module: nn.Module, given: Any, result: Any) -> None:
            if _in_backward():  # a block computed again: its gradients come by way of the first
                return
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(arrived)

        return watch


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _pin(guest: SwappedBlock) -> bool:
    """Lock a block's host memory, so that it is copied beside the computing; whether that could be done.

    In place: torch's own pinned memory is rounded up to a power of two. Without it copies are right, and waited for.
    """
    cudart: Any = torch.cuda.cudart()
    place = guest.host.data_ptr()
    if int(cudart.cudaHostRegister(place, guest.size, 0)) != 0:
        # The failure stays the thread's last error until something asks for it, which the next kernel's launch does
        # and raises it as its own. torch has no name for cudaGetLastError, so that is a kernel of no account.
        with suppress(RuntimeError):
            torch.ones(1, device=guest.device)
        return False
    weakref.finalize(guest, cudart.cudaHostUnregister, place)
    return True
