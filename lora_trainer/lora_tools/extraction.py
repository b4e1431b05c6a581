"""Extract an adapter from two models: the best one of each layer's difference, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lora_trainer.core.errors import Problem, UsageError, gathering
from lora_trainer.core.findings import counted
from lora_trainer.lora_format.kinds import EXTRACTED, KINDS, LORA
from lora_trainer.lora_format.layer_updates import LayerUpdate
from lora_trainer.lora_format.low_rank import LayerRow, RankLimits, factor
from lora_trainer.lora_format.reading import some
from lora_trainer.lora_format.weights import AdapterWeights
from lora_trainer.lora_tools.base_layers import BaseLayers, read_base


@dataclass(frozen=True)
class Extraction:
    """What to extract: `kind` as `lora.type` has it, of at most `rank`. With `frobenius` a LoRA keeps only the directions of that share of
    a change's norm; `clamp_quantile` as in `low_rank.factor`. `dtype` is the file's, for the errors of other kinds.
    """

    rank: int
    frobenius: float | None = None
    clamp_quantile: float | None = None
    kind: str = LORA
    dtype: torch.dtype = torch.float16

    @property
    def keep(self) -> RankLimits:
        return RankLimits(self.rank, frobenius=self.frobenius)


@dataclass(frozen=True)
class Difference:
    """The difference of two models by layer, what no adapter can hold of it, and the parts that were compared."""

    weights: AdapterWeights
    layers: tuple[LayerRow, ...]
    family: str
    components: tuple[str, ...]
    unchanged: int
    notes: tuple[str, ...]


def extract(base: Path, tuned: Path, how: Extraction) -> Difference:
    """What `tuned` has changed of `base`, layer by layer; layers without a difference are left out.

    Parts that only one of them holds are not compared. Memory holds one layer of both. Raises UsageError for models of two
    families or of other sizes, where nothing differs, and for a kind that cannot be extracted.
    """
    problems = extraction_problems(how)
    found: list[BaseLayers] = []
    for path, flag in ((base, "BASE"), (tuned, "TUNED")):
        with gathering(problems):
            found.append(read_base(path, flag))
    if problems:
        raise UsageError(problems)
    one, other = found
    if problems := list(_unlike(one, other)):
        raise UsageError(problems)
    nearest = KINDS[how.kind].nearest  # None of a LoRA, whose SVD also knows limits of its own
    modules, layers = dict[str, LayerUpdate](), list[LayerRow]()
    shared = [name for name in one.weights if name in other.weights]
    with one.opened() as read_before, other.opened() as read_after:
        for name in shared:
            before = read_before(name)
            change = read_after(name).sub_(before)
            norm = float(change.double().norm())
            if not math.isfinite(norm):
                raise UsageError(
                    Problem("model_not_finite", f"{name} holds NaN or infinity in one of the models.", "Copy it again.")
                )
            if norm == 0.0:
                continue
            if nearest is None:
                modules[name], kept, error = factor(change, how.keep, how.rank, how.clamp_quantile)
            else:
                modules[name] = nearest(before, change, how.rank)
                stored = modules[name].rounded(how.dtype).delta(before).reshape(change.shape)
                error = float((stored - change).double().norm()) / norm
                kept = math.sqrt(max(0.0, 1.0 - error**2))
            layers.append(LayerRow(name, min(change.flatten(1).shape), modules[name].rank, kept, error, norm))
    rest = _rest(one, other)
    if not modules:
        message = f"{base.name} and {tuned.name} have the same {counted(len(shared), 'layer')}."
        fix = "Name the model before and the model after its training."
        if rest:
            message, fix = f"{message} They differ in {rest}.", "A LoRA holds changes of layers alone."
        raise UsageError(Problem("models_differ_elsewhere", message, fix))
    components = tuple(sorted(one.components & other.components))
    left = sorted(one.components ^ other.components)
    notes = [f"not compared: {', '.join(left)}, which only one of the models holds"] if left else []
    notes += [f"not in the file, which holds changes of layers alone: {rest}"] if rest else []
    weights = AdapterWeights(modules, family=one.family)
    return Difference(weights, tuple(layers), one.family, components, len(shared) - len(modules), tuple(notes))


def extraction_problems(how: Extraction) -> list[Problem]:
    """Why a kind of adapter cannot be extracted so."""
    kind = KINDS.get(how.kind)
    if kind is not None and kind.not_extracted:
        kinds = ", ".join((LORA, *EXTRACTED))
        return [
            Problem(
                "kind_not_extracted",
                f"--type {how.kind} cannot be extracted: {kind.not_extracted}.",
                f"One of: {kinds}.",
            )
        ]
    flags = {"--frobenius": how.frobenius, "--clamp-quantile": how.clamp_quantile}
    return [
        Problem("flag_has_no_effect", f"{flag} is for --type lora.", f"Remove {flag}.")
        for flag, value in flags.items()
        if how.kind != LORA and value is not None
    ]


def _unlike(one: BaseLayers, other: BaseLayers) -> Iterator[Problem]:
    """Why two models cannot be compared."""
    if one.family != other.family:
        message = f"{one.path.name} is a model of {one.family}, and {other.path.name} of {other.family}."
        yield Problem("models_of_two_families", message, "Name two models of one family.")
        return
    both = one.components & other.components
    names = {name for name in {*one.shapes, *other.shapes} if name.partition(".")[0] in both}
    if lacking := sorted(name for name in names if name not in one.shapes or name not in other.shapes):
        message = f"{one.path.name} and {other.path.name} do not have the same layers: {some(lacking)}."
        yield Problem("layers_differ", message, "Name a model and what was trained from it.")
    unlike = sorted(name for name in names - set(lacking) if one.shapes[name] != other.shapes[name])
    if unlike:
        first = unlike[0]
        message = (
            f"{counted(len(unlike), 'layer')} of {one.path.name} and {other.path.name} have two sizes: "
            f"{first} is {list(one.shapes[first])} and {list(other.shapes[first])}."
        )
        yield Problem("layers_differ", message, "Name a model and what was trained from it.")


def _rest(one: BaseLayers, other: BaseLayers) -> str:
    """The other weights that differ, in words; empty where none does."""
    with one.opened() as before, other.opened() as after:
        differ = [name for name in one.rest if name in other.rest and not torch.equal(before(name), after(name))]
    return f"{counted(len(differ), 'weight')} of norms, biases and embeddings ({some(differ)})" if differ else ""
