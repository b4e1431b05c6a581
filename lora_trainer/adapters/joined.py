"""One pass of a frozen base for several adapters: each sample of the joined batch has its own run's adapter.

The base's layers run once on all samples. What a run's adapter adds is computed from its own rows alone, by its own layers,
so kinds, ranks, scales and targets may differ; on a GPU, LoRAs of one rank with equally many samples are two batched
products (arXiv:2310.18547, section 4, has the same grouping for inference). No operation mixes samples, so what is not finite in one
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
        if (loras := plain_loras(layers)) and not (arguments or named):
            return with_loras(loras, counts, x, output)
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


def plain_loras(layers: Sequence[nn.Module | None]) -> list[SummedLinear]:
    """The layers, if they are several LoRAs of linear layers without dropout; else none."""
    plain = [
        layer
        for layer in layers
        if type(layer) is SummedLinear
        and isinstance(layer.lora_dropout[ADAPTER], nn.Identity)
        and not layer.disable_adapters
    ]
    return plain if len(plain) == len(layers) > 1 else []


def with_loras(layers: Sequence[SummedLinear], counts: Sequence[int], x: Tensor, output: Tensor) -> Tensor:
    """output [B, …, out] with the LoRA of each layer added in its rows, of which `counts` says how many: as `SummedLinear`.

    LoRAs of one rank with equally many rows are two batched products on a GPU, which spares launches. A CPU does not gain
    by them: stacking K LoRAs copies all of their weights and gradients.
    """
    downs, ups = [each.lora_A[ADAPTER].weight for each in layers], [each.lora_B[ADAPTER].weight for each in layers]
    scales = [each.scaling[ADAPTER] for each in layers]
    if not x.is_cuda or len({len(down) for down in downs}) > 1 or len(set(counts)) > 1:
        rows = [count * (output[0].numel() // output.shape[-1]) for count in counts]
        flat = x.reshape(-1, x.shape[-1]), output.reshape(-1, output.shape[-1])
        summed: Tensor = LorasOfRows.apply(*flat, rows, scales, *downs, *ups)  # type: ignore[no-untyped-call]
        return summed.view(output.shape)
    # With x as [K, M, in]: small = x down^T [K, M, rank], and output + scale * small up^T.
    count, down, up = len(layers), torch.stack(downs), torch.stack(ups).to(output.dtype)
    small = torch.bmm(x.to(down.dtype).reshape(count, -1, x.shape[-1]), down.mT).to(output.dtype)
    if len(set(scales)) > 1:
        small = small * torch.tensor(scales, dtype=small.dtype, device=small.device)[:, None, None]
    alpha = scales[0] if len(set(scales)) == 1 else 1.0
    return torch.baddbmm(output.reshape(count, -1, output.shape[-1]), small, up.mT, alpha=alpha).view(output.shape)


class LorasOfRows(torch.autograd.Function):
    """output + scale * (x down^T) up^T in the rows of each of K LoRAs, without a copy of rows, weights or gradients.

    Autograd's own would have a copy of all rows wherever they are split and joined again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor, rows: list[int], scales: list[float], *weights: Tensor) -> Tensor:
        """x [M, in], output [M, out]; `weights` are K down projections [rank, in], then K up projections [out, rank]."""
        downs, ups = weights[: len(rows)], weights[len(rows) :]
        summed, smalls = torch.empty_like(output), list[Tensor]()
        parts = zip(x.split(rows), output.split(rows), summed.split(rows), scales, downs, ups, strict=True)
        for own, base, into, scale, down, up in parts:
            smalls.append(torch.mm(own.to(down.dtype), down.t()).to(base.dtype))
            torch.addmm(base, smalls[-1], up.to(base.dtype).t(), alpha=scale, out=into)
        ctx.rows, ctx.scales = rows, scales
        ctx.save_for_backward(x, *smalls, *weights)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Of x, output and the weights, given that of the result [M, out]."""
        x, *saved = ctx.saved_tensors
        rows, count = ctx.rows, len(ctx.rows)
        smalls, downs, ups = saved[:count], saved[count : 2 * count], saved[2 * count :]
        of_x = torch.empty_like(x, dtype=downs[0].dtype)
        of_downs, of_ups = list[Tensor](), list[Tensor]()
        parts = zip(x.split(rows), gradient.split(rows), of_x.split(rows), ctx.scales, smalls, downs, ups, strict=True)
        for own, part, into, scale, small, down, up in parts:  # beta=0: the first of addmm counts for nothing
            of_small = torch.addmm(small, part, up.to(part.dtype), beta=0, alpha=scale).to(down.dtype)
            of_ups.append(torch.addmm(up.to(part.dtype), part.t(), small, beta=0, alpha=scale).to(up.dtype))
            of_downs.append(torch.mm(of_small.t(), own.to(down.dtype)))
            if ctx.needs_input_grad[0]:
                torch.mm(of_small, down, out=into)
        return of_x.to(x.dtype) if ctx.needs_input_grad[0] else None, gradient, None, None, *of_downs, *of_ups


def join_layers(bare: nn.Module, names: Sequence[str], batch: JoinedBatch) -> None:
    """Let the adapters of `batch` change the layers of these names, in place. Those that do so already stay."""
    for name in names:
        layer = bare.get_submodule(name)
        if not isinstance(layer, JoinedLayer):
            bare.set_submodule(name, JoinedLayer(layer, name, batch))
