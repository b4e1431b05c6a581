"""What the trainer asks of a kind of adapter. A kind is one file and one entry in `ADAPTERS`; LoRA is the first.

No torch is loaded until a kind is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lora_trainer.config.schema import Config
    from lora_trainer.export.lora_file import FileForms
    from lora_trainer.export.weights import LayerUpdate


@dataclass(frozen=True)
class AdapterOptions:
    """How an adapter is made on one model."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilized: bool = False


@dataclass(frozen=True)
class AdapterKind:
    """One kind of adapter.

    `inject` puts it on the named linear and convolution modules of a denoiser or text encoder, in place, starting from a
    seed, and returns the trainable parameters by name. `updates` gives from trained values of these names the change of
    each layer (`LayerUpdate`), by the module's name behind its component's (`unet`, `text_encoder`). `forms` lays these
    out as files. The memory plan traces what `inject` makes.
    """

    inject: Callable[[nn.Module, Sequence[str], AdapterOptions, int], dict[str, nn.Parameter]]
    updates: Callable[[Mapping[str, Tensor], str, AdapterOptions], Mapping[str, LayerUpdate]]
    forms: FileForms
    speed_up: Callable[[nn.Module], None] = lambda model: None  # after `inject`, of a model that is trained


@dataclass(frozen=True)
class AdapterSpec:
    """What is known of a kind before torch is loaded, and how it is loaded."""

    load: Callable[[], AdapterKind]
    has_memory_profiles: bool = False  # published models have stored profiles with it
    is_checked: bool = False  # the LoRA gate and diffusers read its files


def _lora() -> AdapterKind:
    from lora_trainer.adapters.lora import LORA

    return LORA


ADAPTERS: dict[str, AdapterSpec] = {"lora": AdapterSpec(_lora, has_memory_profiles=True, is_checked=True)}


def adapter_kind(config: Config) -> AdapterKind:
    return ADAPTERS[config.lora.type].load()


def denoiser_options(config: Config) -> AdapterOptions:
    """The options of the denoiser's adapter."""
    lora = config.lora
    return AdapterOptions(lora.rank, lora.alpha or float(lora.rank), lora.dropout, lora.use_rslora)


def text_options(config: Config) -> AdapterOptions:
    """The options of the text encoders' adapters."""
    rank = config.text_encoder.lora_rank or config.lora.rank
    alpha = config.text_encoder.lora_alpha or float(rank)
    return AdapterOptions(rank, alpha, config.lora.dropout, config.lora.use_rslora)
