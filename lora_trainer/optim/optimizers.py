"""Optimizers: one `OptimizerSpec` each holds all that the program knows of it. No torch until one is built.

Parameters are in groups: with weight decay and without, at each learning rate. The learning rate is set from outside
before each step; a group with a learning rate of its own has a share of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.kinds import BESIDE
from lora_trainer.optim.layers import last_match
from lora_trainer.optim.state_size import ROUNDING, Shape, factored, full_tensors, two_in_8_bits

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lora_trainer.config.schema import OptimizerSection

Groups = list[dict[str, Any]]
# Learning rates other than `optimizer.learning_rate`, each with the names of its parameters.
Rates = Sequence[tuple[float, Collection[str]]]


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: how it is built, the memory of its state, and what settings and the training loop depend on.

    `build` takes parameter groups and the settings. `state` gives the bytes of each tensor that is kept for a parameter
    of a shape. `eval_weight` gives the value that a parameter is validated, sampled and exported with, where that is
    not the trained one; the parameter stays as it is.
    """

    build: Callable[[Groups, OptimizerSection], Optimizer]
    state: Callable[[Shape], list[int]]
    library: str | None = None  # imported beside torch
    has_8_bit_state: bool = False
    waits_for_gpu: bool = False  # inside its step
    skips_nonfinite: bool = False  # by itself, on the device: it reads `found_inf`, as torch's fused ones do
    finds_learning_rate: bool = False  # `optimizer.learning_rate` is a factor on one that it finds
    share_of_adamws_rate: float = 1.0  # of a preset's learning rate or the default, which are AdamW's
    averages_weights: bool = False  # in place of an LR scheduler, of EMA and of SWA
    has_momentum: bool = False  # `beta1` of its groups, which may change from step to step
    updates_apart: bool = False  # each parameter by its own gradient and state alone, so some at a time can be updated
    eval_weight: Callable[[Optimizer, nn.Parameter], Tensor] | None = None
    reads: Collection[str] = ()  # the settings that `build` passes on beside learning rate and weight decay


BETAS = ("optimizer.beta1", "optimizer.beta2")
# As peft names them: magnitudes (a convolution's have four dimensions) and trained tokens.
UNDECAYED = (*BESIDE, "trainable_tokens", "token_embedding")


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and kernels, not to biases, norms, magnitudes and tokens."""
    return parameter.ndim > 1 and not any(word in name for word in UNDECAYED)


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimizerSection, other_lrs: Rates = ()
) -> Optimizer:
    """The optimizer that `optimizer.name` means. Raises UsageError when its library does not load."""
    return OPTIMIZERS[config.name].build(
        [
            {"params": params, "weight_decay": decay, "lr": share * config.learning_rate}
            for share, decay, params in grouped(parameters, config, other_lrs)
        ],
        config,
    )


def grouped(
    parameters: Mapping[str, nn.Parameter], config: OptimizerSection, other_lrs: Rates
) -> list[tuple[float, float, list[nn.Parameter]]]:
    """(share of the learning rate, weight decay, parameters): the main group, then those of `other_lrs`.

    Each is split where layers have values of their own (`optimizer.layer_learning_rates`, `layer_weight_decay`). Equal
    learning rates do not share a group: a checkpoint stores the groups, and they may change on resuming.
    """
    apart = {name for _, names in other_lrs for name in names}
    owned = [(config.learning_rate, parameters.keys() - apart), *other_lrs]
    rates, decay_rates = config.layer_learning_rates, config.layer_weight_decay
    found: list[tuple[float, float, list[nn.Parameter]]] = []
    for lr, names in owned:
        for is_decayed in (True, False):
            groups: dict[tuple[float, float], list[nn.Parameter]] = {}  # by factor and weight decay
            for name, parameter in parameters.items():
                if name in names and decays(name, parameter) == is_decayed:
                    factor = rates.get(last_match(name, rates), 1.0)
                    decay = decay_rates.get(last_match(name, decay_rates), config.weight_decay)
                    groups.setdefault((factor, decay if is_decayed else 0.0), []).append(parameter)
            share = lr / config.learning_rate
            found += [(share * factor, decay, each) for (factor, decay), each in groups.items()]
    return found


def shares_of(parameters: Mapping[str, nn.Parameter], config: OptimizerSection, other_lrs: Rates) -> tuple[float, ...]:
    """The share of the learning rate that each group of the optimizer has."""
    return tuple(share for share, _, _ in grouped(parameters, config, other_lrs))


def adamw(groups: Groups, config: OptimizerSection) -> Optimizer:
    """torch's AdamW (arXiv:1711.05101), in its fused form: one kernel for all parameters."""
    import torch

    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def adamw8bit(groups: Groups, config: OptimizerSection, *, paged: bool = False) -> Optimizer:
    """bitsandbytes' AdamW with 8-bit state (arXiv:2110.02861); tensors below 4,096 elements keep fp32 state."""
    kind = from_library("bitsandbytes.optim", "AdamW8bit", config.name)
    return kind(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), is_paged=paged)


def paged_adamw8bit(groups: Groups, config: OptimizerSection) -> Optimizer:
    """The same with state that moves to system memory when the GPU is full; on a CPU there is nothing to page."""
    return adamw8bit(groups, config, paged=all(each.is_cuda for group in groups for each in group["params"]))


