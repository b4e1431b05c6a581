"""FSDP of the frozen base model: each process holds a part of every weight, and all of a block's only while it computes.

By torch's FSDP2 (`torch.distributed.fsdp.fully_shard`; arXiv:2304.11277). Frozen weights have no gradients, so weights are
gathered and nothing is scattered. The adapter's parameters are left out: they are whole in every process, and their
gradients are summed once a step, so optimizer, EMA, checkpoints and exports are as without FSDP.

Every process must take the same passes through the model: each gathers its blocks with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_trainer.models.memory.block_swap import swappable_blocks

if TYPE_CHECKING:
    from lora_trainer.config.schema import FsdpStrategy

MIB = 2**20


class GatherWeights:
    """What FSDP2 calls to gather a block, as its interface `AllGather` names it; `gather` fills [world * n] from [n]."""

    def __init__(self, gather: Callable[[Tensor, Tensor], None]) -> None:
        self.gather = gather

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor for the gathered weights."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Gather; on a GPU only queued, in the current stream."""
        self.gather(output_tensor, input_tensor)


def shard_base(
    denoiser: nn.Module,
    strategy: FsdpStrategy,
    device: torch.device,
    world: int,
    gather: Callable[[Tensor, Tensor], None],
) -> str:
    """Shard a denoiser's frozen weights over `world` processes, block by block; returns the log line.

    Call it when the adapter is injected, blocks are compiled, and weights are in system memory: one block at a time moves
    to `device`, where this process keeps its part. `full_shard` frees a block's other parts after its forward pass and
    gathers them again for its backward pass; `shard_grad_op` keeps them until then.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    trained = {parameter for parameter in denoiser.parameters() if parameter.requires_grad}
    frozen = [parameter for parameter in denoiser.parameters() if not parameter.requires_grad]
    whole, blocks = sum(map(_bytes, frozen)), swappable_blocks(denoiser)
    mesh = init_device_mesh(device.type, (world,))
    for module in (*blocks, denoiser):  # the denoiser last: it takes what is outside of the blocks
        fully_shard(
            module, mesh=mesh, reshard_after_forward=strategy == "full_shard", ignored_params=trained
        ).set_custom_all_gather(GatherWeights(gather))  # type: ignore[arg-type]  # it is not exported
    here = f"{held_bytes(denoiser) / MIB:,.1f} of {whole / MIB:,.1f} MiB"
    return f"FSDP ({strategy}): {len(blocks)} blocks over {world} processes, {here} of frozen weights in this one"


def held_bytes(denoiser: nn.Module) -> int:
    """Bytes of the frozen weights that this process holds now: its parts, and whole weights where a block is gathered."""
    return sum(_bytes(local_part(each)) for each in denoiser.parameters() if not each.requires_grad)


def local_part(weight: Tensor) -> Tensor:
    """This process's part of a sharded weight, without asking the others; the weight itself where it is whole."""
    part: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return part


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
