"""DoRA of any change: W' = m (W + D) / |W + D|, so delta = W' - W (arXiv:2402.09353, equation 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from lora_trainer.lora_format.kinds.full import WholeUpdate
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.layer_updates import (
    NO_FACTORS,
    TINY,
    ChangeOfAnother,
    Kind,
    KindFacts,
    LayerUpdate,
    by_output,
    swap_halves,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lora_trainer.lora_format.layer_updates import Product

SCALE, PEFT_SCALE = "dora_scale", "lora_magnitude_vector"  # the magnitude, as LyCORIS and peft name it
OVER, OF_BASE = "lora_trainer.dora_over", "base"  # header: a DoRA whose magnitudes are over |W|, for ComfyUI alone
NEEDS_WEIGHT = "the change of a DoRA depends on the base model's weight"
TURNS = 12
GAIN = 1e-3  # what a turn must gain, as a share, for another one
LEAST_FACTOR = 1e-3  # of an output: B has numbers as large as its inverse, and fp16 holds them up to 65504


@dataclass(frozen=True)
class DecomposedUpdate(ChangeOfAnother):
    """`magnitude` is m: `[out, 1, …]` with the norm over each output's weights, or `[1, in, …]` over each input's, as OneTrainer
    writes it. delta needs the base model's weight.
    """

    magnitude: Tensor
    # Whether it is over |W| and not over |W + D|, as ComfyUI computes one by outputs.
    of_base: bool = field(default=False, kw_only=True)
    algorithm = "dora"
    title = "DoRA"
    needs_weight = True
    is_zero = False  # its magnitude may change the weight all the same
    arguments: ClassVar[Mapping[str, object]] = {
        "algo": "lora",
        "dora_wd": True,
        "wd_on_output": True,
    }  # as LyCORIS names it

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {**self.change.tensors, SCALE: self.magnitude}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> DecomposedUpdate:
        return replace(self, change=self.change.with_tensors(tensors), magnitude=tensors[SCALE])

    @property
    def settings(self) -> tuple[object, ...]:
        return (self.of_base, type(self.change), *self.change.settings)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.change.weight_shape

    @property
    def is_by_output(self) -> bool:
        return self.magnitude.shape[0] == self.weight_shape[0]

    @property
    def norm(self) -> float:
        """Of D alone: the rest depends on the base model."""
        return self.change.norm

    def delta(self, weight: Tensor | None = None) -> Tensor:
        import torch

        if weight is None:
            raise ValueError(NEEDS_WEIGHT)
        before = weight.float()
        moved = before + self.change.delta(weight).reshape(before.shape)
        kept = 0 if self.is_by_output else 1
        others = [axis for axis in range(moved.ndim) if axis != kept]
        norms: Tensor = torch.linalg.vector_norm(before if self.of_base else moved, dim=others, keepdim=True)
        return moved * (self.magnitude.float().reshape(norms.shape) / norms.clamp_min(TINY)) - before

    def rounded(self, dtype: torch.dtype) -> DecomposedUpdate:
        """The magnitude stays in fp32: rounded, it would move a weight as much as a LoRA does."""
        magnitude = self.magnitude.detach().float().cpu().contiguous()
        return replace(self, change=self.change.rounded(dtype), magnitude=magnitude)

    def parts(self) -> Mapping[str, Tensor]:
        return {**self.change.parts(), SCALE: self.magnitude}

    def peft_parts(self) -> Mapping[str, Tensor]:
        """peft's magnitude is [out], or [1, out, 1, 1]."""
        is_flat = self.magnitude.ndim == 2
        magnitude = self.magnitude.flatten() if is_flat else self.magnitude.transpose(0, 1).contiguous()
        return {**self.change.peft_parts(), f"{PEFT_SCALE}.weight": magnitude}

    def rows(self, begin: int, end: int, swapped: bool) -> DecomposedUpdate:
        """Raises ValueError for a magnitude of inputs, whose norms are of all rows."""
        if not self.is_by_output:
            raise ValueError(
                "a DoRA with a magnitude for each input cannot be divided among the parts of a fused layer"
            )
        magnitude = swap_halves(self.magnitude[begin:end], swapped)
        return replace(self, change=self.change.rows(begin, end, swapped), magnitude=magnitude)

    def without_weight(self) -> LayerUpdate:
        return self.change.without_weight()

    def act(self, output: Tensor, product: Product) -> Tensor:
        raise ValueError(NEEDS_WEIGHT)

    def on_base(self, weight: Tensor, bias: Tensor | None) -> LayerUpdate:
        if not self.is_by_output:
            return WholeUpdate({"diff": self.delta(weight)})
        divided_by = weight.float()
        if not self.of_base:
            divided_by = divided_by + self.change.delta(weight).reshape(weight.shape)
        factor = self.magnitude.float().flatten() / divided_by.flatten(1).norm(dim=1).clamp_min(TINY)
        return RescaledUpdate(self.change, by_output(factor, weight), by_output(bias, weight))

    @property
    def in_comfyui(self) -> DecomposedUpdate:
        """ComfyUI divides one by outputs by |W|."""
        return replace(self, of_base=True) if self.is_by_output and not self.of_base else self

    def for_comfyui(self, weight: Tensor) -> DecomposedUpdate:
        """The same change where it is computed as m' (W + D) / |W|, with m' = m |W| / |W + D|."""
        before = weight.float().flatten(1)
        moved = before + self.change.delta(weight).reshape(before.shape)
        ratio = before.norm(dim=1) / moved.norm(dim=1).clamp_min(TINY)
        return replace(self, magnitude=self.magnitude.float() * ratio.reshape(self.magnitude.shape), of_base=True)


