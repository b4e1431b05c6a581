"""Changes of layers that are no low-rank product: LoKr, LoHa, OFT, DoRA, whole weights. Names and formulas as LyCORIS has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from lora_trainer.lora_format.weights import LayerUpdate, LoraPair, Product

TINY = 1e-12  # the least norm that is divided by


@dataclass(frozen=True)
class FactorUpdate:
    """A change of named factors. `tensors` are a file's, by the ends of their names; without alpha, the scale is 1."""

    tensors: Mapping[str, Tensor]
    alpha: float | None = None
    algorithm: ClassVar[str]  # as LyCORIS and the header call it
    title: ClassVar[str]  # as people do
    scaled: ClassVar[str]  # where alpha / rank goes: the beginning of a tensor's name
    needs_weight: ClassVar[bool] = False

    @property
    def rank(self) -> int:
        raise NotImplementedError

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight, or `[out, in * k * k]` where the factors do not tell more."""
        raise NotImplementedError

    def delta(self, weight: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @property
    def finite(self) -> bool:
        values = all(bool(each.isfinite().all()) for each in self.tensors.values())
        return values and (self.alpha is None or math.isfinite(self.alpha))

    @property
    def norm(self) -> float:
        """The Frobenius norm of the change."""
        return float(self.delta().norm())

    def rounded(self, dtype: torch.dtype) -> FactorUpdate:
        """With alpha / rank multiplied into one factor in fp32, so that clients that never read alpha agree."""
        tensors = {name: each.detach().float().cpu() for name, each in self.tensors.items()}
        if self.scale != 1.0:
            into = next(name for name in tensors if name.startswith(self.scaled))
            tensors[into] = tensors[into] * self.scale
        cast = {name: each.to(dtype).contiguous() for name, each in tensors.items()}
        return replace(self, tensors=cast, alpha=None if self.alpha is None else float(self.rank))

    def parts(self) -> Mapping[str, Tensor]:
        alpha = {} if self.alpha is None else {"alpha": torch.tensor(self.alpha, dtype=torch.float32)}
        return {**self.tensors, **alpha}

    def to(self, device: torch.device) -> FactorUpdate:
        return replace(self, tensors={name: each.to(device) for name, each in self.tensors.items()})

    def act(self, output: Tensor, product: Product) -> Tensor:
        return product(self.delta())


class KroneckerUpdate(FactorUpdate):
    """LoKr: delta = w1 (x) w2 * alpha / rank, with the Kronecker product (arXiv:2309.14859, section 4.2).

    w1 `[o1, i1]` and w2 `[o2, i2, …]` are whole or products: `_a [o, r]` @ `_b [r, i]`, w2 also with a core `lokr_t2
    [r, r, k, k]` between `_a [r, o2]` and `_b [r, i2]`. Of two whole ones alpha does not count.
    """

    algorithm, title, scaled = "lokr", "LoKr", "lokr_w1"

    @property
    def is_whole(self) -> bool:
        return "lokr_w1" in self.tensors and "lokr_w2" in self.tensors

    @property
    def rank(self) -> int:
        inner = next((self.tensors[name] for name in ("lokr_w2_b", "lokr_w1_b") if name in self.tensors), None)
        return min(self.weight_shape[0], math.prod(self.weight_shape[1:])) if inner is None else inner.shape[0]

    @property
    def scale(self) -> float:
        return 1.0 if self.is_whole else super().scale

    @property
    def weight_shape(self) -> tuple[int, ...]:
        (rows, columns), (own_rows, own_columns, *kernel) = self._shape(1), self._shape(2)
        return (rows * own_rows, columns * own_columns, *kernel)

    def _shape(self, number: int) -> tuple[int, ...]:
        """The shape of w1 or w2."""
        name = f"lokr_w{number}"
        if name in self.tensors:
            return tuple(self.tensors[name].shape)
        left, right = self.tensors[f"{name}_a"], self.tensors[f"{name}_b"]
        if (core := self.tensors.get(f"lokr_t{number}")) is not None:
            return (left.shape[1], right.shape[1], *core.shape[2:])
        return (left.shape[0], *right.shape[1:])

    def factor(self, number: int) -> Tensor:
        """w1 or w2 in fp32, multiplied out."""
        name = f"lokr_w{number}"
        if name in self.tensors:
            return self.tensors[name].float()
        left, right = self.tensors[f"{name}_a"].float(), self.tensors[f"{name}_b"].float()
        return _product(left, right, self.tensors.get(f"lokr_t{number}")).reshape(self._shape(number))

    def delta(self, weight: Tensor | None = None) -> Tensor:
        one, two = self.factor(1), self.factor(2)
        # torch 2.13 has no Kronecker product of the view that a core's product is.
        return torch.kron(one.reshape(*one.shape, *[1] * (two.ndim - 2)), two.contiguous()) * self.scale

    @property
    def norm(self) -> float:
        return float(self.factor(1).norm() * self.factor(2).norm()) * abs(self.scale)


class HadamardUpdate(FactorUpdate):
    """LoHa: delta = (w1_a w1_b) * (w2_a w2_b) * alpha / rank, entry by entry (arXiv:2108.06098).

    `_a` is `[out, r]` and `_b [r, in]`, or `[r, in * k * k]`; with a core `hada_t [r, r, k, k]` they are `[r, out]` and `[r, in]`.
    """

    algorithm, title, scaled = "loha", "LoHa", "hada_w1_a"

    @property
    def rank(self) -> int:
        return self.tensors["hada_w1_b"].shape[0]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        left, right, core = self.tensors["hada_w1_a"], self.tensors["hada_w1_b"], self.tensors.get("hada_t1")
        return (left.shape[0], *right.shape[1:]) if core is None else (left.shape[1], right.shape[1], *core.shape[2:])

    def delta(self, weight: Tensor | None = None) -> Tensor:
        one, two = (
            _product(
                self.tensors[f"hada_w{number}_a"].float(),
                self.tensors[f"hada_w{number}_b"].float(),
                self.tensors.get(f"hada_t{number}"),
            )
            for number in (1, 2)
        )
        return (one * two * self.scale).reshape(self.weight_shape)


def _product(left: Tensor, right: Tensor, core: Tensor | None) -> Tensor:
    """`left @ right`, `[out, in …]`; around a core `[r, r, k, k]` the Tucker product, with `left [r, out]` and `right [r, in]`."""
    product: Tensor
    if core is None:
        product = left @ right.flatten(1)
    else:
        product = torch.einsum("ij...,ip,jr->pr...", core.float(), left, right)
    return product


class WholeUpdate(FactorUpdate):
    """The change itself, as large as the weight: LyCORIS' `full`."""

    algorithm, title, scaled = "full", "changes of whole weights", "diff"

    @property
    def rank(self) -> int:
        return min(self.weight_shape[0], math.prod(self.weight_shape[1:]))

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return tuple(self.tensors["diff"].shape)

    def delta(self, weight: Tensor | None = None) -> Tensor:
        return self.tensors["diff"].float()


