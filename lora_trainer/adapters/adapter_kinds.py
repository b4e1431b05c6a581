"""The kinds of adapters, by name, and the one that a run trains. A kind is one file and one entry in `ADAPTERS`.

Torch is loaded only with a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from lora_trainer.adapters.base import PLUS, AdapterKind, AdapterOptions, AdapterSpec
from lora_trainer.core.randomness import position_key

if TYPE_CHECKING:
    from torch import nn

    from lora_trainer.config.schema import Config


def _kind(name: str) -> AdapterKind:
    """The kind of the file that is named after it, where it has the same name in capitals."""
    kind: AdapterKind = getattr(import_module(f"lora_trainer.adapters.{name}"), name.upper())
    return kind


OF_A_KRONECKER_PRODUCT = {"lokr_factor": "only a Kronecker product has factors"}
NO_PROJECTIONS = dict.fromkeys((*PLUS, "init_lora_weights"), "it is about the up and down projections of a LoRA")
ADAPTERS: dict[str, AdapterSpec] = {
    "lora": AdapterSpec(
        partial(_kind, "lora"), "LoRA", has_memory_profiles=True, is_checked=True, ignores=OF_A_KRONECKER_PRODUCT
    ),
    "dora": AdapterSpec(
        partial(_kind, "dora"),
        "DoRA",
        "exact in LyCORIS; ComfyUI 0.3.64 and newer compute a DoRA differently (lora-trainer convert --to comfyui)",
        diffusers_entry="",
        is_checked=True,
        ignores={
            "init_lora_weights": "its magnitudes start at the norms of the base model's own weights",
            **OF_A_KRONECKER_PRODUCT,
        },
    ),
    "lokr": AdapterSpec(
        partial(_kind, "lokr"),
        "LoKr",
        "exact in LyCORIS and ComfyUI",
        learning_rate="its best learning rate was 10 times a LoRA's in our measurements (docs/benchmarks.md)",
        diffusers_entry="diffusers: LoKr",
        is_checked=True,
        ignores={**NO_PROJECTIONS, "timestep_min_rank": "a whole w2 has no rows that could be left out"},
    ),
    "loha": AdapterSpec(
        partial(_kind, "loha"),
        "LoHa",
        "exact in LyCORIS and ComfyUI",
        learning_rate="its best learning rate was 10 times a LoRA's in our measurements (docs/benchmarks.md)",
        is_checked=True,
        ignores={
            **NO_PROJECTIONS,
            "timestep_min_rank": "each sample would need a matrix of its own as large as the weight",
            **OF_A_KRONECKER_PRODUCT,
        },
    ),
    "oft": AdapterSpec(
        partial(_kind, "oft"),
        "OFT",
        "exact in LyCORIS, and in ComfyUI at strength 1",
        is_checked=True,
        ignores={
            **NO_PROJECTIONS,
            **dict.fromkeys(("alpha", "alpha_pattern", "use_rslora"), "a rotation has no scale"),
            **dict.fromkeys(("dropout", "dropout_pattern"), "it rotates outputs, and has no input of its own"),
            "timestep_min_rank": "its rank is the size of a block",
            **OF_A_KRONECKER_PRODUCT,
        },
    ),
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
