"""Trace the memory and operations of one forward and backward pass, on tensors without data.

The trainer's own backward pass runs on the meta device. Each tensor's storage is counted from the operator that makes
it until Python frees it, rounded up to 512 bytes as CUDA's allocator does; attention goes to the flash operator, as on
a GPU. Nothing is loaded, and no GPU is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.masters import Adapter, make_adapter
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.config.schema import CheckpointingMode, LossSection, OptimizerSection, Precision
from lora_trainer.core.conditioning import CONTROL
from lora_trainer.diffusion.loss import make_loss
from lora_trainer.diffusion.process import Prediction, Process
from lora_trainer.models.frozen import widen_kept
from lora_trainer.models.memory.block_swap import freed_by_swapping
from lora_trainer.models.memory.checkpointing import checkpoint_blocks, checkpointable_blocks
from lora_trainer.models.memory.offload import AHEAD, Offload
from lora_trainer.models.quantization.store import make_quantizer, store_layers
from lora_trainer.optim.clipping import make_clip
from lora_trainer.optim.state_size import ROUNDING
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.step import StepContext, backward

if TYPE_CHECKING:
    from lora_trainer.models.family import Architecture, Family

META = torch.device("meta")
TIMESTEPS = 1000
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention


@dataclass(frozen=True)
class Trace:
    """Bytes and operations of one micro-batch's forward and backward pass.

    `peak` is the largest memory besides weights and copies.
    """

    weights: int
    copies: int
    peak: int
    flops: int


@dataclass(frozen=True)
class Subject:
    """A denoiser on the meta device with its LoRA, ready to be traced. Shapes are those of the trained tensors.

    `controls` are the control images of each sample, as large as its latents. `results` remembers the results of
    operators, for the next trace.
    """

    denoiser: nn.Module
    family: Family
    architecture: Architecture
    adapter: Adapter
    dtype: torch.dtype
    results: dict[Any, Any] = field(default_factory=dict)
    controls: int = 0

    @property
    def blocks(self) -> int:
        return len(checkpointable_blocks(self.denoiser))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(copy.shape) for copy in self.adapter.copies.values()]

    @property
    def freed(self) -> list[int]:
        """Bytes that are not on the GPU when none, one, two, … blocks are swapped."""
        return freed_by_swapping(self.denoiser)

    @property
    def weights(self) -> int:
        """Bytes of all frozen weights, as a GPU's allocator rounds them."""
        copies = {id(copy) for copy in self.adapter.copies.values()}
        every = (*self.denoiser.parameters(), *self.denoiser.buffers())
        frozen = [tensor.untyped_storage() for tensor in every if id(tensor) not in copies]
        return sum({storage._cdata: _allocated(storage.nbytes()) for storage in frozen}.values())


def make_subject(
    family: Family,
    architecture: Architecture,
    *,
    rank: int,
    targets: str | tuple[str, ...],
    dtype: torch.dtype,
    stored: Precision = "bf16",
    products: bool = False,
    kind: str = "lora",
    options: AdapterOptions | None = None,
) -> Subject:
    """Build the denoiser without weights and put the LoRA on it. `products`: int8 weights are multiplied in int8.

    Raises UsageError for targets that match nothing.
    """
    _route_attention()
    with META:
        denoiser = family.denoiser.make(architecture.denoiser).requires_grad_(False)
        nn.Module.to(denoiser, dtype)  # not diffusers' own, which warns
        widen_kept(denoiser, dtype)
        names = target_modules(denoiser, family.denoiser, targets)
        # Scale and dropout take no memory that counts.
        sized = AdapterOptions(rank, float(rank))
        if options is not None:
            sized = replace(sized, initialization=options.initialization, ranks=options.ranks, factor=options.factor)
        parameters = ADAPTERS[kind].load().inject(denoiser, names, sized, 0)
        if quantize := make_quantizer(stored, products=products):
            store_layers(denoiser, quantize)
        adapter = make_adapter(parameters, dtype)
    return Subject(denoiser.train(), family, architecture, adapter, dtype)


def trace(
    subject: Subject,
    *,
    micro: int,
    height: int,
    width: int,
    checkpointed: int,
    recompute: CheckpointingMode = "full",
    offloaded: bool = False,
) -> Trace:
    """Trace one micro-batch of latents [micro, C, height, width] with so many blocks checkpointed.

    `offloaded`: activations that autograd saves are in host memory.
    """
    checkpoint_blocks(subject.denoiser, checkpointed, recompute)
    copies = list(subject.adapter.copies.values())
    account = Account(subject.results)
    for tensor in (*subject.denoiser.parameters(), *subject.denoiser.buffers(), *copies):
        account.follow(tensor)
    resident, weights = account.live, subject.weights
    with META:
        context = _step_context(subject)
        if offloaded:
            context = replace(context, predict=Watched(account, subject.denoiser).around(context.predict))
        batch = _micro_batch(subject, micro, height, width)
        with account:
            backward(context, batch.to(META, subject.dtype), micro)
    for copy in copies:
        copy.grad = None
    return Trace(weights, resident - weights, account.most - resident, account.flops)


