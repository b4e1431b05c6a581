"""Compare the gradients of compiled blocks with those of eager ones, on a step's samples before the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lora_trainer.adapters.masters import Adapter
from lora_trainer.models.compiled import Compiled
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.step import StepContext, abort_step, backward

MARGIN = 4.0  # compiled blocks round elsewhere, and sum in another order
TF32 = 2.0**-10  # its last digit


@dataclass(frozen=True)
class Agreement:
    """Relative to the length of eager's gradient: the difference of compiled blocks, and that of rounding alone."""

    off: float
    rounding: float

    @property
    def is_close(self) -> bool:
        return self.off <= MARGIN * self.rounding

    @property
    def message(self) -> str:
        return f"gradients differ by {self.off:.1e} from eager blocks'; rounding alone gives {self.rounding:.1e}"


def agreement(
    context: StepContext, compiled: Compiled, micros: Sequence[MicroBatch], samples: int, *, tf32: bool
) -> Agreement | None:
    """Compiled and eager gradients of the same samples and noise; None where eager's are zero or not finite.

    The effect of rounding is measured by a second eager pass, with inputs one rounding away, so that all that follows
    rounds otherwise; it is at least one rounding of the step's precision. Up projections at zero, as in a new adapter,
    get small values meanwhile, since the gradients of the down projections would be zero. Nothing stays changed.
    """
    unit = TF32 if tf32 and context.dtype == torch.float32 else torch.finfo(context.dtype).eps
    ready = [micro.to(context.device, context.dtype) for micro in micros]
    with context.adapter.swapped_in(fill_zeros(context.adapter)):
        found = gradients(context, ready, samples)
        with compiled.off():
            wanted = gradients(context, ready, samples)
            again = gradients(context, [nudge(micro, unit) for micro in ready], samples)
    length = float(wanted.norm())
    if not math.isfinite(length) or not length:
        return None
    return Agreement(float((found - wanted).norm()) / length, max(float((again - wanted).norm()) / length, unit))


def gradients(context: StepContext, micros: Sequence[MicroBatch], samples: int) -> Tensor:
    """All of a step's gradients, one after the other, on the CPU in float64; the masters keep none."""
    torch.manual_seed(0)  # for dropout, which a step seeds by its position
    for micro in micros:
        backward(replace(context, scaler=None), micro, samples)
    parts = [master.grad.flatten().cpu() for master in context.masters if master.grad is not None]
    abort_step(context)
    return torch.cat(parts).double() if parts else torch.zeros(1, dtype=torch.float64)


def fill_zeros(adapter: Adapter) -> dict[str, Tensor]:
    """The adapter's values, with small random ones in place of tensors that are all zero."""
    draw = torch.Generator().manual_seed(0)
    return {
        name: value.detach().clone()
        if value.any()
        else (0.02 * torch.randn(value.shape, generator=draw)).to(value.device, value.dtype)
        for name, value in adapter.copies.items()
    }


def nudge(micro: MicroBatch, unit: float) -> MicroBatch:
    """The same with latents and noise larger or smaller by the factor 1 ± `unit`."""
    draw = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, micro.latents.shape, generator=draw).mul_(2).sub_(1).to(micro.latents.device)
    factor = 1 + unit * signs
    return replace(micro, latents=micro.latents * factor, added=micro.added * factor)
