"""The interface of an adapter kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

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
