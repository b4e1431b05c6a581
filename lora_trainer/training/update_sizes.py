"""How much each adapter module's weights changed since the last measurement, for the trackers' histogram."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import torch
from torch import Tensor

from lora_trainer.optim.layers import layer_of

AT_ONCE = 64  # tensors of earlier weights that are on the device at a time


class UpdateSizes:
    """Compares trained weights with a copy in system memory: neither the GPU's memory nor a step pays for it.

    `measure` takes a copy each way and two reductions for each `AT_ONCE` tensors.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """`weights` are the fp32 masters by parameter name; a parameter belongs to the module before `.lora_` or its last dot."""
        self._before = {
            name: torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda).copy_(value.detach())
            for name, value in weights.items()
        }

    @torch.no_grad()
    def measure(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """By module, the norm of the change since the last call over the norm of the weights now; keeps them for the next."""
        squares: list[Tensor] = []
        names = iter(weights)
        while chunk := list(islice(names, AT_ONCE)):
            now = [weights[name].detach() for name in chunk]
            then = [
                self._before[name].to(value.device, non_blocking=True) for name, value in zip(chunk, now, strict=True)
            ]
            changes = torch._foreach_norm(torch._foreach_sub(now, then))
            squares.append(torch.stack([*changes, *torch._foreach_norm(now)]).double().square().view(2, -1))
        for name, value in weights.items():
            self._before[name].copy_(value.detach(), non_blocking=True)
        changed, whole = torch.cat(squares, dim=1).cpu().tolist()  # waits for the device, and so for the copies
        sums: dict[str, list[float]] = {}
        for name, change, size in zip(weights, changed, whole, strict=True):
            both = sums.setdefault(layer_of(name), [0.0, 0.0])
            both[0] += change
            both[1] += size
        return {module: (change / size) ** 0.5 for module, (change, size) in sums.items() if size > 0}