class RotationUpdate(FactorUpdate):
    """OFT: W' = R W, a rotation of the outputs in blocks of b (arXiv:2306.07280), as LyCORIS' `diag-oft` and ComfyUI have it.

    `oft_blocks` are A `[out / b, b, b]`, with Q = A - A^T and R^T = (I + Q) (I - Q)^-1 (Cayley). alpha is a bound on |Q| for each
    output, 0 for none. The inputs are not known, so `weight_shape` is `[out]`.
    """

    algorithm, title, scaled, needs_weight = "diag-oft", "OFT", "oft_blocks", True

    @property
    def rank(self) -> int:
        return self.tensors["oft_blocks"].shape[1]

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def weight_shape(self) -> tuple[int, ...]:
        blocks = self.tensors["oft_blocks"]
        return (blocks.shape[0] * blocks.shape[1],)

    @property
    def norm(self) -> float:
        """Of R - I: the rest depends on the base model."""
        return float((rotation(self.tensors["oft_blocks"].float(), self.alpha) - torch.eye(self.rank)).norm())

    def delta(self, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            raise ValueError("the change of an OFT depends on the base model's weight")
        blocks, before = self.tensors["oft_blocks"], weight.float()
        if len(blocks) * self.rank != len(before):
            raise ValueError(f"{len(blocks)} blocks of {self.rank} do not fit {len(before)} rows")
        return rotated(before.flatten(1).T, rotation(blocks.float(), self.alpha)).T.reshape(before.shape) - before

    def rounded(self, dtype: torch.dtype) -> RotationUpdate:
        """In fp32: fp16 has no place for small angles."""
        blocks = self.tensors["oft_blocks"].detach().float().cpu().contiguous()
        return RotationUpdate({"oft_blocks": blocks}, self.alpha)

    def act(self, output: Tensor, product: Product) -> Tensor:
        bias = self.tensors["bias"]
        bare = output.float() - bias
        last = bare if bias.ndim == 1 else bare.movedim(1, -1)
        change = rotated(last, rotation(self.tensors["oft_blocks"].float(), self.alpha)) - last
        return change if bias.ndim == 1 else change.movedim(-1, 1)


def rotation(blocks: Tensor, bound: float | None = None) -> Tensor:
    """The blocks `[n, b, b]` of R^T, by the Cayley transform of their skew-symmetric parts; see `RotationUpdate`."""
    skew = blocks - blocks.transpose(1, 2)
    if bound:
        skew = skew * bounded(blocks, bound)
    identity = torch.eye(blocks.shape[1], device=blocks.device, dtype=blocks.dtype)
    solved: Tensor = torch.linalg.solve(identity - skew, identity + skew, left=False)
    return solved


def bounded(blocks: Tensor, bound: float | None) -> float:
    """The factor on blocks `[n, b, b]` that keeps the norm of their skew-symmetric parts within `bound` for each output."""
    if not bound:
        return 1.0
    size = float((blocks - blocks.transpose(1, 2)).norm())
    return min(1.0, bound * blocks.shape[0] * blocks.shape[1] / max(size, TINY))


def rotated(x: Tensor, blocks: Tensor) -> Tensor:
    """The last axis `[…, n * b]` of x times blocks `[n, b, b]` on the diagonal."""
    count, size, _ = blocks.shape
    turned: Tensor = torch.einsum("knm,...kn->...km", blocks, x.unflatten(-1, (count, size)))
    return turned.flatten(-2)


@dataclass(frozen=True)
class ChangeOfAnother:
    """What is made of another change of the layer, with its rank and scale."""

    change: LayerUpdate

    @property
    def rank(self) -> int:
        return self.change.rank

    @property
    def alpha(self) -> float | None:
        return self.change.alpha

    @property
    def scale(self) -> float:
        return self.change.scale


@dataclass(frozen=True)
class DecomposedUpdate(ChangeOfAnother):
    """DoRA of any change: W' = m (W + D) / |W + D|, so delta = W' - W (arXiv:2402.09353, equation 5).

    `magnitude` is m: `[out, 1, …]` with the norm over each output's weights, or `[1, in, …]` over each input's, as OneTrainer
    writes it. delta needs the base model's weight.
    """

    magnitude: Tensor
    # Whether it is over |W| and not over |W + D|, as ComfyUI computes one by outputs.
    of_base: bool = field(default=False, kw_only=True)
    algorithm: ClassVar[str] = "dora"
    title: ClassVar[str] = "DoRA"
    needs_weight: ClassVar[bool] = True

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.change.weight_shape

    @property
    def is_by_output(self) -> bool:
        return self.magnitude.shape[0] == self.weight_shape[0]

    @property
    def finite(self) -> bool:
        return self.change.finite and bool(self.magnitude.isfinite().all())

    @property
    def norm(self) -> float:
        """Of D alone: the rest depends on the base model."""
        return self.change.norm

    def delta(self, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            raise ValueError("the change of a DoRA depends on the base model's weight")
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
        return {**self.change.parts(), "dora_scale": self.magnitude}

    def to(self, device: torch.device) -> DecomposedUpdate:
        return replace(self, change=self.change.to(device), magnitude=self.magnitude.to(device))

    def for_comfyui(self, weight: Tensor) -> DecomposedUpdate:
        """The same change where it is computed as m' (W + D) / |W|, with m' = m |W| / |W + D|; one by inputs is as it is."""
        if not self.is_by_output or self.of_base:
            return self
        before = weight.float().flatten(1)
        moved = before + self.change.delta(weight).reshape(before.shape)
        ratio = before.norm(dim=1) / moved.norm(dim=1).clamp_min(TINY)
        return replace(self, magnitude=self.magnitude.float() * ratio.reshape(self.magnitude.shape), of_base=True)

    def act(self, output: Tensor, product: Product) -> Tensor:
        raise ValueError("the change of a DoRA depends on the base model's weight")


@dataclass(frozen=True)
class RescaledUpdate(DecomposedUpdate):
    """A DoRA on its base model: W' = factor (W + D), where `magnitude` is the factor of each output as `by_output` has it."""

    bias: Tensor

    def to(self, device: torch.device) -> RescaledUpdate:
        return RescaledUpdate(self.change.to(device), self.magnitude.to(device), self.bias.to(device))

    def act(self, output: Tensor, product: Product) -> Tensor:
        return (self.magnitude - 1.0) * (output - self.bias) + self.magnitude * product(self.change.delta())


def on_base(update: LayerUpdate, weight: Tensor, bias: Tensor | None) -> LayerUpdate:
    """The same change, ready for `act` on a layer with this weight and bias, neither of which it needs then."""
    if isinstance(update, RotationUpdate):
        return RotationUpdate({**update.tensors, "bias": by_output(bias, weight)}, update.alpha)
    if not isinstance(update, DecomposedUpdate):
        return update
    if not update.is_by_output:
        return WholeUpdate({"diff": update.delta(weight)})
    divided_by = weight.float()
    if not update.of_base:
        divided_by = divided_by + update.change.delta(weight).reshape(weight.shape)
    factor = update.magnitude.float().flatten() / divided_by.flatten(1).norm(dim=1).clamp_min(TINY)
    return RescaledUpdate(update.change, by_output(factor, weight), by_output(bias, weight))


def by_output(values: Tensor | None, weight: Tensor) -> Tensor:
    """A value for each output, 0 without: `[out]` of a linear layer, `[out, 1, 1]` of a convolution."""
    found = torch.zeros(len(weight)) if values is None else values.float()
    return found.view(-1, *[1] * (weight.ndim - 2))


@dataclass(frozen=True)
class RowsUpdate(ChangeOfAnother):
    """Some rows of another change, as where a file has one for a fused layer. `swapped`: their halves change places."""

    begin: int
    end: int
    swapped: bool = False

    @property
    def algorithm(self) -> str:
        return self.change.algorithm

    @property
    def title(self) -> str:
        return self.change.title

    @property
    def needs_weight(self) -> bool:
        return self.change.needs_weight

    @property
    def finite(self) -> bool:
        return self.change.finite

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.end - self.begin, *self.change.weight_shape[1:])

    @property
    def norm(self) -> float:
        return float(self.delta().norm())

    def delta(self, weight: Tensor | None = None) -> Tensor:
        rows = self.change.delta()[self.begin : self.end]
        return torch.cat([*reversed(rows.chunk(2))]) if self.swapped else rows

    def rounded(self, dtype: torch.dtype) -> WholeUpdate:
        return WholeUpdate({"diff": self.delta().detach().cpu().to(dtype).contiguous()})

    def parts(self) -> Mapping[str, Tensor]:
        return {"diff": self.delta()}

    def to(self, device: torch.device) -> RowsUpdate:
        return replace(self, change=self.change.to(device))

    def act(self, output: Tensor, product: Product) -> Tensor:
        return product(self.delta())


def rows_of(update: LayerUpdate, begin: int, end: int, swapped: bool) -> LayerUpdate:
    """The change of some rows of a layer. Raises ValueError where it depends on others.

    So does a DoRA by inputs, whose norms are of all rows, and an OFT whose blocks lie across the edges.
    """
    if isinstance(update, RotationUpdate):
        if swapped or begin % update.rank or end % update.rank:
            raise ValueError("an OFT whose blocks lie across the parts of a fused layer cannot be divided")
        own = update.tensors["oft_blocks"][begin // update.rank : end // update.rank]
        return RotationUpdate(
            {"oft_blocks": own}, update.alpha and update.alpha * update.weight_shape[0] / (end - begin)
        )
    if not isinstance(update, DecomposedUpdate):
        return RowsUpdate(update, begin, end, swapped)
    if not update.is_by_output:
        raise ValueError("a DoRA with a magnitude for each input cannot be divided among the parts of a fused layer")
    magnitude = update.magnitude[begin:end]
    turned = torch.cat([*reversed(magnitude.chunk(2))]) if swapped else magnitude
    return replace(update, change=RowsUpdate(update.change, begin, end, swapped), magnitude=turned)


def have_same_parameters(one: LayerUpdate, other: LayerUpdate) -> bool:
    """Whether two changes have the same kind and alpha, and tensors of the same names and shapes."""
    if type(one) is not type(other) or one.alpha != other.alpha:
        return False
    if isinstance(one, DecomposedUpdate) and isinstance(other, DecomposedUpdate):
        same = one.of_base == other.of_base and one.magnitude.shape == other.magnitude.shape
        return same and have_same_parameters(one.change, other.change)
    if isinstance(one, RowsUpdate) and isinstance(other, RowsUpdate):
        same = (one.begin, one.end, one.swapped) == (other.begin, other.end, other.swapped)
        return same and have_same_parameters(one.change, other.change)
    shapes = [{name: each.shape for name, each in update.parts().items()} for update in (one, other)]
    return shapes[0] == shapes[1]


def mean_of(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean of tensors of one shape in fp32, computed in float64; shares sum to 1."""
    return torch.stack([each.double() * share for each, share in zip(tensors, shares, strict=True)]).sum(0).float()


def mean_of_parameters(updates: Sequence[LayerUpdate], shares: Sequence[float]) -> LayerUpdate:
    """The change whose tensors, in fp32, are the mean of those of `updates`, which have the same parameters; shares sum to 1."""
    first = updates[0]
    if isinstance(first, DecomposedUpdate | RowsUpdate):
        same = [each for each in updates if isinstance(each, DecomposedUpdate | RowsUpdate)]
        whole = replace(first, change=mean_of_parameters([each.change for each in same], shares))
        magnitudes = [each.magnitude for each in same if isinstance(each, DecomposedUpdate)]
        return replace(whole, magnitude=mean_of(magnitudes, shares)) if isinstance(whole, DecomposedUpdate) else whole
    parts = [update.parts() for update in updates]
    means = {name: mean_of([each[name] for each in parts], shares) for name in parts[0] if name != "alpha"}
    if isinstance(first, LoraPair):
        return LoraPair(means["lora_down.weight"], means["lora_up.weight"], first.alpha)
    return replace(cast("FactorUpdate", first), tensors=means)


KINDS: Mapping[str, type[FactorUpdate]] = {  # by the beginning of the ends of a file's names
    "lokr_": KroneckerUpdate,
    "hada_": HadamardUpdate,
    "oft_": RotationUpdate,
    "diff": WholeUpdate,
}


def update_of(tensors: Mapping[str, Tensor], alpha: float | None) -> FactorUpdate:
    """The change of one layer's tensors. Raises ValueError for an incomplete or mixed set, and wrong shapes."""
    kinds = {kind for beginning, kind in KINDS.items() if any(name.startswith(beginning) for name in tensors)}
    if len(kinds) != 1:
        raise ValueError(f"{', '.join(sorted(tensors))} are of several kinds")
    kind = kinds.pop()
    update = kind(tensors, alpha)
    if any(0 in each.shape for each in tensors.values()):
        raise ValueError("it is empty")
    if unpaired := _needed(kind, tensors) ^ set(tensors):
        raise ValueError(f"{kind.title} does not fit together ({', '.join(sorted(unpaired))})")
    try:
        shapes_fit = update.rank > 0 and min(update.weight_shape) > 0
        # Computed without values: torch compares the shapes.
        with torch.device("meta"):
            shapes = {name: torch.empty(each.shape) for name, each in tensors.items()}
        replace(update, tensors=shapes, alpha=None).delta(torch.empty(update.weight_shape[0], 1, device="meta"))
    except (RuntimeError, IndexError, TypeError, ValueError):
        shapes_fit = False
    if not shapes_fit:
        shapes_shown = ", ".join(f"{name} {list(each.shape)}" for name, each in sorted(tensors.items()))
        raise ValueError(f"its shapes do not fit ({shapes_shown})")
    return update


def _needed(kind: type[FactorUpdate], tensors: Mapping[str, Tensor]) -> set[str]:
    """The names that a set with these has when it is complete."""
    if kind in (WholeUpdate, RotationUpdate):
        return {kind.scaled}
    if kind is HadamardUpdate:
        cores = {"hada_t1", "hada_t2"} if {"hada_t1", "hada_t2"} & set(tensors) else set()
        return {f"hada_w{number}_{half}" for number in (1, 2) for half in "ab"} | cores
    names = set[str]()
    for number in (1, 2):
        whole, core = f"lokr_w{number}", f"lokr_t{number}"
        names |= {whole} if whole in tensors else {f"{whole}_a", f"{whole}_b"} | ({core} & set(tensors))
    return names


def changes_nothing(update: LayerUpdate) -> bool:
    """Whether a factor is zero, so that the product is; a DoRA's magnitude may change the weight all the same."""
    if isinstance(update, LoraPair):
        return not (bool(update.up.any()) and bool(update.down.any()))
    return not isinstance(update, DecomposedUpdate) and update.norm == 0.0


def to_lora(updates: Sequence[LayerUpdate]) -> str:
    """The command that writes a file with these changes as a LoRA; DoRA and OFT depend on the base model's weights."""
    model = " --model BASE" if any(update.needs_weight for update in updates) else ""
    return f"lora-trainer convert IN OUT --to lora --rank N{model}"


def titles(updates: Sequence[LayerUpdate]) -> str:
    """`LoKr`, or `DoRA and LoRA`: the kinds of a file's changes."""
    return " and ".join(sorted({update.title for update in updates}))
