"""The kinds of adapters, by name, and the one that a run trains.

A kind is two files of one name: here the one that trains it, loaded with torch where it is used, and in `lora_format/kinds/` its
change in files, with what is known of it without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from lora_trainer.adapters.base import AdapterKind, AdapterOptions, AdapterSpec
from lora_trainer.core.randomness import position_key
from lora_trainer.lora_format.kinds import KINDS

if TYPE_CHECKING:
    from torch import nn

    from lora_trainer.config.schema import Config


def _load(name: str) -> AdapterKind:
    kind: AdapterKind = import_module(f"lora_trainer.adapters.{name}").KIND
    return kind


ADAPTERS: dict[str, AdapterSpec] = {
    name: AdapterSpec(partial(_load, name), **vars(kind.facts))
    for name, kind in KINDS.items()
    if kind.facts is not None
}


def adapter_kind(config: Config) -> AdapterKind:
    return ADAPTERS[config.lora.type].load()


def add_adapter(
    model: nn.Module, modules: Sequence[str], config: Config, options: AdapterOptions, *component: str
) -> dict[str, nn.Parameter]:
    """Put the adapter of a run on the denoiser, or on the text encoder `component`, as it is trained."""
    kind = adapter_kind(config)
    parameters = kind.inject(model, modules, options, position_key(config.train.seed, "lora_init", *component) % 2**32)
    kind.speed_up(model)  # not in the memory plan's trace, whose peak may be a few per cent higher
    return parameters


def denoiser_options(config: Config) -> AdapterOptions:
    """The options of the denoiser's adapter."""
    return _options(config, config.lora.rank, config.lora.alpha)


def text_options(config: Config, component: str = "") -> AdapterOptions:
    """The options of the adapters of text encoders, or of the one named `component`, which patterns name first."""
    rank = config.text_encoder.lora_rank or config.lora.rank
    return _options(config, rank, config.text_encoder.lora_alpha, f"{component}." if component else "")


def _options(config: Config, rank: int, alpha: float | None, prefix: str = "") -> AdapterOptions:
    lora = config.lora
    return AdapterOptions(
        rank,
        alpha or float(rank),
        lora.dropout,
        lora.use_rslora,
        initialization=lora.init_lora_weights,
        ranks=lora.rank_pattern,
        alphas=lora.alpha_pattern,
        dropouts=lora.dropout_pattern,
        alpha_is_rank=alpha is None,
        factor=lora.lokr_factor,
        prefix=prefix,
    )
