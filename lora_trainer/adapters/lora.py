"""LoRA: injected with peft, its parameters by name, its updates as low-rank pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from lora_trainer.adapters.base import AdapterKind, AdapterOptions
from lora_trainer.export.lora_file import lora_forms
from lora_trainer.export.weights import LayerUpdate, LoraPair, weights_from_peft
from lora_trainer.models.quantization.store import COMPUTED_IN, is_narrow

ADAPTER = "default"


def inject_lora(
    denoiser: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int
) -> dict[str, nn.Parameter]:
    """Put a LoRA on the modules, in place; return its trainable parameters by name.

    The update is scaled by alpha / rank, or by alpha / sqrt(rank) (arXiv:2312.03732). Down projections are initialized
    as in peft (Kaiming uniform) from `seed`, up projections with 0.
    """
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(modules),
        use_rslora=options.rank_stabilized,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, denoiser, adapter_name=ADAPTER)
    # Models that inspect a layer see the adapter's, around the quantized one.
    for module in denoiser.modules():
        if is_narrow(base := getattr(module, "base_layer", None)):
            setattr(module, COMPUTED_IN, getattr(base, COMPUTED_IN))
    return {name: parameter for name, parameter in denoiser.named_parameters() if parameter.requires_grad}


class SummedLinear(Linear):  # type: ignore[misc]  # peft is untyped
    """A linear layer with exactly one adapter; peft handles all other cases.

    peft multiplies the update by its scale and adds it in two operations, each of which reads and writes [M, out].
    Here one matmul adds onto the base layer's output: base [M, out] + scale * small [M, rank] up [out, rank]^T
    (arXiv:2106.09685, section 4.1).
    """

    def forward(self, x: Tensor, *arguments: object, **named: object) -> Tensor:
        is_plain = not (arguments or named or self.merged or self.disable_adapters or self.lora_variant)
        if not is_plain or self.active_adapters != [ADAPTER] or not isinstance(self.lora_dropout[ADAPTER], nn.Identity):
            return super().forward(x, *arguments, **named)  # type: ignore[no-any-return]
        down, up, scale = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight, self.scaling[ADAPTER]
        base = self.base_layer(x)
        small = nn.functional.linear(x.to(down.dtype), down).flatten(0, -2)
        summed = torch.addmm(base.flatten(0, -2), small.to(base.dtype), up.to(base.dtype).t(), alpha=scale)
        return summed.view(base.shape)


def sum_updates(denoiser: nn.Module) -> None:
    """Make the adapted linear layers add their update in one matmul. A layer changes its class, not its identity."""
    for module in denoiser.modules():
        if type(module) is Linear:
            module.__class__ = SummedLinear


def updates(trained: Mapping[str, Tensor], component: str, options: AdapterOptions) -> Mapping[str, LayerUpdate]:
    """Low-rank updates, with the alpha whose alpha / rank is the scale in training."""
    alpha = options.alpha * math.sqrt(options.rank) if options.rank_stabilized else options.alpha
    return weights_from_peft(trained, component, alpha).modules


@torch.no_grad()
def start_from(parameters: Mapping[str, nn.Parameter], pairs: Mapping[str, LoraPair], options: AdapterOptions) -> None:
    """Put low-rank updates into a LoRA of the same rank or a higher one, whose other rows keep their initial values.

    The ratio of the two scales goes into the up projections, so the change of each layer is the same.
    """
    scale = options.alpha / (math.sqrt(options.rank) if options.rank_stabilized else options.rank)
    for module, pair in pairs.items():
        down, up = (parameters[f"{module}.lora_{half}.{ADAPTER}.weight"] for half in "AB")
        for each in (down, up):
            each.data = each.data.float()  # masters are made of them: in bf16 the file's values would be rounded
        down[: pair.rank].copy_(pair.down)
        up[:, : pair.rank].copy_(pair.up.float() * (pair.scale / scale))


LORA = AdapterKind(inject=inject_lora, updates=updates, forms=lora_forms, speed_up=sum_updates, start_from=start_from)
