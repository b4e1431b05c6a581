"""Later blocks of a denoiser on a second GPU: a model that one GPU does not fit, in one process (naive pipeline).

A block of the second GPU moves its inputs there, whatever they are: hidden states, embeddings, the skip connections of a
U-Net. The last block of each list moves its result back, so all code between the lists sees the first GPU alone. Autograd
moves gradients the same way. While one GPU computes, the other waits.

The adapter's weights of a block are beside the block; their masters and the optimizer stay on the first GPU
(`adapters/masters.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from lora_trainer.models.memory.block_swap import (
    DIVISION,
    STAGES,
    frozen_bytes,
    in_backward,
    move_to_device,
    swappable_blocks,
)

MIB = 2**20
Move = Callable[[Tensor, torch.device], Tensor]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; itself where it is there."""
    return tensor if tensor.device == device else tensor.to(device)


def divisible_lists(denoiser: nn.Module) -> list[list[nn.Module]]:
    """The blocks that can be on a second GPU, in the order in which they run, list by list.

    Those of a U-Net are its down, middle and up blocks, which are one list: between them runs nothing else. Those of a
    transformer are its repeated blocks.
    """
    parts = dict(denoiser.named_children())
    if all(name in parts for name in STAGES):
        stages = [parts[name] for name in sorted(STAGES, key=STAGES.__getitem__)]
        return [[block for part in stages for block in (part if isinstance(part, nn.ModuleList) else (part,))]]
    owners = {id(block): name for name, part in parts.items() for block in part.children()}
    found: dict[str, list[nn.Module]] = {}
    for block in swappable_blocks(denoiser):
        if id(block) in owners:
            found.setdefault(owners[id(block)], []).append(block)
    return list(found.values())


def divisible_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """The same in one list."""
    return [block for part in divisible_lists(denoiser) for block in part]


def half_of(sizes: Sequence[int]) -> int:
    """How many of the last blocks have half of the bytes of all, or as little more as possible."""
    sums = [*accumulate(reversed(sizes))]
    return next((count for count, total in enumerate(sums, 1) if 2 * total >= sums[-1]), 0)


@dataclass(eq=False)
class Division:
    """The `blocks` of a denoiser whose weights are on the `second` device while the others are on the `first`."""

    first: torch.device
    second: torch.device
    blocks: Sequence[nn.Module]
    move: Move = to_device
    moved: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # in this forward pass

    def place(self, denoiser: nn.Module, device: torch.device) -> None:
        """Move the denoiser: divided where `device` is the first, else all of it to `device`."""
        there = {id(module) for block in self.blocks for module in block.modules()}
        for module in denoiser.modules():
            target = self.second if device == self.first and id(module) in there else device
            module._apply(lambda tensor, target=target: tensor.to(target), recurse=False)

    def bring(self, values: Any) -> Any:
        """Values of any structure with their tensors on the second device; each tensor crosses once in a forward pass."""

        def one(tensor: Tensor) -> Tensor:
            version = None if tensor.is_inference() else tensor._version
            known = self.moved.get(tensor)
            if known is not None and version is not None and known[0] == version:
                there: Tensor = known[1]
                return there
            there = self.move(tensor, self.second)
            if there is not tensor:
                self.moved[tensor] = (version, there)
            return there

        return tree_map_only(Tensor, one, values)

    def forget(self, *_: Any) -> None:
        """Let go of what crossed in a forward pass."""
        self.moved.clear()

    def run_there(self, block: nn.Module, *, returns: bool) -> None:
        """Have a block compute on the second device; its result returns to the first one, or stays."""
        forward = block.forward

        @wraps(forward)
        def on_second(*arguments: Any, **named: Any) -> Any:
            arguments, named = self.bring((arguments, named))
            # Kernels that others wrote may launch on the current device, whatever their tensors are on.
            current: AbstractContextManager[Any] = nullcontext()
            if self.second.type == "cuda":
                current = torch.cuda.device(self.second)
            with current:
                result = forward(*arguments, **named)
            return tree_map_only(Tensor, lambda each: self.move(each, self.first), result) if returns else result

        block.forward = on_second
        block.__dict__[DIVISION] = self