def adafactor(groups: Groups, config: OptimizerSection) -> Optimizer:
    """Adafactor (arXiv:1804.04235) without momentum: squares of gradients kept as rows and columns.

    The learning rate is used as it is. transformers' form, because torch's always scales it by the size of the weights,
    which is 0 for up projections that start at 0.
    """
    kind = from_library("transformers.optimization", "Adafactor", config.name)
    return kind(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)


def lion(groups: Groups, config: OptimizerSection) -> Optimizer:
    """Lion (arXiv:2302.06675): the sign of a momentum. Needs a third to a tenth of AdamW's learning rate."""
    kind = from_library("pytorch_optimizer", "Lion", config.name)
    return kind(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


def prodigy(groups: Groups, config: OptimizerSection) -> Optimizer:
    """Prodigy (arXiv:2306.06101): finds the learning rate itself; ours is a factor on it, usually 1.0."""
    kind = from_library("pytorch_optimizer", "Prodigy", config.name)
    betas = (config.beta1, config.beta2)
    return kind(groups, lr=config.learning_rate, betas=betas, bias_correction=True, safeguard_warmup=True)


def schedule_free(groups: Groups, config: OptimizerSection) -> Optimizer:
    """Schedule-free AdamW (arXiv:2405.15682): trains at one point, and is used at an average of all (`schedule_free_weight`)."""
    kind = from_library("pytorch_optimizer", "ScheduleFreeAdamW", config.name)
    return kind(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


def from_library(module: str, name: str, wanted: str) -> Callable[..., Optimizer]:
    """A class of a library that only some optimizers need. Raises UsageError when it does not load."""
    library = module.partition(".")[0]
    try:
        kind: Callable[..., Optimizer] = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # an installed library that fails to load raises all kinds
        raise UsageError(
            Problem(
                "library_missing",
                f"optimizer.name={wanted} needs {library}, which does not load ({error}).",
                f"Run: pip install {library}. Or set optimizer.name=adamw.",
            )
        ) from error
    return kind


def schedule_free_weight(optimizer: Optimizer, parameter: nn.Parameter) -> Tensor:
    """The value of a schedule-free optimizer's parameter outside of training; the parameter stays as it is.

    x = (y - (1 - beta1) z) / beta1 (arXiv:2405.15682, eq. 8). The library's own `eval()` and `train()` do
    this in place and back, and rounding would then depend on how often a run is validated.
    """
    state = optimizer.state.get(parameter, {})
    if "z" not in state:
        return parameter.detach()
    (beta1,) = {group["betas"][0] for group in optimizer.param_groups}
    return parameter.detach().lerp(state["z"], 1.0 - 1.0 / beta1)


OPTIMIZERS: dict[str, OptimizerSpec] = {
    # torch's fused AdamW counts its steps in a tensor for each parameter.
    "adamw": OptimizerSpec(
        adamw, full_tensors(2, numbers=1), skips_nonfinite=True, has_momentum=True, updates_apart=True, reads=BETAS
    ),
    # bitsandbytes waits for the GPU after each parameter.
    "adamw8bit": OptimizerSpec(
        adamw8bit,
        two_in_8_bits,
        library="bitsandbytes",
        has_8_bit_state=True,
        waits_for_gpu=True,
        has_momentum=True,
        updates_apart=True,
        reads=BETAS,
    ),
    "paged_adamw8bit": OptimizerSpec(
        paged_adamw8bit,
        two_in_8_bits,
        library="bitsandbytes",
        has_8_bit_state=True,
        waits_for_gpu=True,
        has_momentum=True,
        updates_apart=True,
        reads=BETAS,
    ),
    "adafactor": OptimizerSpec(adafactor, factored, library="transformers", updates_apart=True),
    "lion": OptimizerSpec(
        lion,
        full_tensors(1),
        library="pytorch_optimizer",
        share_of_adamws_rate=1 / 3,  # the highest that is published
        has_momentum=True,
        updates_apart=True,
        reads=BETAS,
    ),
    # Prodigy waits for the distance that it finds, from all weights together.
    "prodigy": OptimizerSpec(
        prodigy,
        full_tensors(4),
        library="pytorch_optimizer",
        waits_for_gpu=True,
        finds_learning_rate=True,
        has_momentum=True,
        reads=BETAS,
    ),
    "adamw_schedulefree": OptimizerSpec(
        schedule_free,
        full_tensors(2),
        library="pytorch_optimizer",
        averages_weights=True,
        eval_weight=schedule_free_weight,
        reads=BETAS,
    ),
}


def optimizer_state_bytes(name: str, shapes: Iterable[Shape]) -> int:
    """Bytes that the optimizer `name` keeps for parameters of these shapes, as a file holds them."""
    return sum(sum(OPTIMIZERS[name].state(shape)) for shape in shapes)


def optimizer_state_on_gpu(name: str, shapes: Iterable[Shape]) -> int:
    """The same as a GPU's allocator holds it: each tensor takes whole pieces of ROUNDING bytes."""
    return sum(-(-size // ROUNDING) * ROUNDING for shape in shapes for size in OPTIMIZERS[name].state(shape))
