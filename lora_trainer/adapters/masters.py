"""The trained weights: fp32 masters for the optimizer, copies in the forward pass's precision.

Small updates vanish when they are added to bf16 weights, and fp32 adapters on a bf16 base model cost a cast and a saved
input in every layer. So the layers have copies in the base model's precision, and the optimizer has fp32 masters.
Gradients are added to the masters once a micro-batch, weights copied back once a step.

With `optimizer.stochastic_rounding` there are no masters but the bf16 weights themselves (`optim/random_updates.py`), and the
fp32 magnitudes of a DoRA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lora_trainer.lora_format.kinds import BESIDE


@dataclass(frozen=True)
class Adapter:
    """`copies` are in the model; `masters` are fp32. In an fp32 run, and without masters, they are the same objects.

    `fixed` are tensors of the adapter in the model that are not trained, such as a LoRA's initial values: what they hold
    cannot be computed again to the bit on another machine, so checkpoints hold them.
    """

    copies: dict[str, nn.Parameter]
    masters: dict[str, nn.Parameter]
    fixed: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_shared(self) -> bool:
        return all(self.copies[name] is self.masters[name] for name in self.copies)

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(master.numel() for master in self.masters.values())

    def collect_gradients(self) -> None:
        """Add the copies' gradients to the masters' and clear them."""
        if self.is_shared:
            return
        # A few kernels for hundreds of small tensors, and no fp32 copy of gradients that are only added.
        new: tuple[list[Tensor], list[Tensor]] = ([], [])
        known: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, copy in self.copies.items():
            master, gradient = self.masters[name], copy.grad
            if gradient is None:
                continue
            sums, gradients = known if master.grad is not None else new
            if master.grad is None:
                master.grad = torch.empty_like(master)
            sums.append(master.grad)
            gradients.append(gradient)
            copy.grad = None
        if new[0]:
            torch._foreach_copy_(*new)
        if known[0]:
            torch._foreach_add_(*known)

    def copy_to_model(self) -> None:
        """Copy the masters' values into the layers."""
        if not self.is_shared:
            self.put(self.masters)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Copy values of the same names into the layers."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.copies.values()), [values[name] for name in self.copies])

    @contextmanager
    def swapped_in(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside the block the layers have `values`; afterwards layers and masters are as before, bit for bit."""
        if values is self.masters:
            yield
            return
        masters: Mapping[str, Tensor] = self.masters
        if self.is_shared:
            masters = {name: master.detach().clone() for name, master in self.masters.items()}
        self.put(values)
        try:
            yield
        finally:
            self.put(masters)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set the masters, and so the layers, and the fixed tensors to saved values of the same names."""
        with torch.no_grad():
            for name, tensor in (*self.masters.items(), *self.fixed.items()):
                tensor.copy_(values[name])
        self.copy_to_model()


def make_adapter(
    parameters: dict[str, nn.Parameter],
    dtype: torch.dtype,
    *,
    has_masters: bool = True,
    fixed: dict[str, Tensor] | None = None,
) -> Adapter:
    """Masters and copies from freshly injected parameters.

    The parameters stay in the model and are cast to `dtype`, the base model's precision. Without masters the optimizer
    gets them as they are then.
    """
    if dtype == torch.float32:
        return Adapter(parameters, parameters, fixed or {})
    masters = parameters
    if has_masters:
        masters = {name: nn.Parameter(each.detach().to(torch.float32, copy=True)) for name, each in parameters.items()}
    for name, parameter in parameters.items():
        is_wide = any(f".{part}." in name for part in BESIDE)  # as large as the weights: bf16 would hide steps
        parameter.data = parameter.data.to(torch.float32 if is_wide else dtype)
    return Adapter(parameters, masters, fixed or {})