@dataclass
class Crossing:
    """A tensor that blocks read: its bytes, the block that made it, or 0 for all else, and the last block that reads it."""

    size: int
    maker: int
    reader: int


class BlockWatch:
    """Which block of a denoiser runs, or whose backward pass does, inside the `with`: counted from 1, 0 for all else.

    `crossings` are the tensors that blocks read, `returned` the bytes that the last block of each list leaves.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        self.blocks = divisible_blocks(denoiser)
        self.kinds, self.running = len(self.blocks) + 1, 0
        self.handles: list[Any] = []
        self.crossings, self.returned = list[Crossing](), dict[int, int]()
        self._ends = {id(part[-1]) for part in divisible_lists(denoiser)}
        self._known = WeakTensorKeyDictionary()

    def __enter__(self) -> Self:
        for number, block in enumerate(self.blocks, 1):
            self.handles += self._watch(block, number)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def arriving(self, count: int) -> tuple[int, int]:
        """Bytes that arrive on each of two GPUs in a forward pass with the last `count` blocks on the second."""
        last = len(self.blocks) - count  # on the first
        to_first = sum(size for block, size in self.returned.items() if block > last)
        return to_first, sum(each.size for each in self.crossings if each.maker <= last < each.reader)

    def _meet(self, values: Any) -> Iterator[tuple[Tensor, Crossing]]:
        """The tensors in a forward pass's values, each as it is known, or as made by what runs now."""
        for tensor in () if in_backward() else tree_leaves(values):
            if isinstance(tensor, Tensor):
                if tensor not in self._known:
                    size = tensor.numel() * tensor.element_size()
                    self._known[tensor] = Crossing(size, self.running, self.running)
                    self.crossings.append(self._known[tensor])
                yield tensor, self._known[tensor]

    def _watch(self, block: nn.Module, number: int) -> tuple[Any, Any]:
        outside: list[int] = []

        def enter(gradient: Tensor, now: int) -> None:
            self.running = now

        def before(module: nn.Module, inputs: Any, named: Any) -> None:
            for tensor, crossing in self._meet((inputs, named)):
                crossing.reader = number
                if number == 1 and tensor.requires_grad:  # its gradient is the block's last
                    tensor.register_hook(partial(enter, now=0))
            outside.append(self.running)
            self.running = number

        def after(module: nn.Module, inputs: Any, result: Any) -> None:
            for tensor, crossing in self._meet(result):
                if id(module) in self._ends:
                    self.returned[number] = self.returned.get(number, 0) + crossing.size
                if tensor.requires_grad:
                    tensor.register_hook(partial(enter, now=number))
            self.running = outside.pop()

        return block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)


def divide(
    denoiser: nn.Module, count: int | None, first: torch.device, second: torch.device, move: Move = to_device
) -> str:
    """Put the last `count` blocks on the `second` device, or half of all by their weights; returns the log line.

    Call it when the adapter is injected and blocks are compiled. Weights are moved then, those of the other blocks to
    `first`, where the optimizer is. `move` is what brings a tensor to a device.
    """
    lists, blocks = divisible_lists(denoiser), divisible_blocks(denoiser)
    sizes = [frozen_bytes(block) for block in blocks]
    count = min(half_of(sizes) if count is None else count, len(blocks))
    chosen = blocks[len(blocks) - count :]
    division = denoiser.__dict__[DIVISION] = Division(first, second, chosen, move)
    ends = {id(part[-1]) for part in lists}
    for block in chosen:
        division.run_there(block, returns=id(block) in ends)
    denoiser.register_forward_hook(division.forget, always_call=True)
    move_to_device(denoiser, first)
    weights = f"{sum(sizes[len(blocks) - count :]) / MIB:,.1f} of {frozen_bytes(denoiser) / MIB:,.1f} MiB"
    return f"divided by layers: the last {count} of {len(blocks)} blocks on {second}, {weights} of frozen weights"


def arrived(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A block's inputs, where it computes: a checkpoint keeps these, and the state of that device's random numbers."""
    division: Division | None = block.__dict__.get(DIVISION)
    if division is None:
        return inputs
    brought: tuple[Any, ...] = division.bring(inputs)
    return brought
