"""Optimizers by name, over fp32 parameters in groups: with weight decay and without, at each learning rate.

`set_lr` sets the learning rate before each step; groups with one of their own scale with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.config.schema import OptimizerSection
from lora_trainer.core.errors import Problem, UsageError

Groups = list[dict[str, Any]]
Rates = Sequence[
    tuple[float, Collection[str]]
]  # rates that are not `optimizer.learning_rate`, and whose they are by name
Build = Callable[[Groups, OptimizerSection], torch.optim.Optimizer]

# As peft names them: DoRA's magnitudes (a convolution's have four dimensions) and trained tokens.
UNDECAYED = ("lora_magnitude_vector", "trainable_tokens", "token_embedding")


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and kernels, not to biases, norms, DoRA magnitudes and tokens."""
    return parameter.ndim > 1 and not any(part in name for part in UNDECAYED)


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimizerSection, other_lrs: Rates = ()
) -> torch.optim.Optimizer:
    """The optimizer that `optimizer.name` means. Raises UsageError when its library does not load."""
    return OPTIMIZERS[config.name](
        [
            {"params": params, "weight_decay": decay, "lr": share * config.learning_rate}
            for share, decay, params in grouped(parameters, config, other_lrs)
        ],
        config,
    )


def grouped(
    parameters: Mapping[str, nn.Parameter], config: OptimizerSection, other_lrs: Rates
) -> list[tuple[float, float, list[nn.Parameter]]]:
    """(share of the learning rate, weight decay, parameters): first the main group, then those of each of `other_lrs`.

    Equal learning rates do not share a group: a checkpoint stores the groups, and they may change at a resume.
    """
    apart = {name for _, names in other_lrs for name in names}
    owned = [(config.learning_rate, parameters.keys() - apart), *other_lrs]
    found: list[tuple[float, float, list[nn.Parameter]]] = []
    for lr, names in owned:
        own = {name: each for name, each in parameters.items() if name in names}
        decayed = [parameter for name, parameter in own.items() if decays(name, parameter)]
        others = [parameter for name, parameter in own.items() if not decays(name, parameter)]
        share = lr / config.learning_rate
        found += [(share, decay, each) for each, decay in ((decayed, config.weight_decay), (others, 0.0)) if each]
    return found


def shares_of(parameters: Mapping[str, nn.Parameter], config: OptimizerSection, other_lrs: Rates) -> tuple[float, ...]:
    """Each group's share of the learning rate."""
    return tuple(share for share, _, _ in grouped(parameters, config, other_lrs))


def adamw(groups: Groups, config: OptimizerSection) -> torch.optim.Optimizer:
    """torch's AdamW (arXiv:1711.05101), in its fused form: one kernel for all parameters."""
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def adamw8bit(groups: Groups, config: OptimizerSection, *, paged: bool = False) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with 8-bit state (arXiv:2110.02861); tensors below 4,096 elements keep fp32 state."""
    kind = from_library("bitsandbytes.optim", "AdamW8bit", config.name)
    return kind(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), is_paged=paged)


def paged_adamw8bit(groups: Groups, config: OptimizerSection) -> torch.optim.Optimizer:
    """The same with state that moves to system memory when the GPU is full; on a CPU there is nothing to page."""
    return adamw8bit(groups, config, paged=all(each.is_cuda for group in groups for each in group["params"]))


def adafactor(groups: Groups, config: OptimizerSection) -> torch.optim.Optimizer:
    """Adafactor (arXiv:1804.04235) without momentum: squares of gradients kept as rows and columns.

    The learning rate is used as it is. transformers' version is used because torch's always scales
    it by the size of the weights, which is 0 for up projections at the start.
    """
    kind = from_library("transformers.optimization", "Adafactor", config.name)
    return kind(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)


def lion(groups: Groups, config: OptimizerSection) -> torch.optim.Optimizer:
    """Lion (arXiv:2302.06675): the sign of a momentum. Needs a third to a tenth of AdamW's learning rate."""
    kind = from_library("pytorch_optimizer", "Lion", config.name)
    return kind(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


def prodigy(groups: Groups, config: OptimizerSection) -> torch.optim.Optimizer:
    """Prodigy (arXiv:2306.06101): finds the learning rate itself; ours is a factor on it, usually 1.0."""
    kind = from_library("pytorch_optimizer", "Prodigy", config.name)
    betas = (config.beta1, config.beta2)
    return kind(groups, lr=config.learning_rate, betas=betas, bias_correction=True, safeguard_warmup=True)


def schedule_free(groups: Groups, config: OptimizerSection) -> torch.optim.Optimizer:
    """Schedule-free AdamW (arXiv:2405.15682): trains at one point, and evaluates at an average (`averaged`)."""
    kind = from_library("pytorch_optimizer", "ScheduleFreeAdamW", config.name)
    return kind(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


OPTIMIZERS: dict[str, Build] = {
    "adamw": adamw,
    "adamw8bit": adamw8bit,
    "paged_adamw8bit": paged_adamw8bit,
    "adafactor": adafactor,
    "lion": lion,
    "prodigy": prodigy,
    "adamw_schedulefree": schedule_free,
}

# They wait for a GPU in each step: bitsandbytes' after each parameter, Prodigy for the distance that it finds.
WAITING = ("adamw8bit", "paged_adamw8bit", "prodigy")


def from_library(module: str, name: str, wanted: str) -> Callable[..., torch.optim.Optimizer]:
    """A class of a library that only some optimizers need. Raises UsageError when it does not load."""
    library = module.partition(".")[0]
    try:
        kind: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module(module), name)
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        raise UsageError(
            Problem(
                f"optimizer.name={wanted} needs {library}, which does not load ({error}).",
                f"Run: pip install {library}. Or set optimizer.name=adamw.",
            )
        ) from error
    return kind


def set_lr(optimizer: torch.optim.Optimizer, lr: float, shares: Sequence[float] = ()) -> None:
    """Set the learning rate of every group, times its share."""
    for group, share in zip(optimizer.param_groups, shares or (1.0,) * len(optimizer.param_groups), strict=True):
        group["lr"] = lr * share


@torch.no_grad()
def averaged(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """A schedule-free parameter's value for evaluation; the parameter stays as it is.

    x = (y - (1 - beta1) z) / beta1 (arXiv:2405.15682, eq. 8). The library's own `eval()` and `train()` do
    this in place and back, so that rounding would depend on how often a run is evaluated.
    """
    state = optimizer.state.get(parameter, {})
    if "z" not in state:
        return parameter.detach()
    (beta1,) = {group["betas"][0] for group in optimizer.param_groups}
    return parameter.detach().lerp(state["z"], 1.0 - 1.0 / beta1)
