"""What of a LoRA differs from layer to layer and from parameter to parameter: ranks, initial weights, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lora_trainer.adapters.adapter_kinds import adapter_kind, denoiser_options
from lora_trainer.adapters.base import AS_USUAL, AdapterOptions
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.adapters.timestep_rank import TimestepRank
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.models.folder import read_config
from lora_trainer.optim.layers import like
from lora_trainer.training.step import whole_rank

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config, LoraSection
    from lora_trainer.diffusion.process import Process
    from lora_trainer.models.family import Family, ModelFacts
    from lora_trainer.optim.optimizers import Rates

PATTERNS = ("rank_pattern", "alpha_pattern", "dropout_pattern")
MOST_SHOWN = 3  # layers that a problem names


def pattern_problems(config: Config, family: Family, facts: ModelFacts) -> list[Problem]:
    """The problems of `lora.rank_pattern`, `alpha_pattern` and `dropout_pattern`.

    Patterns that match no trained layer, and ranks above a layer's size. Reads the model's config, not its weights.
    Patterns of text encoders are checked by `layer_option_notes`: their trained modules are known once they are loaded.
    """
    if not any(getattr(config.lora, table) for table in PATTERNS):
        return []
    component = family.denoiser.component
    with torch.device("meta"):
        denoiser = family.denoiser.make(read_config(facts.path, f"{component}/config.json"))
    names = target_modules(denoiser, family.denoiser, config.lora.target_modules)
    options = denoiser_options(config)
    texts = tuple(f"{name}." for name in family.text_rates(config.text_encoder.learning_rates))
    problems = unmatched(options, names, texts)
    chosen = [name for name in names if options.of_layer(name).rank != options.rank]
    for rank, layers in too_large(denoiser, chosen, options).items():
        shown = f"{', '.join(layers[:MOST_SHOWN])}{' …' if len(layers) > MOST_SHOWN else ''}"
        size = min(most_rank(denoiser.get_submodule(name)) for name in layers)
        message = f"lora.rank_pattern: rank {rank} is above the size of {counted(len(layers), 'layer')} ({shown}): the least is {size}."
        problems.append(Problem("rank_too_large", message, f"Set {size} or less for them."))
    return problems


def unmatched(options: AdapterOptions, names: Sequence[str], texts: tuple[str, ...] = ()) -> list[Problem]:
    """The patterns that match none of the names: of a text encoder's, those with its prefix; else all but `texts`'."""
    return [
        Problem(
            "pattern_matches_nothing",
            f"lora.{table}: {pattern!r} matches none of {len(names)} layers.",
            like(pattern, names),
        )
        for table, values in zip(PATTERNS, (options.ranks, options.alphas, options.dropouts), strict=True)
        for pattern in values
        if (pattern.startswith(options.prefix) if options.prefix else not pattern.startswith(texts))
        and not any(fnmatchcase(name, pattern) for name in names)
    ]


def most_rank(layer: nn.Module) -> int:
    """The largest rank that a change of a layer's weight, [out, in] or [out, in · k · k], can have."""
    if isinstance(layer, nn.Conv2d):
        height, width = layer.kernel_size
        return min(layer.out_channels, layer.in_channels // layer.groups * height * width)
    assert isinstance(layer, nn.Linear)
    return min(layer.out_features, layer.in_features)


def too_large(model: nn.Module, names: Iterable[str], options: AdapterOptions) -> dict[int, list[str]]:
    """The layers whose LoRA has a higher rank than any change of their weight can have, by that rank."""
    found: dict[int, list[str]] = {}
    for name in names:
        rank = options.of_layer(name).rank
        if rank > most_rank(model.get_submodule(name)):
            found.setdefault(rank, []).append(name)
    return found


def layer_option_notes(model: nn.Module, names: Sequence[str], options: AdapterOptions) -> list[str]:
    """For the log, before the adapter is injected: ranks that differ, ranks above a layer's size, and initial weights.

    Raises UsageError for patterns of a text encoder that match none of its layers.
    """
    if problems := [] if not options.prefix else unmatched(options, [options.prefix + name for name in names]):
        raise UsageError(problems)
    ranks = [options.of_layer(name).rank for name in names]
    notes = []
    if options.ranks:
        shares = ", ".join(f"{rank} in {counted(ranks.count(rank), 'layer')}" for rank in sorted(set(ranks)))
        notes.append(f"ranks: {shares} (lora.rank_pattern)")
    for rank, layers in too_large(model, names, options).items():
        notes.append(
            f"rank {rank} is above the size of {counted(len(layers), 'layer')} (first: {layers[0]}), where a lower one changes as much (lora.rank_pattern)"
        )
    if options.initialization != AS_USUAL:
        convolutions = sum(isinstance(model.get_submodule(name), nn.Conv2d) for name in names)
        is_usual = convolutions and options.initialization != "gaussian"
        rest = f"; {counted(convolutions, 'convolution')} as usual" if is_usual else ""
        notes.append(f"initial weights: {options.initialization}{rest} (lora.init_lora_weights)")
    return notes


def with_loraplus(
    denoiser: Collection[str], texts: Rates, config: Config, is_up: Callable[[str], bool] | None
) -> list[tuple[float, Collection[str]]]:
    """The learning rates other than `optimizer.learning_rate`, with those of up projections by LoRA+ (arXiv:2402.12354).

    `denoiser` are the names of its trained parameters, `texts` the learning rates of all others.
    """
    ratio = config.lora.loraplus_lr_ratio
    of_texts = config.lora.loraplus_text_encoder_lr_ratio or ratio
    found = list[tuple[float, Collection[str]]]()
    for lr, names, own in (
        (config.optimizer.learning_rate, denoiser, ratio),
        *((lr, names, of_texts) for lr, names in texts),
    ):
        ups = frozenset(filter(is_up, names)) if own is not None and is_up is not None else frozenset()
        if names is not denoiser:
            found.append((lr, frozenset(names) - ups))
        if ups and own is not None:
            found.append((lr * own, ups))
    return found


def option_notes(lora: LoraSection) -> list[str]:
    """Lines on LoRA+ and T-LoRA, which change no number of the LoRA's size."""
    notes = []
    if lora.timestep_min_rank is not None:
        rows = f"{lora.timestep_min_rank} rows of each layer at the most noise, up to all without noise"
        notes.append(f"T-LoRA: trains {rows} (lora.timestep_min_rank)")
    if lora.lokr_factor != -1:
        notes.append(f"LoKr: first factors with sides near {lora.lokr_factor} (lora.lokr_factor)")
    if lora.loraplus_lr_ratio is not None:
        notes.append(f"LoRA+: up projections learn at {lora.loraplus_lr_ratio:g} times the learning rate")
    return notes


def limit_timestep_ranks(
    config: Config, denoiser: nn.Module, process: Process
) -> Callable[[Tensor], AbstractContextManager[None]]:
    """What lets the denoiser's LoRA train fewer rows at high noise (`lora.timestep_min_rank`), around the passes at t [B]."""
    least, limit_ranks = config.lora.timestep_min_rank, adapter_kind(config).limit_ranks
    if least is None or limit_ranks is None:
        return whole_rank
    limit = TimestepRank(least, config.lora.timestep_rank_exponent, process.timesteps)
    limit_ranks(denoiser, limit)
    return limit.limited
