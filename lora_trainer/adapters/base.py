"""The interface of an adapter kind. A kind is one file and one entry in `ADAPTERS`; LoRA is the first.

Torch is loaded only with a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_trainer.core.randomness import position_key

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lora_trainer.config.schema import Config
    from lora_trainer.export.lora_file import FileForms
    from lora_trainer.export.weights import LayerUpdate, LoraPair


@dataclass(frozen=True)
class AdapterOptions:
    """The options of an adapter on one model."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilized: bool = False


@dataclass(frozen=True)
class AdapterKind:
    """One kind of adapter.

    `inject` adds it to the named linear and convolution modules of a denoiser or text encoder, in place, initialized
    from a seed, and returns the trainable parameters by name. `updates` turns trained values of these names into the
    change of each layer (`LayerUpdate`), for one component (`unet`, `text_encoder`), by the module's name behind it.
    `forms` lays these out as files. The memory plan traces the injected modules.
    """

    inject: Callable[[nn.Module, Sequence[str], AdapterOptions, int], dict[str, nn.Parameter]]
    updates: Callable[[Mapping[str, Tensor], str, AdapterOptions], Mapping[str, LayerUpdate]]
    forms: FileForms
    speed_up: Callable[[nn.Module], None] = lambda model: None  # called after `inject`, in training alone
    # Sets the parameters from `inject` to a file's low-rank updates by module name, exactly; None where a kind cannot.
    start_from: Callable[[Mapping[str, nn.Parameter], Mapping[str, LoraPair], AdapterOptions], None] | None = None


@dataclass(frozen=True)
class AdapterSpec:
    """What is known of a kind without torch, and how to load it."""

    load: Callable[[], AdapterKind]
    has_memory_profiles: bool = False  # published models have stored profiles with it
    is_checked: bool = False  # the LoRA gate and diffusers read its files


def _lora() -> AdapterKind:
    from lora_trainer.adapters.lora import LORA

    return LORA


ADAPTERS: dict[str, AdapterSpec] = {"lora": AdapterSpec(_lora, has_memory_profiles=True, is_checked=True)}


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
    lora = config.lora
    return AdapterOptions(lora.rank, lora.alpha or float(lora.rank), lora.dropout, lora.use_rslora)


def text_options(config: Config) -> AdapterOptions:
    """The options of the text encoders' adapters."""
    rank = config.text_encoder.lora_rank or config.lora.rank
    alpha = config.text_encoder.lora_alpha or float(rank)
    return AdapterOptions(rank, alpha, config.lora.dropout, config.lora.use_rslora)
