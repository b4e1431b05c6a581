"""Stored memory profiles: the peak memory of a step of a published model, for any size, in microseconds. No torch.

Every tensor of a step has a size that is a product of some of rank, samples and area, or a sum of such products where
text and image are in one tensor. So at each moment of a step memory is a sum of a few such products, and the peak is
the largest over the moments. A profile keeps, for some numbers of checkpointed blocks, the moments that can be the
largest; between two such numbers, whose blocks are alike, memory is on a line or under it.
Tests compare their predictions with traces (`memory_plan/trace.py`) at other sizes. A family without a profile is traced.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from lora_trainer.core.families import families

if TYPE_CHECKING:
    from lora_trainer.models.family import Architecture

UNIMPORTANT = ("sample_size",)  # of a denoiser's config


@dataclass(frozen=True)
class Sizes:
    """What a step's memory depends on. `area` is that of one sample's latents, h x w.

    `checkpointed` and `swapped` count blocks. `recompute` is what the checkpointed ones recompute. `offloaded`:
    activations wait in host memory; the rest is traced, and is in no stored profile.
    """

    rank: int
    micro: int
    area: int
    checkpointed: int
    recompute: str = "full"
    swapped: int = 0
    offloaded: bool = False

    @property
    def terms(self) -> tuple[int, ...]:
        """What the coefficients of a moment are multiplied with, and those of a step's operations."""
        samples, pixels = self.micro, self.micro * self.area
        return (1, self.rank, samples, samples * self.rank, pixels, pixels * self.rank, pixels * self.area)


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of one micro-batch's forward and backward pass, and its operations.

    `gradients` are those of the adapter's copies that exist at that moment; `activations` is all the rest.
    """

    weights: int
    copies: int
    gradients: int
    activations: int
    flops: int


@dataclass(frozen=True)
class MemoryModel:
    """How much memory the steps of one model take, with one choice of LoRA targets.

    Any number of the `swappable` blocks can be swapped. `shapes` returns the LoRA's tensors for a rank, `weights` the
    bytes of the base model in a precision, `footprint` the peak for sizes and a precision. `stride` is by how many
    blocks to try more checkpointing: a footprint is free from a profile, and takes seconds where it is `traced`.
    """

    source: str
    blocks: int
    stride: int
    swappable: int
    shapes: Callable[[int], Sequence[tuple[int, ...]]]
    weights: Callable[[str], int]
    footprint: Callable[[Sizes, str], Footprint]
    traced: bool = False


@dataclass(frozen=True)
class MemoryProfile:
    """One published model with one choice of LoRA targets, weight dtype and checkpointing mode.

    `layers` holds (in, out, count) of the adapted layers; `moments[i]` and `flops[i]` are for `counts[i]` checkpointed
    blocks; `freed[k]` are bytes that are not on the GPU when k blocks are swapped.
    """

    weights: int
    freed: tuple[int, ...]
    layers: tuple[tuple[int, int, int], ...]
    counts: tuple[int, ...]
    moments: tuple[tuple[tuple[int, ...], ...], ...]
    flops: tuple[tuple[int, ...], ...]

    @property
    def blocks(self) -> int:
        return self.counts[-1]

    def shapes(self, rank: int) -> list[tuple[int, ...]]:
        """The LoRA's tensors: [rank, in] and [out, rank] for each layer."""
        return [shape for inside, outside, count in self.layers for shape in ((rank, inside), (outside, rank)) * count]

    def footprint(self, sizes: Sizes) -> Footprint:
        """The prediction, for bf16 and fp16 computation."""
        above = bisect_left(self.counts, sizes.checkpointed)
        peaks = {self.counts[index]: self._peak(index, sizes) for index in (max(0, above - 1), above)}
        less, more = min(peaks), self.counts[above]
        share = (sizes.checkpointed - less) / (more - less) if more > less else 1.0
        gradients, activations, flops = (
            round(low + share * (high - low)) for low, high in zip(peaks[less], peaks[more], strict=True)
        )
        return Footprint(
            weights=self.weights - self.freed[min(sizes.swapped, len(self.freed) - 1)],
            copies=2 * sizes.rank * sum((inside + outside) * count for inside, outside, count in self.layers),
            gradients=gradients,
            activations=activations,
            flops=flops,
        )

    def _peak(self, index: int, sizes: Sizes) -> tuple[int, int, int]:
        """Gradients and activations at the peak with `counts[index]` checkpointed blocks, and operations."""
        terms = sizes.terms
        at_peak = max(self.moments[index], key=lambda moment: _dot(moment, terms))
        gradients = at_peak[1] * sizes.rank
        return gradients, _dot(at_peak, terms) - gradients, _dot(self.flops[index], terms)


