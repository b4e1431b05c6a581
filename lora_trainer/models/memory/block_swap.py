"""Block swap: frozen blocks are loaded on the GPU one after the other, from host memory and never back to it.

Weights that are not trained need not return: the copy in host memory stays. While a block computes, the one that is
needed next is copied in a stream of its own: the following block in a forward pass, the one before in a backward pass.
So two blocks are on the GPU at any time, whatever their number.

Autograd keeps views of the weights that a block computed with. They stay valid: a loaded block always lies in the
same storage object, which is allocated and freed (as FSDP frees gathered weights, arXiv:2304.11277). So every kind of
layer can be swapped, checkpointed or not.
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

from lora_trainer.models.memory.checkpointing import repeated_kinds

ALIGNMENT = 512  # bytes, as CUDA's allocator aligns: kernels may choose by it
LEAST_SHARE = 1 / 8  # of the largest block: what is smaller frees little, and would hide no copy
STAGES = {"down_blocks": 0, "mid_block": 1, "up_blocks": 2}  # of a U-Net, which registers its middle last
BLOCK_SWAP = "_streaming"


def swappable_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """The blocks that can be swapped, in the order in which they run: those that repeat, without the smallest."""
    kinds = repeated_kinds(denoiser)
    found = {name: module for name, module in denoiser.named_modules() if type(module).__name__ in kinds}
    sizes = {name: frozen_bytes(module) for name, module in found.items()}
    least = LEAST_SHARE * max(sizes.values(), default=0)
    return [found[name] for name in sorted(found, key=_place_of) if sizes[name] and sizes[name] >= least]


def streamed_blocks(denoiser: nn.Module, count: int) -> list[nn.Module]:
    """The `count` blocks to swap, in the order in which they run; all where there are fewer.

    They are spread as evenly as possible, so that the blocks between hide each copy; and each
    number's blocks are among those of the next, so that more of them always leave less on the GPU.
    """
    blocks = swappable_blocks(denoiser)
    return [blocks[index] for index in sorted(_spread(len(blocks))[:count])]


def freed_by_swapping(denoiser: nn.Module) -> list[int]:
    """Bytes that are not on the GPU when none, one, two, … blocks are swapped: two of the largest of them are on it."""
    blocks = swappable_blocks(denoiser)
    sizes, freed, largest, count = [*map(frozen_bytes, blocks)], [0], 0, 0
    away = 0
    for index in _spread(len(blocks)):
        away, count = away + sizes[index], count + 1
        largest = max(largest, -(-sizes[index] // ALIGNMENT) * ALIGNMENT)
        freed.append(max(0, away - 2 * largest) if count > 1 else 0)
    return freed


def frozen_bytes(block: nn.Module) -> int:
    """Bytes of a block's frozen weights, as they are stored."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _frozen(block))


def swap_blocks(denoiser: nn.Module, count: int, device: torch.device) -> int:
    """Swap `count` blocks, and keep the others on `device`; can be called again with another number between steps.

    Newly swapped blocks leave the GPU, and blocks that are no longer swapped return to it. Returns their number.
    Raises torch.OutOfMemoryError where the host, or the GPU, has no room for them.
    """
    block_swap = denoiser.__dict__.get(BLOCK_SWAP)
    if block_swap is None:
        if not count:
            return 0
        block_swap = denoiser.__dict__[BLOCK_SWAP] = BlockSwap(device)
    blocks = streamed_blocks(denoiser, count)
    block_swap.change(blocks, swappable_blocks(denoiser))
    return len(blocks)


def swapped_count(denoiser: nn.Module) -> int:
    """How many blocks are swapped now."""
    block_swap = denoiser.__dict__.get(BLOCK_SWAP)
    return len(block_swap.swapped) if block_swap else 0


def swapped_storages(denoiser: nn.Module) -> set[int]:
    """The storages on the GPU, by address, of swapped blocks."""
    block_swap = denoiser.__dict__.get(BLOCK_SWAP)
    return {swapped_block.storage._cdata for swapped_block in block_swap.swapped} if block_swap else set()


def block_swap_note(denoiser: nn.Module, requested: int) -> list[str]:
    """The log line of swapped blocks, of which `requested` were set; none without block swap."""
    block_swap = denoiser.__dict__.get(BLOCK_SWAP)
    if block_swap is None:
        return []
    count, on_gpu = len(block_swap.swapped), block_swap.device.type == "cuda"
    place = "" if on_gpu else " (on the CPU, as if it were a GPU)"
    more = f"; {requested} were requested" if requested > count else ""
    slow = on_gpu and not all(swapped_block.pinned for swapped_block in block_swap.swapped)
    waits = "; host memory could not be pinned, so each copy takes extra time" if slow else ""
    return [f"block swap: {count} of {len(swappable_blocks(denoiser))} blocks{place}{more}{waits}"]


