"""Extract a LoRA from two models: the best low-rank pair of each layer's difference, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from lora_trainer.core.errors import Problem, UsageError, gathering
from lora_trainer.core.findings import counted
from lora_trainer.export.reading import some
from lora_trainer.export.weights import LoraPair, LoraWeights
from lora_trainer.lora_files.base_layers import BaseLayers, read_base
from lora_trainer.lora_files.combining import Combined
from lora_trainer.lora_files.low_rank import LayerRow, RankLimits, factor
from lora_trainer.models.places import Place
from lora_trainer.models.quantization.stored_forms import WeightReader

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Difference:
    """A LoRA of the difference of two models, what a LoRA cannot hold of it, and the parts that were compared."""

    combined: Combined
    family: str
    components: tuple[str, ...]
    unchanged: int
    notes: tuple[str, ...]


def extract(base: Path, tuned: Path, keep: RankLimits, most: int, clamp_quantile: float | None = None) -> Difference:
    """The LoRA of tuned - base, of at most rank `most` in each layer; layers without a difference are left out.

    Parts that only one of them holds are not compared. Memory holds one layer of both. Raises UsageError for models of two
    families or of other sizes, and where nothing differs.
    """
    problems: list[Problem] = []
    found: list[BaseLayers] = []
    for path, flag in ((base, "BASE"), (tuned, "TUNED")):
        with gathering(problems):
            found.append(read_base(path, flag))
    if problems:
        raise UsageError(problems)
    one, other = found
    if problems := list(_unlike(one, other)):
        raise UsageError(problems)
    modules, layers = dict[str, LoraPair](), list[LayerRow]()
    size = unchanged = 0
    lost = whole = 0.0
    for name, change in _changes(one.weights, other.weights, one.shapes):
        size += 1
        norm = float(change.double().norm())
        if not math.isfinite(norm):
            raise UsageError(Problem(f"{name} holds NaN or infinity in one of the models.", "Copy it again."))
        if norm == 0.0:
            unchanged += 1
            continue
        modules[name], kept, error = factor(change, keep, most, clamp_quantile)
        layers.append(LayerRow(name, min(change.flatten(1).shape), modules[name].rank, kept, error))
        whole, lost = whole + norm**2, lost + (error * norm) ** 2
    rest = _rest(one, other)
    if not modules:
        message = f"{base.name} and {tuned.name} have the same {counted(size, 'layer')}."
        fix = "Name the model before and the model after its training."
        if rest:
            message, fix = f"{message} They differ in {rest}.", "A LoRA holds changes of layers alone."
        raise UsageError(Problem(message, fix))
    components = tuple(sorted(one.components & other.components))
    left = sorted(one.components ^ other.components)
    notes = [f"the LoRA differs from tuned - base by {math.sqrt(lost / whole):.1%} of its size, all layers together"]
    notes += [f"not compared: {', '.join(left)}, which only one of the models holds"] if left else []
    notes += [f"not in the LoRA, which holds changes of layers alone: {rest}"] if rest else []
    weights = LoraWeights(modules, family=one.family)
    return Difference(Combined(weights, tuple(layers), {}), one.family, components, unchanged, tuple(notes))


def _unlike(one: BaseLayers, other: BaseLayers) -> Iterator[Problem]:
    """Why two models cannot be compared."""
    if one.family != other.family:
        message = f"{one.path.name} is a model of {one.family}, and {other.path.name} of {other.family}."
        yield Problem(message, "Name two models of one family.")
        return
    both = one.components & other.components
    names = {name for name in {*one.shapes, *other.shapes} if name.partition(".")[0] in both}
    if lacking := sorted(name for name in names if name not in one.shapes or name not in other.shapes):
        message = f"{counted(len(lacking), 'layer')} are in one of {one.path.name} and {other.path.name} alone ({some(lacking)})."
        yield Problem(message, "Name a model and what was trained from it.")
    unlike = sorted(name for name in names - set(lacking) if one.shapes[name] != other.shapes[name])
    if unlike:
        first = unlike[0]
        message = (
            f"{counted(len(unlike), 'layer')} have other sizes in {other.path.name}: "
            f"{first} is {list(one.shapes[first])} and {list(other.shapes[first])}."
        )
        yield Problem(message, "Name a model and what was trained from it.")


def _changes(
    one: Mapping[str, Place], other: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The difference of each layer that both have, in fp32, in the shape of the layer."""
    with ExitStack() as first_stack, ExitStack() as second_stack:
        before = WeightReader(one, first_stack, CPU, copy=True)
        after = WeightReader(other, second_stack, CPU, copy=True)
        for name in one:
            if name in other:
                yield name, after.read(name, torch.float32).sub_(before.read(name, torch.float32)).view(shapes[name])


def _rest(one: BaseLayers, other: BaseLayers) -> str:
    """The other weights that differ, in words; empty where none does."""
    both = [name for name in one.rest if name in other.rest]
    with ExitStack() as first_stack, ExitStack() as second_stack:
        before = WeightReader(one.rest, first_stack, CPU, copy=True)
        after = WeightReader(other.rest, second_stack, CPU, copy=True)
        differ = [
            name for name in both if not torch.equal(before.read(name, torch.float32), after.read(name, torch.float32))
        ]
    return f"{counted(len(differ), 'weight')} of norms, biases and embeddings ({some(differ)})" if differ else ""
