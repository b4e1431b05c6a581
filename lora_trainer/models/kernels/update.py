"""An adapted linear layer: the base's output and the adapter's update in one sum.

peft multiplies the update by its scale and adds it in operations of their own, each of which reads and writes [M, out].
Here one product adds onto the base's output: `torch.addmm`, or a Triton kernel where that is wanted and runs.
"""

from __future__ import annotations

from functools import cache

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from lora_trainer.core.errors import first_line

ADAPTER = "default"
CHECKED = ((48, 33, 8), torch.float16)  # shape [M, out, rank] that the kernel is tried at


class SummedLinear(Linear):  # type: ignore[misc]  # peft is untyped
    """A linear layer with one adapter and nothing else on it; whatever else is asked of it, peft does."""

    own_kernel = False

    def forward(self, x: Tensor, *arguments: object, **named: object) -> Tensor:
        plain = not (arguments or named or self.merged or self.disable_adapters or self.lora_variant)
        if not plain or self.active_adapters != [ADAPTER] or not isinstance(self.lora_dropout[ADAPTER], nn.Identity):
            return super().forward(x, *arguments, **named)  # type: ignore[no-any-return]
        down, up, scale = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight, self.scaling[ADAPTER]
        base = self.base_layer(x)
        small = nn.functional.linear(x.to(down.dtype), down).flatten(0, -2)
        if self.own_kernel and base.is_cuda:
            from lora_trainer.models.kernels.triton_update import add_update as add
        else:
            add = add_update
        return add(base.flatten(0, -2), small.to(base.dtype), up.to(base.dtype), scale).view(base.shape)


def add_update(base: Tensor, small: Tensor, up: Tensor, scale: float) -> Tensor:
    """base [M, out] + scale * small [M, rank] up [out, rank]^T (arXiv:2106.09685, section 4.1): the reference."""
    return torch.addmm(base, small, up.t(), alpha=scale)


def sum_updates(denoiser: nn.Module) -> None:
    """Let the adapted linear layers add their update in one sum. A layer changes its class and stays the same object."""
    for module in denoiser.modules():
        if type(module) is Linear:
            module.__class__ = SummedLinear


def use_own_kernels(denoiser: nn.Module, device: torch.device) -> str:
    """Let the adapted layers use the Triton kernel where it runs; a sentence that says so, or why not."""
    if (reason := why_not(device)) is not None:
        return f"own kernels: not used, {reason}"
    layers = [module for module in denoiser.modules() if isinstance(module, SummedLinear)]
    for layer in layers:
        layer.own_kernel = True
    return f"own kernels: the update of {len(layers)} adapted layers is added by one"


@cache
def why_not(device: torch.device) -> str | None:
    """What keeps the kernel from running here; None where it gives what its reference gives."""
    if device.type != "cuda":
        return "they are for cards"
    try:
        from lora_trainer.models.kernels.triton_update import add_update as own

        (rows, out, rank), dtype = CHECKED
        base, small, up = (
            torch.randn(*shape, device=device, dtype=dtype) for shape in ((rows, out), (rows, rank), (out, rank))
        )
        found, wanted = own(base, small, up, 0.5), add_update(base, small, up, 0.5)
        if not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2):
            return "the kernel does not give what torch gives"
    except ImportError:
        return "Triton is not installed (pip install triton)"
    except Exception as error:  # noqa: BLE001  Triton, its compiler or the driver: whatever it is, torch's own operation stands
        return f"the kernel does not run here ({first_line(error)})"
    return None
