"""LoHa: the change is the entrywise product of two low-rank ones (arXiv:2108.06098). Names and formula as LyCORIS has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_trainer.lora_format.layer_updates import (
    NO_FACTORS,
    NO_PROJECTIONS,
    FactorUpdate,
    Kind,
    KindFacts,
    tucker_product,
)

if TYPE_CHECKING:
    from torch import Tensor


class HadamardUpdate(FactorUpdate):
    """delta = (w1_a w1_b) * (w2_a w2_b) * alpha / rank, entry by entry.

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
            tucker_product(
                self.tensors[f"hada_w{number}_a"].float(),
                self.tensors[f"hada_w{number}_b"].float(),
                self.tensors.get(f"hada_t{number}"),
            )
            for number in (1, 2)
        )
        return (one * two * self.scale).reshape(self.weight_shape)

    @classmethod
    def complete(cls, names: set[str]) -> set[str]:
        cores = {"hada_t1", "hada_t2"}
        factors = {f"hada_w{number}_{half}" for number in (1, 2) for half in "ab"}
        return factors | cores if cores & names else factors


KIND = Kind(
    update=HadamardUpdate,
    parts=("hada_",),
    ends=r"hada_(?:w[12]_[ab]|t[12])",
    parameters="hada_",
    counted_by=("hada_w1_a",),
    facts=KindFacts(
        title=HadamardUpdate.title,
        readers="exact in LyCORIS and ComfyUI",
        learning_rate="its best learning rate was 10 times a LoRA's in our measurements (docs/benchmarks.md)",
        is_checked=True,
        ignores={
            **NO_PROJECTIONS,
            "timestep_min_rank": "each sample would need a matrix of its own as large as the weight",
            **NO_FACTORS,
        },
    ),
    not_extracted="an entrywise product of two low-rank matrices has no known best approximation of a change",
)
