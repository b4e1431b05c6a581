"""Names of the original layout: how a family's first code, ComfyUI and kohya's scripts call what diffusers calls otherwise.

A layout is a table of rules. Each pairs a module of diffusers with the whole or a part of a module of the original:
there one fused layer may hold what diffusers keeps in several. The same table reads single-file checkpoints and
writes LoRA files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rule:
    """One module. `{}` stands for a number, the same ones in the same order on both sides.

    The original's rows are divided by `shares`, in their order; this module is share `part`. `(1, 1, 1)` is a fused
    qkv. `swapped`: the original keeps the two halves of the rows the other way round (scale and shift of a norm).
    """

    ours: str  # `transformer_blocks.{}.attn.to_k`
    original: str  # `double_blocks.{}.img_attn.qkv`
    part: int = 0
    shares: tuple[int, ...] = (1,)
    swapped: bool = False


Layout = tuple[Rule, ...]


def fused(original: str, *ours: str, shares: tuple[int, ...] = ()) -> Layout:
    """The rules of one fused layer: `fused("blocks.{}.qkv", "blocks.{}.to_q", …)`; equal shares unless given."""
    sizes = shares or (1,) * len(ours)
    return tuple(Rule(name, original, part, sizes) for part, name in enumerate(ours))


@dataclass(frozen=True)
class Names:
    """How LoRA files call the modules of one family.

    `denoiser` is the component's name in diffusers' form; `prefixes` begin each component's keys in kohya's.
    """

    family: str
    denoiser: str  # `unet` or `transformer`
    prefixes: Mapping[str, str]
    layout: Layout = field(default=(), repr=False)
