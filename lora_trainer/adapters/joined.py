"""One pass of a frozen base for several adapters: each sample of the joined batch has its own run's adapter.

The base's layers run once on all samples. What a run's adapter adds is computed from its own rows alone, by its own layers,
so kinds, ranks, scales and targets may differ; LoRAs of one rank with equally many samples are two batched products
(arXiv:2310.18547, section 4, has the same grouping for inference). No operation mixes samples, so what is not finite in one
run's rows reaches no other's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lora_trainer.adapters.injection import ADAPTER
from lora_trainer.adapters.lora import SummedLinear
from lora_trainer.models.memory.block_swap import BLOCK_SWAP

PEFT = "peft_config"  # what peft leaves on a model that has an adapter


def adapted_layers(denoiser: nn.Module) -> dict[str, nn.Module]:
    """The layers of a denoiser that have an adapter, by the name of the layer that they wrap."""
    return {name: module for name, module in denoiser.named_modules() if isinstance(module, BaseTunerLayer)}


def bare_copy(denoiser: nn.Module) -> nn.Module:
    """The same modules without adapters, over the very same weights, which must be frozen; swapped blocks are swapped in both."""
    layers = adapted_layers(denoiser)
    own = {id(part) for layer in layers.values() for part in layer.modules()} - {
        id(part) for layer in layers.values() for part in cast("Any", layer).base_layer.modules()
    }
    same: dict[int, Any] = {}
    for module in denoiser.modules():
        if id(module) not in own:
            same |= {
                id(tensor): tensor for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
            }
    if (block_swap := denoiser.__dict__.get(BLOCK_SWAP)) is not None:
        same[id(block_swap)] = block_swap
    for layer in layers.values():
        same[id(layer)] = copy.deepcopy(cast("Any", layer).base_layer, same)
    bare = copy.deepcopy(denoiser, same)
    bare.__dict__.pop(PEFT, None)
    return bare


@dataclass
class JoinedBatch:
    """Whose samples a pass has, in their order: the adapted layers of each run by name, and how many samples it has."""

    runs: Sequence[tuple[Mapping[str, nn.Module], int]] = ()

    def rows(self, found: int, name: str) -> list[int]:
        """How many rows of a layer's input of `found` rows each run has. Raises ValueError where rows are not samples."""
        counts = [count for _, count in self.runs]
        if found != sum(counts):
            message = (
                f"{name} sees {found} rows in a batch of {sum(counts)} samples, so it cannot be known whose they are"
            )
            raise ValueError(message)
        return counts


class JoinedLayer(nn.Module):
    """A layer of the base whose output each run's adapter changes in its own rows."""

    def __init__(self, base_layer: nn.Module, name: str, batch: JoinedBatch) -> None:
        super().__init__()
        self.base_layer, self.name, self.batch = base_layer, name, batch

    def __getattr__(self, name: str) -> Any:
        """Models read a layer's weight or dtype: those of the base's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """x [B, …], the rows of the runs one after the other; what the layer returns [B, …]."""
        output: Tensor = self.base_layer(x, *arguments, **named)
        counts = self.batch.rows(len(x), self.name)
        layers = [layers.get(self.name) for layers, _ in self.batch.runs]
        if (stack := stackable(layers, counts)) and not (arguments or named):
            return stacked(stack, x, output)
        parts = []
        # Not by slices: the gradient of each would be as large as the whole.
        for layer, own, base in zip(layers, x.split(counts), output.split(counts), strict=True):
            if layer is None:
                parts.append(base)
                continue
            with answering(cast("Any", layer).base_layer, base):
                parts.append(layer(own, *arguments, **named))
        return torch.cat(parts)


@contextmanager
def answering(base_layer: nn.Module, output: Tensor) -> Iterator[None]:
    """Inside the block the layer returns an output that was computed already."""
    before = base_layer.__dict__.get("forward")
    base_layer.__dict__["forward"] = lambda *_, **__: output
    try:
        yield
    finally:
        base_layer.__dict__.pop("forward")
        if before is not None:
            base_layer.__dict__["forward"] = before


def stackable(layers: Sequence[nn.Module | None], counts: Sequence[int]) -> list[SummedLinear]:
    """The layers, if they are several LoRAs of one rank, without dropout, for equally many rows each; else none."""
    plain = [
        layer
        for layer in layers
        if type(layer) is SummedLinear
        and isinstance(layer.lora_dropout[ADAPTER], nn.Identity)
        and not layer.disable_adapters
    ]
    ranks = {layer.lora_A[ADAPTER].weight.shape[0] for layer in plain}
    return plain if len(plain) == len(layers) > 1 and len(set(counts)) == len(ranks) == 1 else []


def stacked(layers: Sequence[SummedLinear], x: Tensor, output: Tensor) -> Tensor:
    """output [B, …, out] with the LoRA of each of the K layers added in its B / K rows.

    With x as [K, M, in]: small = x down^T [K, M, rank], and output + scale * small up^T, as `SummedLinear` has it for one.
    """
    count = len(layers)
    down = torch.stack([layer.lora_A[ADAPTER].weight for layer in layers])
    up = torch.stack([layer.lora_B[ADAPTER].weight for layer in layers]).to(output.dtype)
    scales = [layer.scaling[ADAPTER] for layer in layers]
    small = torch.bmm(x.to(down.dtype).reshape(count, -1, x.shape[-1]), down.mT).to(output.dtype)
    if len(set(scales)) > 1:
        small = small * torch.tensor(scales, dtype=small.dtype, device=small.device)[:, None, None]
    base = output.reshape(count, -1, output.shape[-1])
    alpha = scales[0] if len(set(scales)) == 1 else 1.0
    return torch.baddbmm(base, small, up.mT, alpha=alpha).view(output.shape)


def join_layers(bare: nn.Module, names: Sequence[str], batch: JoinedBatch) -> None:
    """Let the adapters of `batch` change the layers of these names, in place. Those that do so already stay."""
    for name in names:
        layer = bare.get_submodule(name)
        if not isinstance(layer, JoinedLayer):
            bare.set_submodule(name, JoinedLayer(layer, name, batch))
