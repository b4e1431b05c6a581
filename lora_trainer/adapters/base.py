"""The interface of an adapter kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from lora_trainer.lora_format.layer_updates import KindFacts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lora_trainer.adapters.timestep_rank import TimestepRank
    from lora_trainer.core.errors import Problem
    from lora_trainer.lora_format.layer_updates import LayerUpdate
    from lora_trainer.lora_format.writing import FileForms

T = TypeVar("T")
AS_USUAL = "default"  # of `initialization`


@dataclass(frozen=True)
class AdapterOptions:
    """The options of an adapter on one model.

    The patterns are of modules' names with `prefix` before them, which is that of a text encoder's modules: of those that
    match, the last one counts.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilized: bool = False
    initialization: str = AS_USUAL  # `lora.init_lora_weights`
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    dropouts: Mapping[str, float] = field(default_factory=dict)
    alpha_is_rank: bool = False  # of each layer, where no pattern matches
    factor: int = -1  # `lora.lokr_factor`
    prefix: str = ""

    @property
    def has_usual_size(self) -> bool:
        """Whether all layers have one rank, sides as usual, and hold nothing but what is trained."""
        return not self.ranks and self.factor == -1 and not self.initialization.startswith(("pissa", "olora"))

    @property
    def file_alpha(self) -> float:
        """The alpha whose alpha / rank is the scale in training, rank-stabilized (arXiv:2312.03732) or not."""
        return self.alpha * math.sqrt(self.rank) if self.rank_stabilized else self.alpha

    def of_layer(self, module: str) -> AdapterOptions:
        """Those of one module, without patterns."""
        name = self.prefix + module
        rank = last_match(name, self.ranks, self.rank)
        alpha = last_match(name, self.alphas, float(rank) if self.alpha_is_rank else self.alpha)
        dropout = last_match(name, self.dropouts, self.dropout)
        return replace(self, rank=rank, alpha=alpha, dropout=dropout, ranks={}, alphas={}, dropouts={})


def last_match(name: str, values: Mapping[str, T], otherwise: T) -> T:
    """The value of the last pattern that matches a name."""
    found = [value for pattern, value in values.items() if fnmatchcase(name, pattern)]
    return found[-1] if found else otherwise


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
    # Tensors that `inject` put into a model, which are not trained and which the change of a layer depends on, by name.
    fixed: Callable[[nn.Module], dict[str, Tensor]] = lambda model: {}
    # Whether a parameter is of an up projection (`lora.loraplus_lr_ratio`); None where a kind has none.
    is_up: Callable[[str], bool] | None = None
    # Lets a denoiser's adapter train fewer rows at high noise; None where a kind cannot.
    limit_ranks: Callable[[nn.Module, TimestepRank], None] | None = None
    # Sets the parameters from `inject` to the updates of a file of the same kind, by module name, so that the change is the
    # same, and returns what of them they cannot hold. Shapes suffice for that. None where a kind cannot.
    start_from: (
        Callable[[Mapping[str, nn.Parameter], Mapping[str, LayerUpdate], AdapterOptions], list[Problem]] | None
    ) = None


@dataclass(frozen=True)
class AdapterSpec(KindFacts):
    """What is known of a kind without torch, and how to load it."""

    load: Callable[[], AdapterKind]