def move_to_device(denoiser: nn.Module, device: torch.device) -> None:
    """Move a denoiser to a device, but for the weights of swapped blocks, which stay in host memory.

    Use it in place of `denoiser.to(device)` wherever blocks may be swapped.
    """
    block_swap = denoiser.__dict__.get(BLOCK_SWAP)
    if block_swap is None:
        denoiser.to(device)
        return
    block_swap.send_away()
    swapped_ids = {id(tensor) for swapped_block in block_swap.swapped for tensor in swapped_block.tensors}
    for module in denoiser.modules():
        module._apply(lambda tensor: tensor if id(tensor) in swapped_ids else tensor.to(device), recurse=False)


def _spread(count: int) -> list[int]:
    """The numbers under `count` in van der Corput's order: the first of them, however many, are spread evenly."""
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
    """One block's frozen tensors, side by side in host memory; on the GPU only while `is_loaded`."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.block, self.device, self.is_loaded = block, device, False
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
        """Point the layers' tensors at host memory, so that reading them is always valid."""
        for tensor, view in zip(self.tensors, self.at_home, strict=True):
            tensor.data = view

    def load(self, stream: torch.cuda.Stream | None) -> None:
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
        self.is_loaded = True
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
        self.is_loaded = False

    def settle(self) -> None:
        """Become a block that stays, with weights of its own on the GPU."""
        if self.is_loaded:
            self.leave()
        for tensor, view in zip(self.tensors, self.at_home, strict=True):
            tensor.data = view.to(self.device, copy=True)


@dataclass(eq=False)
class BlockSwap:
    """The swapped blocks of a denoiser, in the order in which they run. `copied` counts bytes brought to the GPU."""

    device: torch.device
    copied: int = 0
    swapped: list[SwappedBlock] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    stream: torch.cuda.Stream | None = None

    def change(self, blocks: list[nn.Module], swappable: list[nn.Module]) -> None:
        """Swap these of the `swappable` blocks, and no others. Blocks are known by their weights, which copies share."""
        known = {id(swapped_block.tensors[0]): swapped_block for swapped_block in self.swapped}
        wanted = {id(_frozen(block)[0]): block for block in blocks}
        if list(wanted) == list(known):
            return
        if self.device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        self.send_away()
        try:
            for key in [key for key in known if key not in wanted]:
                known[key].settle()
                del known[key]
            for key, block in wanted.items():
                if key not in known:
                    known[key] = SwappedBlock(block, self.device)
        finally:  # where memory ran out, the blocks handled so far are swapped
            places = {id(_frozen(block)[0]): place for place, block in enumerate(swappable)}
            self._take([known[key] for key in sorted(known, key=places.__getitem__)])

    def _take(self, swapped: list[SwappedBlock]) -> None:
        """Load these blocks, in the order in which they run, when they are called."""
        self.swapped = swapped
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for place, swapped_block in enumerate(self.swapped):
            self.handles += [
                swapped_block.block.register_forward_pre_hook(self._before(place)),
                swapped_block.block.register_forward_hook(self._after(place)),
            ]

    def need(self, place: int) -> None:
        """Have the block on the GPU, the next one on its way, and no other there."""
        following = self._following(place)
        # Hidden from modes that watch operators, such as selective checkpointing.
        with torch.no_grad(), _disable_current_modes():
            for other, swapped_block in enumerate(self.swapped):
                if swapped_block.is_loaded and other not in (place, following):
                    swapped_block.leave()
            for needed in (place, following):
                if not self.swapped[needed].is_loaded:
                    self.swapped[needed].load(self.stream)
                    self.copied += self.swapped[needed].size
                if needed == place:
                    self.swapped[place].arrive()

    def send_away(self) -> None:
        """Unload all swapped blocks from the GPU."""
        with torch.no_grad():
            for swapped_block in self.swapped:
                if swapped_block.is_loaded:
                    swapped_block.leave()

    def _following(self, place: int) -> int:
        """The block that is needed next. The last of a forward pass is the first of a backward pass."""
        last = len(self.swapped) - 1
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

        def watch(module: nn.Module, inputs: Any, result: Any) -> None:
            if _in_backward():  # a recomputed block: its gradients pass through the first result
                return
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(arrived)

        return watch


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _pin(swapped_block: SwappedBlock) -> bool:
    """Pin a block's host memory, so that copies overlap with computation; whether that worked.

    In place: torch's own pinned memory is rounded up to a power of two. Without it copies are right, but synchronous.
    """
    cudart: Any = torch.cuda.cudart()
    place = swapped_block.host.data_ptr()
    if int(cudart.cudaHostRegister(place, swapped_block.size, 0)) != 0:
        # The failure stays the thread's last error, and the next kernel launch would raise it as its own.
        # torch does not expose cudaGetLastError, so an unimportant kernel takes the error here.
        with suppress(RuntimeError):
            torch.ones(1, device=swapped_block.device)
        return False
    weakref.finalize(swapped_block, cudart.cudaHostUnregister, place)
    return True
