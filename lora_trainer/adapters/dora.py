"""DoRA: a LoRA whose weights are scaled to trained magnitudes (arXiv:2402.09353), on layers that peft injected.

peft takes the norm of the weights as they are stored, which are codes on this program's quantized layers. Here it is that of the
dequantized weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from peft.tuners.lora.layer import Conv2d, Linear
from torch import Tensor, nn

from lora_trainer.adapters import lora
from lora_trainer.adapters.base import AdapterKind, AdapterOptions
from lora_trainer.adapters.injection import ADAPTER, by_module, put, trained, unlike
from lora_trainer.lora_format.kinds.dora import PEFT_SCALE as MAGNITUDE
from lora_trainer.lora_format.kinds.dora import DecomposedUpdate
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.layer_updates import TINY, LayerUpdate, to_lora
from lora_trainer.lora_format.weights import module_name
from lora_trainer.lora_format.writing import plain_forms
from lora_trainer.models.quantization.store import wide_weight

if TYPE_CHECKING:
    from lora_trainer.adapters.timestep_rank import TimestepRank
    from lora_trainer.core.errors import Problem


class _Decomposed(nn.Module):
    """W' = m (W + s B A) / |W + s B A| by rows, whose norm has no gradient (equation 11, section 4.3)."""

    base_layer: nn.Linear | nn.Conv2d
    lora_A: nn.ModuleDict  # noqa: N815  peft's names
    lora_B: nn.ModuleDict  # noqa: N815
    lora_dropout: nn.ModuleDict
    lora_magnitude_vector: nn.ParameterDict
    scaling: dict[str, float]
    row_squares: Tensor  # |w|^2 of each row of the base's weight
    disable_adapters: bool
    limit: TimestepRank | None = None  # in training, the rows of A that each sample has (T-LoRA)

    @torch.no_grad()
    def norms(self) -> Tensor:
        """|W + s B A| of each row, `[out]` in fp32, without forming the sum; `[B, out]` where each sample has its own rows of A.

        |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b^T, of a row w of W and b of B. With the first k rows of A alone, both
        sums end at k, so cumulative sums have them for every k.
        """
        down, up = (each[ADAPTER].get_parameter("weight").detach().flatten(1) for each in (self.lora_A, self.lora_B))
        scale, up = self.scaling[ADAPTER], up.float()
        weight = wide_weight(self.base_layer, down.dtype).flatten(1)
        crossed = (weight @ down.T).float()
        gram = down.float() @ down.float().T
        if self.limit is not None and self.limit.noise is not None:
            doubled = gram.tril() + gram.tril(-1)  # of row k, its products with those before it count twice
            sums = (2.0 * scale * up * crossed + scale**2 * up * (up @ doubled.T)).cumsum(1)
            squares = self.row_squares + sums.T[self.limit.rows(self.limit.noise, len(gram)) - 1]
        else:
            squares = self.row_squares + 2.0 * scale * (up * crossed).sum(1) + scale**2 * (up @ gram * up).sum(1)
        return squares.clamp_min(TINY**2).sqrt()

    def forward(self, x: Tensor, *arguments: object, **named: object) -> Tensor:
        output: Tensor = self.base_layer(x, *arguments, **named)
        if self.disable_adapters:
            return output
        down, up = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        dropped = self.lora_dropout[ADAPTER](x.to(down.get_parameter("weight").dtype))
        change = up(down(dropped)) * self.scaling[ADAPTER]
        factor = self.lora_magnitude_vector[ADAPTER].float() / self.norms()
        bias = self.base_layer.bias
        if output.ndim == 4 and isinstance(self.base_layer, nn.Conv2d):
            factor, bias = factor[..., None, None], None if bias is None else bias.view(-1, 1, 1)
        elif factor.ndim == 2:
            factor = factor.view(len(factor), *[1] * (output.ndim - 2), -1)
        bare = output if bias is None else output - bias.to(output)
        moved: Tensor = output + (factor - 1.0).to(output) * bare + factor.to(output) * change.to(output)
        return moved


class DecomposedLinear(_Decomposed, Linear):  # type: ignore[misc]  # peft is untyped
    """A linear layer with a DoRA."""


class DecomposedConv2d(_Decomposed, Conv2d):  # type: ignore[misc]  # peft is untyped
    """A convolution with a DoRA."""


def inject(model: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int) -> dict[str, nn.Parameter]:
    """Put a DoRA on the modules, in place; return its trainable parameters by name. The low-rank part is a LoRA's."""
    lora.inject_lora(model, modules, options, seed)
    for module in cast("Iterator[Any]", model.modules()):
        for kind, own in ((Linear, DecomposedLinear), (Conv2d, DecomposedConv2d)):
            if type(module) is kind:
                module.__class__ = own
                squares = wide_weight(module.base_layer, torch.float32).flatten(1).square().sum(1)
                module.register_buffer("row_squares", squares, persistent=False)
                magnitude = nn.Parameter(squares.sqrt())  # of the base's rows, so that the layer is the base's at first
                module.lora_magnitude_vector = nn.ParameterDict({ADAPTER: magnitude})
    return trained(model)


def updates(values: Mapping[str, Tensor], component: str, options: AdapterOptions) -> Mapping[str, LayerUpdate]:
    """The low-rank part and the magnitude of each module."""
    magnitudes = {
        module_name(component, module): values[names[MAGNITUDE]] for module, names in by_module(values, "lora_").items()
    }
    return {
        module: DecomposedUpdate(pair, magnitudes[module].view(-1, *[1] * (len(pair.weight_shape) - 1)))
        for module, pair in lora.updates(values, component, options).items()
    }


def limit_ranks(denoiser: nn.Module, limit: TimestepRank) -> None:
    """Train fewer rows of the low-rank part at high noise; each sample's norms are those of its own rows."""
    lora.limit_ranks(denoiser, limit)
    for module in denoiser.modules():
        if isinstance(module, _Decomposed):
            module.limit = limit


def start_from(
    parameters: Mapping[str, nn.Parameter], updates: Mapping[str, LayerUpdate], options: AdapterOptions
) -> list[Problem]:
    """Put the low-rank parts and magnitudes of a file into a DoRA of the same rank or a higher one."""
    found = {name: update for name, update in updates.items() if isinstance(update, DecomposedUpdate)}
    others = [
        name for name, update in found.items() if not (update.is_by_output and isinstance(update.change, LoraPair))
    ]
    if problems := [
        *unlike(
            others,
            "have magnitudes of inputs, or of another change than a LoRA's",
            f"Write it as a LoRA, {to_lora(list(found.values()))}, and set lora.type=lora.",
        ),
        *unlike(
            [name for name, update in found.items() if update.of_base],
            "are for ComfyUI alone",
            "Use the file that it was made of.",
        ),
    ]:
        return problems
    problems = lora.start_from(parameters, {name: update.change for name, update in found.items()}, options)
    if not problems:
        for name, update in found.items():
            put(parameters[f"{name}.{MAGNITUDE}.{ADAPTER}"], update.magnitude)
    return problems


KIND = AdapterKind(
    inject=inject,
    updates=updates,
    forms=plain_forms,
    is_up=lora.is_up,
    limit_ranks=limit_ranks,
    start_from=start_from,
)