@dataclass(frozen=True)
class RescaledUpdate(DecomposedUpdate):
    """A DoRA on its base model: W' = factor (W + D), where `magnitude` is the factor of each output as `by_output` has it."""

    bias: Tensor

    def to(self, device: torch.device) -> RescaledUpdate:
        return RescaledUpdate(self.change.to(device), self.magnitude.to(device), self.bias.to(device))

    def act(self, output: Tensor, product: Product) -> Tensor:
        return (self.magnitude - 1.0) * (output - self.bias) + self.magnitude * product(self.change.delta())


def decompose(change: LayerUpdate, parts: Mapping[str, Tensor], metadata: Mapping[str, str]) -> DecomposedUpdate:
    """The DoRA of a change and the magnitude among a layer's tensors in a file. Raises ValueError for its shape."""
    rows, *rest = change.weight_shape
    if SCALE in parts:
        magnitude = parts[SCALE]
    else:
        magnitude = parts[PEFT_SCALE].reshape(-1, *[1] * len(rest))
    if magnitude.ndim < 2 or tuple(magnitude.shape[:2]) not in ((rows, 1), (1, *rest[:1])):
        raise ValueError(f"a DoRA magnitude {list(magnitude.shape)}")
    return DecomposedUpdate(change, magnitude, of_base=metadata.get(OVER) == OF_BASE and magnitude.shape[0] == rows)


def nearest_decomposed(before: Tensor, change: Tensor, rank: int) -> DecomposedUpdate:
    """The DoRA W' = m (W + B A) / |W + B A| by outputs of a change of `before`, W, with B A of a rank.

    With a factor c = m / |W + B A| of each output, W' = c W + c B A: for c the best c B A are the first singular directions of
    W' - c W, and for B A the best c is each row's least squares. The first turn has c = 1, as a LoRA has, so that the error is at
    most that of a LoRA of this rank.
    """
    from lora_trainer.lora_format.low_rank import principal

    weight = before.flatten(1)
    tuned = weight + change.flatten(1)
    factor, least = weight.new_ones(len(weight), 1), float("inf")
    for _ in range(TURNS):
        left, values, right = principal(tuned - factor * weight, min(rank, *weight.shape))
        up, down = left * values.sqrt() / factor, values.sqrt()[:, None] * right
        moved = weight + up @ down
        factor = (tuned * moved).sum(1, keepdim=True) / moved.square().sum(1, keepdim=True).clamp_min(TINY)
        factor = factor.clamp_min(LEAST_FACTOR)
        error = float((tuned - factor * moved).norm())
        if error >= least:
            break
        ends, (gained, least) = [1] * (change.ndim - 2), (error < least * (1 - GAIN), error)
        pair = LoraPair(down.reshape(-1, *change.shape[1:]), up.reshape(*up.shape, *ends), float(len(values)))
        found = DecomposedUpdate(pair, (factor * moved.norm(dim=1, keepdim=True)).reshape(-1, 1, *ends))
        if not gained:
            break
    return found


KIND = Kind(
    update=DecomposedUpdate,
    parts=(SCALE, PEFT_SCALE),
    ends=f"{SCALE}|{PEFT_SCALE}",
    facts=KindFacts(
        title=DecomposedUpdate.title,
        readers="exact in LyCORIS; ComfyUI 0.3.64 and newer compute a DoRA differently (lora-trainer convert --to comfyui)",
        diffusers_entry="",
        is_checked=True,
        ignores={
            "init_lora_weights": "its magnitudes start at the norms of the base model's own weights",
            **NO_FACTORS,
        },
    ),
    decompose=decompose,
    nearest=nearest_decomposed,
    rewritten={OVER: OF_BASE},
    comfyui=(
        "in part",
        "convert --to comfyui writes a file for it: 0.3.64 and newer divide by the norm of the base's weight alone",
    ),
)