def _dot(coefficients: Sequence[int], terms: Sequence[int]) -> int:
    return sum(coefficient * term for coefficient, term in zip(coefficients, terms, strict=True))


def _document(family: str) -> Mapping[str, Any] | None:
    return families()[family].get("memory_profile")


def stored_families() -> list[str]:
    """The families whose published model has a memory profile."""
    return [family for family in families() if _document(family) is not None]


FORM_OF = {"bf16": "half", "fp16": "half", "fp32": "half", "fp8": "narrow", "int8": "narrow", "nf4": "narrow"}


@cache
def stored_profile(family: str, targets: str, precision: str, recompute: str = "full") -> MemoryProfile | None:
    """The memory profile of a family's published model; None where none was written.

    Quantized weights are all dequantized alike, so that one trace is valid for all of them.
    """
    document = _document(family)
    found = None if document is None else document["targets"].get(targets)
    if document is None or found is None:
        return None
    form = FORM_OF[precision]
    stored, steps = document["stored"][form if form == "half" else precision], found[form][recompute]
    return MemoryProfile(
        weights=stored["weights"],
        freed=tuple(stored["freed"]),
        layers=tuple(tuple(layer) for layer in found["layers"]),
        counts=tuple(steps["counts"]),
        moments=tuple(tuple(tuple(moment) for moment in step) for step in steps["moments"]),
        flops=tuple(tuple(step) for step in steps["flops"]),
    )


def is_published(architecture: Architecture) -> bool:
    """Whether the denoiser is built as its family's published one, for which a profile is stored.

    A key that one of the two configs lacks has its default there: None and False count as that.
    """
    document = _document(architecture.facts.family)
    if document is None:
        return False
    own = {key: value for key, value in architecture.denoiser.items() if not key.startswith("_")}
    published: Mapping[str, Any] = document["config"]
    lacking = set(document["set"]) - set(own)
    different = [
        key
        for key, value in own.items()
        if key not in UNIMPORTANT and json.loads(json.dumps(value)) != published.get(key, value or None)
    ]
    return not lacking and not different


def stored_memory_model(architecture: Architecture, targets: str | tuple[str, ...]) -> MemoryModel | None:
    """The memory model of a published model, from its stored profiles; None for another model or other targets."""
    if not isinstance(targets, str) or not is_published(architecture):
        return None
    family = architecture.facts.family
    half = stored_profile(family, targets, "bf16")
    if half is None:
        return None

    def profile(precision: str, recompute: str = "full") -> MemoryProfile:
        found = stored_profile(family, targets, precision, recompute)
        assert found is not None
        return found

    def weights(precision: str) -> int:
        return (2 if precision == "fp32" else 1) * profile(precision).weights

    def footprint(sizes: Sizes, precision: str) -> Footprint:
        found = profile(precision, sizes.recompute).footprint(sizes)
        return in_fp32(found) if precision == "fp32" else found

    source = f"memory profile of the published {family}"
    return MemoryModel(source, half.blocks, 1, len(half.freed) - 1, half.shapes, weights, footprint)


def in_fp32(half: Footprint) -> Footprint:
    """The same step in fp32: every tensor is twice as large, and the adapter's copies are its masters."""
    return Footprint(2 * half.weights, 2 * half.copies, 2 * half.gradients, 2 * half.activations, half.flops)
