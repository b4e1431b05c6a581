"""LoKr: the change is a Kronecker product (arXiv:2309.14859, section 4.2). Names and formula as LyCORIS has them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lora_trainer.lora_format.layer_updates import NO_PROJECTIONS, FactorUpdate, Kind, KindFacts, tucker_product

if TYPE_CHECKING:
    from torch import Tensor

TURNS = 12
GAIN = 1e-3  # what a turn must gain, as a share, for another one


class KroneckerUpdate(FactorUpdate):
    """delta = w1 (x) w2 * alpha / rank.

    w1 `[o1, i1]` and w2 `[o2, i2, …]` are whole or products: `_a [o, r]` @ `_b [r, i]`, w2 also with a core `lokr_t2
    [r, r, k, k]` between `_a [r, o2]` and `_b [r, i2]`. Of two whole ones alpha does not count.
    """

    algorithm, title, scaled = "lokr", "LoKr", "lokr_w1"

    @property
    def rank(self) -> int:
        inner = next((self.tensors[name] for name in ("lokr_w2_b", "lokr_w1_b") if name in self.tensors), None)
        return min(self.weight_shape[0], math.prod(self.weight_shape[1:])) if inner is None else inner.shape[0]

    @property
    def scale(self) -> float:
        is_whole = "lokr_w1" in self.tensors and "lokr_w2" in self.tensors
        return 1.0 if is_whole else super().scale

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
        return tucker_product(left, right, self.tensors.get(f"lokr_t{number}")).reshape(self._shape(number))

    def delta(self, weight: Tensor | None = None) -> Tensor:
        one, two = self.factor(1), self.factor(2)
        # torch 2.13 has no Kronecker product of the view that a core's product is.
        return one.reshape(*one.shape, *[1] * (two.ndim - 2)).kron(two.contiguous()) * self.scale

    @property
    def norm(self) -> float:
        return float(self.factor(1).norm() * self.factor(2).norm()) * abs(self.scale)

    @classmethod
    def complete(cls, names: set[str]) -> set[str]:
        found = set[str]()
        for whole, core in (("lokr_w1", "lokr_t1"), ("lokr_w2", "lokr_t2")):
            found |= {whole} if whole in names else {f"{whole}_a", f"{whole}_b"} | ({core} & names)
        return found


def nearest_kronecker(before: Tensor, change: Tensor, rank: int) -> KroneckerUpdate:
    """The LoKr w1 (x) w2 of a change `[out, in]` or `[out, in, k, k]`, whose sides are divided as in training.

    With each block of the change as a row of its own, a Kronecker product is a matrix of rank 1, so that the nearest one is the
    first singular direction (Van Loan and Pitsianis 1993). Where `rank` is less than half of w2's longer side, w2 is a product of
    that rank: for a w1 of norm 1 the best one is the SVD of its projection. w1 is then the best one for that w2, by turns, so that
    no turn makes the error larger. `before`, the weight, does not matter.
    """
    import torch

    from lora_trainer.lora_format.low_rank import principal

    out, inner, *kernel = change.shape
    (rows, own_rows), (columns, own_columns) = _divide(out), _divide(inner)
    blocks = change.reshape(rows, own_rows, columns, own_columns, -1).permute(0, 2, 1, 3, 4)
    blocks = blocks.reshape(rows * columns, -1)  # [o1 i1, o2 i2 k k]
    left, values, right = principal(blocks, 1)
    one = left[:, 0]
    if rank >= max(own_rows, own_columns) / 2:
        root = values[0].sqrt()
        whole = (right[0] * root).reshape(own_rows, own_columns, *kernel)
        return KroneckerUpdate({"lokr_w1": (one * root).reshape(rows, columns), "lokr_w2": whole}, float(rank))
    size = 0.0
    for turn in range(TURNS):
        two = (one @ blocks).reshape(own_rows, -1)
        up, roots, down = principal(two, min(rank, *two.shape))
        gained, size = float(roots.norm()) > size * (1 + GAIN), float(roots.norm())
        if not gained or turn == TURNS - 1:
            break
        one = torch.nn.functional.normalize(blocks @ ((up * roots) @ down).flatten(), dim=0)
    share = float(roots[0]) ** (1 / 3)  # three factors with numbers of about the same size
    tensors = {
        "lokr_w1": (one * share).reshape(rows, columns),
        "lokr_w2_a": up * roots.sqrt() / share**0.5,
        "lokr_w2_b": roots.sqrt()[:, None] * down / share**0.5,
    }
    return KroneckerUpdate(tensors, float(len(roots)))


def _divide(side: int) -> tuple[int, int]:
    """The two factors of a number that are nearest to its square root, the smaller one first."""
    smaller = next(each for each in range(math.isqrt(side), 0, -1) if side % each == 0)
    return smaller, side // smaller


KIND = Kind(
    update=KroneckerUpdate,
    parts=("lokr_",),
    ends=r"lokr_(?:w[12](?:_[ab])?|t[12])",
    parameters="lokr_",
    counted_by=("lokr_w1", "lokr_w1_a"),
    facts=KindFacts(
        title=KroneckerUpdate.title,
        readers="exact in LyCORIS and ComfyUI",
        learning_rate="its best learning rate was 10 times a LoRA's in our measurements (docs/benchmarks.md)",
        diffusers_entry="diffusers: LoKr",
        is_checked=True,
        ignores={**NO_PROJECTIONS, "timestep_min_rank": "a whole w2 has no rows that could be left out"},
    ),
    nearest=nearest_kronecker,
)