class Account(TorchDispatchMode):
    """Follows every storage that is allocated inside it, and counts operations."""

    def __init__(self, results: dict[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.most = self.flops = 0
        self.followed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.results = results

    def follow(self, tensor: Tensor) -> None:
        """Count the tensor's storage from now until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.followed:
            return
        size = _allocated(storage.nbytes())

        def forget(_: object) -> None:
            self.live -= size
            del self.followed[key]

        self.followed[key] = weakref.ref(storage, forget)
        self.live += size

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        result = self._result(function, arguments, named or {})
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.flops += count(*arguments, **(named or {}), out_val=result)
        for leaf in _tensors(result):
            self.follow(leaf)
        self.most = max(self.most, self.live)
        return result

    def _result(self, function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The operator's result. Blocks repeat: a known result in new memory is made from its shape, which is faster."""
        key = (function, _signature(arguments), _signature(tuple(named.items())))
        if key in self.results:
            known = self.results[key]
            return known.make() if isinstance(known, _NewTensor) else tree_map_only(_NewTensor, _NewTensor.make, known)
        result = function(*arguments, **named)
        inputs = {leaf.untyped_storage()._cdata for leaf in _tensors((arguments, tuple(named.values())))}
        if all(leaf.is_meta and leaf.untyped_storage()._cdata not in inputs for leaf in _tensors(result)):
            self.results[key] = tree_map_only(
                Tensor, lambda leaf: _NewTensor(leaf.shape, leaf.stride(), leaf.dtype), result
            )
        return result


class Counted(Account):
    """Follows the storages of a step that is really taken."""

    def __init__(self) -> None:
        super().__init__({})

    def _result(self, function: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return function(*arguments, **named)  # what was computed before says nothing of what is now


class Watched(Offload):
    """Offloading whose storages are followed again when they return."""

    def __init__(self, account: Account, denoiser: nn.Module, device: torch.device = META) -> None:
        super().__init__(device, denoiser)
        self.account = account

    def around(self, predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def with_offload(*arguments: Any) -> Tensor:
            with self.keeping():
                return predict(*arguments)

        return with_offload

    def unpack(self, kept: Any) -> Tensor:
        tensor = super().unpack(kept)
        if not isinstance(kept, Tensor):
            place = kept[0].place
            for each in self.order[max(0, place - AHEAD) : place + 1]:
                if (one := each()) is not None and one.flat is not None:
                    self.account.follow(one.flat)
        return tensor


@dataclass(frozen=True)
class _NewTensor:
    """Shape and dtype of a new tensor in an operator's result, to make another one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


def _allocated(size: int) -> int:
    """What a GPU's allocator reserves for so many bytes."""
    return -(-size // ROUNDING) * ROUNDING


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an operator's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _signature(value: Any) -> Any:
    """What the shape of a result depends on, as a key."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return (type(value), value)


def _step_context(subject: Subject) -> StepContext:
    """The context that the backward pass needs; gradients stay where autograd puts them."""
    process = Process(torch.empty(TIMESTEPS), cast("Prediction", subject.architecture.facts.prediction))
    masters = subject.adapter.masters
    return StepContext(
        denoiser=subject.denoiser,
        predict=subject.family.denoiser.predict,
        process=process,
        loss=make_loss(LossSection(), process),
        adapter=Adapter({}, masters),
        average=None,
        shown=dict,
        optimizer=torch.optim.SGD(list(masters.values())),
        scaler=torch.amp.GradScaler(enabled=False),
        reduce=None,
        device=META,
        dtype=subject.dtype,
        clip=make_clip(OptimizerSection()),
    )


def _micro_batch(subject: Subject, micro: int, height: int, width: int) -> MicroBatch:
    latents = torch.empty(micro, subject.architecture.facts.latent_channels, height, width)
    noise = torch.empty_like(latents)
    architecture = subject.architecture
    shapes = subject.family.text.cond_shapes(architecture.denoiser, architecture.facts, subject.controls)
    return MicroBatch(
        latents=latents,
        noise=noise,
        added=noise,
        t=torch.empty(micro, dtype=torch.long),
        cond={
            **{name: torch.empty(micro, *rest) for name, rest in shapes.items()},
            **{f"{CONTROL}{number}": torch.empty_like(latents) for number in range(subject.controls)},
        },
        sizes=torch.empty(micro, 6),
        weights=torch.empty(micro),
    )


@cache
def _route_attention() -> Library:
    """On the meta device attention is flash attention; torch's own choice there keeps every score."""

    def flash(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return cast("Tensor", ATTENTION(query, key, value, dropout_p, is_causal, scale=scale)[0])

    library = Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", flash, "AutogradMeta")
    return library
