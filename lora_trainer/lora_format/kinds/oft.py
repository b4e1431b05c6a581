"""OFT: W' = R W, a rotation of the outputs in blocks (arXiv:2306.07280), as LyCORIS' `diag-oft` and ComfyUI have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_trainer.lora_format.layer_updates import (
    NO_FACTORS,
    NO_PROJECTIONS,
    TINY,
    FactorUpdate,
    Kind,
    KindFacts,
    LayerUpdate,
    Network,
    by_output,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lora_trainer.lora_format.layer_updates import Product

BLOCKS = "oft_blocks"
SD_SCRIPTS = Network("oft_unet", "sd-scripts' OFT", "sd-scripts", "networks.oft")


class RotationUpdate(FactorUpdate):
    """`oft_blocks` are A `[out / b, b, b]`, with Q = A - A^T and R^T = (I + Q) (I - Q)^-1 (Cayley).

    alpha is a bound on |Q| for each output, 0 for none. The inputs are not known, so `weight_shape` is `[out]`.
    """

    algorithm, title, scaled = "diag-oft", "OFT", BLOCKS
    needs_weight = True
    scale = 1.0

    @property
    def blocks(self) -> Tensor:
        return self.tensors[BLOCKS]

    @property
    def rank(self) -> int:
        return self.blocks.shape[1]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.blocks.shape[0] * self.blocks.shape[1],)

    @property
    def norm(self) -> float:
        """Of R - I: the rest depends on the base model."""
        import torch

        return float((rotation(self.blocks.float(), self.alpha) - torch.eye(self.rank)).norm())

    def delta(self, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            raise ValueError("the change of an OFT depends on the base model's weight")
        before = weight.float()
        if len(self.blocks) * self.rank != len(before):
            raise ValueError(f"{len(self.blocks)} blocks of {self.rank} do not fit {len(before)} rows")
        turned = rotated(before.flatten(1).T, rotation(self.blocks.float(), self.alpha))
        return turned.T.reshape(before.shape) - before

    def rounded(self, dtype: torch.dtype) -> RotationUpdate:
        """In fp32: fp16 has no place for small angles."""
        return RotationUpdate({BLOCKS: self.blocks.detach().float().cpu().contiguous()}, self.alpha)

    def on_base(self, weight: Tensor, bias: Tensor | None) -> RotationUpdate:
        return RotationUpdate({**self.tensors, "bias": by_output(bias, weight)}, self.alpha)

    def act(self, output: Tensor, product: Product) -> Tensor:
        bias = self.tensors["bias"]
        bare = output.float() - bias
        last = bare if bias.ndim == 1 else bare.movedim(1, -1)
        change = rotated(last, rotation(self.blocks.float(), self.alpha)) - last
        return change if bias.ndim == 1 else change.movedim(-1, 1)

    def rows(self, begin: int, end: int, swapped: bool) -> LayerUpdate:
        """Raises ValueError where blocks lie across the edges."""
        if swapped or begin % self.rank or end % self.rank:
            raise ValueError("an OFT whose blocks lie across the parts of a fused layer cannot be divided")
        own = self.blocks[begin // self.rank : end // self.rank]
        return RotationUpdate({BLOCKS: own}, self.alpha and self.alpha * self.weight_shape[0] / (end - begin))

    @classmethod
    def check_alpha(cls, name: str, alpha: float | None) -> None:
        if name.startswith(f"{SD_SCRIPTS.prefix}_") and alpha == 0.0:
            raise ValueError("by an alpha of 0 sd-scripts' OFT turns nothing, where LyCORIS' has no bound")


def rotation(blocks: Tensor, bound: float | None = None) -> Tensor:
    """The blocks `[n, b, b]` of R^T, by the Cayley transform of their skew-symmetric parts; see `RotationUpdate`."""
    import torch

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
    import torch

    count, size, _ = blocks.shape
    turned: Tensor = torch.einsum("knm,...kn->...km", blocks, x.unflatten(-1, (count, size)))
    return turned.flatten(-2)


KIND = Kind(
    update=RotationUpdate,
    parts=(BLOCKS,),
    ends=BLOCKS,
    parameters="oft_",
    facts=KindFacts(
        title=RotationUpdate.title,
        readers="exact in LyCORIS, and in ComfyUI at strength 1",
        is_checked=True,
        ignores={
            **NO_PROJECTIONS,
            **dict.fromkeys(("alpha", "alpha_pattern", "use_rslora"), "a rotation has no scale"),
            **dict.fromkeys(("dropout", "dropout_pattern"), "it rotates outputs, and has no input of its own"),
            "timestep_min_rank": "its rank is the size of a block",
            **NO_FACTORS,
        },
    ),
    not_extracted="an OFT rotates the outputs of a layer, and the change of a trained model is no rotation",
    network=SD_SCRIPTS,
    comfyui=("whole", "exact at strength 1; it counts other strengths twice"),
    unread={
        ".oft_R": "OFT as peft rotates it, by inputs,",
        ".oft_blocks.": "OFT with blocks of their own for the parts of a fused layer (sd-scripts' networks.oft_flux)",
    },
)
