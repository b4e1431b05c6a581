"""Which frozen layers are quantized, and how.

| `memory.weight_dtype` | linear layers | convolutions |
|---|---|---|
| `fp8`, `int8` | 8 bits a number and a scale for each output channel | the same |
| `nf4` | 4 bits a number and a scale of 16 bits for each 64 numbers | as in `int8` |

Layers with less than 16 channels on a side read or write latents: they are small and sensitive, and stay as they are. So do
norms, biases, embeddings, and layers of classes of a library's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lora_trainer.models.quantization import eight_bits, four_bits
from lora_trainer.models.quantization.eight_bits import SCALE, narrow_to_8_bits
from lora_trainer.models.quantization.four_bits import Linear4, narrow_to_4_bits
from lora_trainer.models.quantization.int8_products import LEAST_ROWS, LinearProduct, multiply_in_int8, why_not

if TYPE_CHECKING:
    from lora_trainer.config.schema import Precision

LEAST_CHANNELS = 16
COMPUTED_IN = "compute_dtype"  # peft's name: the dtype of an adapter on a quantized layer

Narrow = Callable[[nn.Module], None]
Layer = nn.Linear | nn.Conv2d


def make_quantizer(stored: Precision, *, products: bool = False, by: torch.device | None = None) -> Narrow | None:
    """A function that quantizes one module's frozen weight in place; None where weights are not quantized.

    It skips modules that it need not or must not quantize, so it may be called on any module, more than once.
    `products`: linear layers in int8 multiply in int8, too. `by`: a GPU that quantizes layers which stay in host
    memory; a CPU takes minutes for the nf4 of twelve billion weights.
    """
    forms = PRODUCTS if products and stored == "int8" else FORMS.get(stored)
    return partial(_narrow, forms, by) if forms else None


def store_layers(denoiser: nn.Module, narrow: Narrow) -> None:
    """Quantize every layer of a denoiser that is in memory already."""
    for module in list(denoiser.modules()):
        narrow(module)


def int8_products(wanted: bool, stored: Precision, device: torch.device) -> tuple[bool, str | None]:
    """Whether frozen linear layers multiply in int8 on a device, and the log line where that is set but not possible."""
    if not wanted:
        return False, None
    if stored != "int8":
        return False, f"int8 matmul: none, since the base model is stored in {stored}"
    reason = why_not(device)
    return reason is None, None if reason is None else f"int8 matmul: none, {device.type} cannot: {reason}"


def counted_products(denoiser: nn.Module) -> str:
    """How many of the layers with int8 weights multiply in int8, as a log line."""
    linears = [module for module in denoiser.modules() if isinstance(module, nn.Linear) and is_narrow(module)]
    count = sum(isinstance(module, LinearProduct) for module in linears)
    return f"int8 matmul: {count} of {len(linears)} linear layers, where a sample has {LEAST_ROWS} rows or more"


def is_narrow(layer: nn.Module | None) -> bool:
    """Whether a layer's weight is quantized."""
    return hasattr(layer, COMPUTED_IN)


@torch.no_grad()
def wide_weight(layer: Layer, dtype: torch.dtype = torch.float32) -> Tensor:
    """A layer's weight on its device, dequantized where it is quantized: [out, in] or [out, in, k, k]."""
    if isinstance(layer, Linear4):
        shape = (layer.out_features, layer.in_features)
        return four_bits.widened(layer.weight, layer.get_buffer(SCALE), shape, dtype)
    if is_narrow(layer):
        return eight_bits.widened(layer.weight, layer.get_buffer(SCALE), dtype)
    return layer.weight.detach().to(dtype)


def _store_and_multiply(layer: Layer) -> None:
    narrow_to_8_bits(layer, torch.int8)
    multiply_in_int8(layer)


IN_INT8 = partial(narrow_to_8_bits, storage=torch.int8)
Forms = Mapping[type, Callable[[nn.Linear | nn.Conv2d], None]]
FORMS: dict[Precision, Forms] = {
    "fp8": dict.fromkeys((nn.Linear, nn.Conv2d), partial(narrow_to_8_bits, storage=torch.float8_e4m3fn)),
    "int8": dict.fromkeys((nn.Linear, nn.Conv2d), IN_INT8),
    "nf4": {nn.Linear: narrow_to_4_bits, nn.Conv2d: IN_INT8},
}
PRODUCTS: Forms = {**FORMS["int8"], nn.Linear: _store_and_multiply}


def _narrow(forms: Forms, by: torch.device | None, module: nn.Module) -> None:
    form = forms.get(type(module))  # exactly: a library's subclass may use its weight differently
    if form is None or not isinstance(module, nn.Linear | nn.Conv2d) or not _suits(module):
        return
    computed_in, home = module.weight.dtype, module.weight.device
    if by is None or module.weight.is_meta:
        form(module)
    else:
        module.to(by)
        form(module)
        module.to(home)
    setattr(module, COMPUTED_IN, computed_in)


def _suits(layer: Layer) -> bool:
    if layer.weight.requires_grad or min(layer.weight.shape[:2]) < LEAST_CHANNELS:
        return False
    return isinstance(layer, nn.Linear) or (layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
