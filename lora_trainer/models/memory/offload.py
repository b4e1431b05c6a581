"""Activation offload: tensors for the backward pass wait in host memory, copied while the GPU computes.

torch.autograd.graph.save_on_cpu does the same but waits for each copy. Here a stream of its own copies a tensor out
while later ones are computed, and back while their gradients are. Whole storages are moved, once, whatever number of
views autograd keeps of them, and views come back as they were: so no bit changes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lora_trainer.models.memory.block_swap import swapped_storages

LEAST_BYTES = 2**20  # smaller ones gain little, and each costs a copy
LEAVING = 4  # storages on the GPU while they are copied out: more hold memory, fewer make the GPU wait
AHEAD = 2  # storages that are copied back before they are needed

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


def offloaded(work: Callable[Inputs, Result], device: torch.device, model: nn.Module) -> Callable[Inputs, Result]:
    """The same work with its saved tensors in host memory until the backward pass, except the model's own tensors."""
    offload = Offload(device, model)

    def with_offload(*inputs: Inputs.args, **named: Inputs.kwargs) -> Result:
        with offload.keeping():
            return work(*inputs, **named)

    return with_offload


def offload_note(requested: bool, device: torch.device) -> list[str]:
    """The log line of activation offload; none without it."""
    if not requested:
        return []
    if device.type != "cuda":
        return ["memory.offload_activations: nothing to do, all activations are in system memory"]
    return [f"activations of {LEAST_BYTES >> 20} MiB and more wait in system memory for the backward pass"]


class Away:
    """One storage's bytes in host memory; on the GPU again from `bring` on. `place` is its number in the pass."""

    def __init__(self, flat: Tensor, stream: torch.cuda.Stream | None, place: int) -> None:
        self.device, self.stream, self.place = flat.device, stream, place
        self.flat: Tensor | None = flat  # on the GPU: the original, then the copy that came back
        host = flat.device if flat.is_meta else torch.device("cpu")  # what is only traced has no bytes anywhere
        self.host = torch.empty(flat.shape, dtype=flat.dtype, device=host, pin_memory=stream is not None)
        self.copied = self._copy(self.host, flat)

    def _copy(self, into: Tensor, source: Tensor) -> torch.cuda.Event | None:
        if self.stream is None:
            into.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return copied

    def wait(self) -> None:
        """Make the GPU wait for the copy before later work and before freeing memory."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.copied = None

    def go(self) -> None:
        """Free the GPU's memory."""
        self.wait()
        self.flat = None

    def bring(self) -> None:
        """Begin to copy back."""
        if self.flat is None:
            self.flat = torch.empty_like(self.host, device=self.device)
            if self.stream is not None:
                self.flat.record_stream(self.stream)  # autograd may free it before the copy is done
            self.copied = self._copy(self.flat, self.host)


class Offload:
    """Hooks for the tensors that autograd saves in each forward pass.

    The model's own parameters and buffers are skipped: they are there anyway, and block swap handles swapped blocks.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.device, self.model = device, model
        self.own = set[int]()  # the storages of what stays
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving = deque[Away]()
        self.known: dict[tuple[int, int], tuple[weakref.ref[Any], Away]] = {}
        self.order: list[weakref.ref[Away]] = []

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Tensors saved inside the block, a forward pass, wait in host memory until its backward pass."""
        self._begin()
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            try:
                yield
            finally:
                self.known.clear()  # a storage may have other contents the next time

    def _begin(self) -> None:
        while self.leaving:
            self.leaving.popleft().go()
        self.order.clear()
        if torch.is_grad_enabled():
            tensors = (*self.model.parameters(), *self.model.buffers())
            self.own = {tensor.untyped_storage()._cdata for tensor in tensors} | swapped_storages(self.model)

    def pack(self, tensor: Tensor) -> Any:
        """The tensor itself, or a handle to restore it from."""
        if not self._moves(tensor):
            return tensor
        away = self._sent(tensor.untyped_storage(), tensor._version)
        return away, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def _sent(self, storage: torch.UntypedStorage, version: int) -> Away:
        """The storage on its way to host memory; each is copied once."""
        key = (storage._cdata, version)
        if key in self.known and self.known[key][0]() is storage:
            return self.known[key][1]
        with torch.no_grad(), _disable_current_modes():
            flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (storage.nbytes(),), (1,))
            away = Away(flat, self.stream, len(self.order))
            self.known[key] = (weakref.ref(storage), away)
            self.order.append(weakref.ref(away))
            self.leaving.append(away)
            if len(self.leaving) > LEAVING:
                self.leaving.popleft().go()
        return away

    def unpack(self, kept: Any) -> Tensor:
        """The saved tensor, on the GPU; starts to copy those saved before it, which are needed next."""
        if isinstance(kept, Tensor):
            return kept
        away, dtype, offset, shape, stride = kept
        with torch.no_grad(), _disable_current_modes():
            away.bring()
            away.wait()
            if away in self.leaving:
                self.leaving.remove(away)
            for earlier in self.order[max(0, away.place - AHEAD) : away.place][::-1]:
                if (one := earlier()) is not None:
                    one.bring()
            storage = away.flat.untyped_storage()
            return torch.empty(0, dtype=dtype, device=self.device).set_(storage, offset, shape, stride)

    def _moves(self, tensor: Tensor) -> bool:
        """Whether a tensor is offloaded: large, on the GPU, and not the model's own."""
        if tensor.device != self.device or type(tensor) is not Tensor or tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= LEAST_BYTES and storage._cdata not in self.own
