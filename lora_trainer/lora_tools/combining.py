"""Sums, averages and lower ranks of LoRAs, layer by layer, and what each layer lost; averages of a run's checkpoints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.lora_format.convert import relative_difference
from lora_trainer.lora_format.kinds import REWRITTEN
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.layer_updates import LayerUpdate, mean_of, titles
from lora_trainer.lora_format.low_rank import LayerRow, RankLimits, compress, join_pairs, scale_updates, sharing
from lora_trainer.lora_format.reading import some
from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, read_checkpoint, step_of


@dataclass(frozen=True)
class Combined:
    """The result of a tool. `exact` are the updates before any rounding, by module, where they have the form of pairs."""

    weights: LoraWeights
    layers: tuple[LayerRow, ...]
    exact: Mapping[str, LoraPair]


def combine(loras: Sequence[LoraWeights], weights: Sequence[float], keep: RankLimits | None = None) -> Combined:
    """The sum of LoRAs times their weights, in fp32: exact with added ranks, or with what `keep` says by SVD.

    Each module's update is the sum of the files' updates of it (not of their halves, which would not add up).
    """
    parts: dict[str, list[LoraPair]] = {}
    for lora, weight in zip(loras, weights, strict=True):
        for name, pair in scale_updates(lora.modules, weight).items() if weight else ():
            parts.setdefault(name, []).append(pair)
    exact = {name: join_pairs(pairs) for name, pairs in parts.items()}
    tokens = {
        word: tensor
        for lora, weight in zip(loras, weights, strict=True)
        if weight
        for word, tensor in lora.embeddings.items()
    }
    whole = LoraWeights(exact, embeddings=tokens, family=next((lora.family for lora in loras if lora.family), None))
    if keep is None:
        return Combined(whole, tuple(LayerRow(name, pair.rank, pair.rank) for name, pair in exact.items()), exact)
    fewer, layers = dict[str, LoraPair](), dict[str, LayerRow]()
    for group in sharing(exact):
        pairs = {name: exact[name] for name in group}
        rank = exact[group[0]].rank
        if keep == RankLimits(rank=keep.rank) and rank <= (keep.rank or rank):
            found, row = pairs, LayerRow(group[0], rank, rank)
        else:
            found, row = compress(pairs, keep)
        fewer |= found
        layers |= {name: replace(row, name=name) for name in group}
    modules = {name: fewer[name] for name in exact}
    return Combined(replace(whole, modules=modules), tuple(layers[name] for name in exact), exact)


def average_of_parameters(
    names: Sequence[str], states: Sequence[AdapterWeights], weights: Sequence[float]
) -> AdapterWeights:
    """The average of the parameters of several states of one adapter of any kind, in fp32, as SWA or an EMA of the training would be.

    A change by averaged factors is no average of changes: between files that were trained apart it means nothing. `names` are
    those of the files. Raises UsageError, all problems at once, for files that are no states of one adapter, and for those that
    were rewritten for ComfyUI: their magnitudes are no parameters.
    """
    first = states[0]
    problems = []
    for name, state in zip(names, states, strict=True):
        both = set(first.modules) & set(state.modules)
        if state.metadata.items() & REWRITTEN.items():
            message = f"{name} is {titles(list(state.modules.values()))}, rewritten for ComfyUI: its magnitudes were not trained."
            problems.append(Problem("no_magnitudes", message, "Average the files that it was converted from."))
        if others := sorted(set(first.modules) ^ set(state.modules)):
            message = f"{name} and {names[0]} have different layers ({some(others)})."
            problems.append(
                Problem("layers_differ", message, "Name states of one run, or average updates (--of updates).")
            )
        if unlike := [each for each in sorted(both) if not first.modules[each].is_like(state.modules[each])]:
            what = f"different kinds, ranks or alphas in {counted(len(unlike), 'layer')} ({some(unlike)})"
            fix = "Name states of one run, or average updates (--of updates)."
            problems.append(Problem("layers_differ", f"{name} and {names[0]} have {what}.", fix))
    if problems:
        raise UsageError(problems)
    shares = [weight / sum(weights) for weight in weights]
    modules = {
        name: each.mean([state.modules[name] for state in states], shares) for name, each in first.modules.items()
    }
    tokens = {
        word: mean_of([state.embeddings[word] for state in states], shares)
        for word in first.embeddings
        if all(word in state.embeddings for state in states)
    }
    return AdapterWeights(modules, embeddings=tokens, family=first.family)


def unchanged_rows(modules: Mapping[str, LayerUpdate]) -> tuple[LayerRow, ...]:
    """The rows of layers that keep their ranks."""
    return tuple(LayerRow(name, each.rank, each.rank, norm=each.norm) for name, each in modules.items())


def cast_for_storage(combined: Combined, dtype: torch.dtype, *, one_alpha: bool) -> Combined:
    """The result as a file stores it, with each layer's error between that and the exact update, as a share of it.

    With `one_alpha` all modules of a component get one alpha, the highest rank: diffusers reads kohya's form of a U-Net so.
    Raises UsageError for numbers that the type cannot hold.
    """
    most: Counter[str] = Counter()
    for name, pair in combined.weights.modules.items():
        component = name.partition(".")[0]
        most[component] = max(most[component], pair.rank)
    modules, layers = dict[str, LoraPair](), []
    for layer in combined.layers:
        pair = combined.weights.modules[layer.name]
        alpha = float(most[layer.name.partition(".")[0]]) if one_alpha else pair.alpha
        up = pair.up if alpha == pair.alpha else pair.up * (pair.alpha / alpha)
        modules[layer.name] = LoraPair(pair.down.to(dtype), up.to(dtype), alpha)
        if layer.name in combined.exact:
            layer = replace(layer, error=relative_difference(combined.exact[layer.name], modules[layer.name]))
        elif layer.norm:
            # What the SVD left out is orthogonal to the pair, and so to its rounding up to products of two roundings.
            rounding = relative_difference(pair, modules[layer.name]) * pair.norm / layer.norm
            layer = replace(layer, error=math.hypot(layer.error, rounding))
        layers.append(layer)
    weights = replace(combined.weights, modules=modules)
    if bad := weights.not_finite():
        message = f"{counted(len(bad), 'module')} of the result would not be finite in {str(dtype).removeprefix('torch.')} ({some(bad)})."
        raise UsageError(Problem("weights_too_large", message, "Add --dtype bf16 or fp32, or use smaller weights."))
    return replace(combined, weights=weights, layers=tuple(layers))


STEPS = re.compile(r"(\d*)\.\.(\d*)")


def ema_weights(count: int, decay: float) -> list[float]:
    """The weights of `count` states, oldest first, in an exponential moving average: decay**age, which sum to 1.

    The oldest counts as the others do, so that the average has no start value.
    """
    weights = [decay ** (count - 1 - place) for place in range(count)]
    return [weight / sum(weights) for weight in weights]


def parse_steps(text: str) -> tuple[int, int | None]:
    """First and last step of `500..2000`, `500..` or `..2000`. Raises UsageError."""
    match = STEPS.fullmatch(text)
    if match is None or not any(match.groups()):
        raise UsageError(
            Problem(
                "steps_invalid", f"--steps {text} is no range of steps.", "For example --steps 500..2000, or 500.. ."
            )
        )
    first, last = int(match[1] or 0), int(match[2]) if match[2] else None
    if last is not None and last < first:
        raise UsageError(
            Problem("steps_invalid", f"--steps {text} ends before it begins.", f"Try --steps {last}..{first}.")
        )
    return first, last


def checkpoints_in(folder: Path, first: int = 0, last: int | None = None) -> list[Path]:
    """The finished checkpoints of a run, oldest first; `folder` is the run's, or its `checkpoints`. Raises UsageError for fewer than two."""
    place = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    every = sorted(list_checkpoints(place), key=step_of)
    found = [path for path in every if first <= step_of(path) and (last is None or step_of(path) <= last)]
    if len(found) < 2:
        steps = ", ".join(str(step_of(path)) for path in every) or "none"
        message = f"{place} holds {counted(len(found), 'checkpoint')} to average (all steps: {steps})."
        narrowed = ", or widen --steps" if len(every) > len(found) else ""
        raise UsageError(Problem("too_few_checkpoints", message, f"Keep more with checkpoint.keep_last{narrowed}."))
    return found


def average_of_checkpoints(paths: Sequence[Path], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of the trained parameters of a run's checkpoints, in fp32, one checkpoint in memory at a time.

    Raises UsageError with all checkpoints that are damaged or have other parameters.
    """
    total: dict[str, Tensor] = {}
    problems: list[Problem] = []
    for path, weight in zip(paths, weights, strict=True):
        try:
            found: Mapping[str, Tensor] = read_checkpoint(path).adapter
        except UsageError as error:
            problems.extend(error.problems)
            continue
        if total and {name: each.shape for name, each in found.items()} != {
            name: each.shape for name, each in total.items()
        }:
            message = f"{path} has other trained parameters than {paths[0].name}."
            problems.append(Problem("checkpoints_differ", message, "Average the checkpoints of one run with one rank."))
            continue
        for name, each in found.items():
            share = each.double().mul_(weight / sum(weights))
            total[name] = share if name not in total else total[name].add_(share)
    if problems:
        raise UsageError(problems)
    return {name: each.to(torch.float32) for name, each in total.items()}
