"""LoKr: the change of a weight is a Kronecker product (arXiv:2309.14859), injected with peft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from peft import LoKrConfig
from peft.tuners.lokr.layer import Conv2d, Linear
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.adapters.base import AdapterKind, AdapterOptions
from lora_trainer.adapters.injection import ChangedLayer, by_module, inject
from lora_trainer.export.lora_file import plain_forms
from lora_trainer.export.updates import KroneckerUpdate
from lora_trainer.export.weights import LayerUpdate, module_name


def inject_lokr(
    model: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int
) -> dict[str, nn.Parameter]:
    """Put a LoKr on the modules, in place; return its trainable parameters by name.

    delta = w1 (x) w2 * alpha / rank. The sides of a weight are divided nearly at their square roots. w1 is 0 at first and w2
    as in peft (Kaiming uniform), whole where `rank` is half of its longer side or more, else of that rank.
    """
    config = LoKrConfig(
        r=options.rank,
        alpha=options.file_alpha,
        target_modules=list(modules),
        use_effective_conv2d=False,  # its core fails in ComfyUI with torch 2.13
    )
    parameters = inject(config, model, seed)
    for module in cast("Iterator[Any]", model.modules()):
        for kind, own in ((Linear, KroneckerLinear), (Conv2d, KroneckerConv2d)):
            if type(module) is kind:
                module.__class__ = own
                module.input_dropout = options.dropout
    return parameters


class KroneckerLinear(ChangedLayer, Linear):  # type: ignore[misc]  # peft is untyped
    """A linear layer with a LoKr whose product is never formed: (w1 (x) w2) x = w1 X w2^T, with x as `[i1, i2]`.

    Besides memory for a matrix as large as the weight it saves most of the operations. The base layer's weight is not read,
    so it may be stored in any form.
    """

    def _get_delta_activations(self, adapter_name: str, input: Tensor) -> Tensor:  # noqa: A002
        one, two = (self._factor(number, adapter_name) for number in (1, 2))
        x = input.to(one[0].dtype)
        columns = one[-1].shape[1]
        x = x.unflatten(-1, (columns, x.shape[-1] // columns))
        for factor in reversed(two):
            x = functional.linear(x, factor)
        x = x.transpose(-1, -2)
        for factor in reversed(one):
            x = functional.linear(x, factor)
        change: Tensor = x.transpose(-1, -2).flatten(-2) * self.scaling[adapter_name]
        return change

    def _factor(self, number: int, adapter: str) -> tuple[Tensor, ...]:
        """w1 or w2, whole or in its two parts."""
        whole = getattr(self, f"lokr_w{number}")
        if adapter in whole:
            return (whole[adapter],)
        return tuple(getattr(self, f"lokr_w{number}_{half}")[adapter] for half in "ab")


class KroneckerConv2d(ChangedLayer, Conv2d):  # type: ignore[misc]  # peft is untyped
    """A convolution with a LoKr."""


def updates(trained: Mapping[str, Tensor], component: str, options: AdapterOptions) -> Mapping[str, LayerUpdate]:
    """The factors of each module. Of two whole ones no program counts alpha, so alpha / rank is multiplied into w1."""
    found, scale = dict[str, LayerUpdate](), options.file_alpha / options.rank
    for module, names in by_module(trained, "lokr_").items():
        update = KroneckerUpdate({end: trained[name] for end, name in names.items()}, options.file_alpha)
        if update.is_whole and scale != 1.0:
            tensors = {**update.tensors, "lokr_w1": update.tensors["lokr_w1"].float() * scale}
            update = KroneckerUpdate(tensors, options.file_alpha)
        found[module_name(component, module)] = update
    return found


LOKR = AdapterKind(inject=inject_lokr, updates=updates, forms=plain_forms)
