"""Names of the original layout: a family's first code, ComfyUI and kohya's scripts have other names than diffusers.

A layout is a table of rules. Each pairs a module of diffusers with the whole or a part of a module of the original:
there one fused layer may hold what diffusers keeps in several. The same table reads single-file checkpoints and
writes LoRA files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache


@dataclass(frozen=True)
class Rule:
    """One module. `{}` is a number, the same ones in the same order on both sides.

    The original's rows are divided by `shares`, in their order; this module is share `part`. `(1, 1, 1)` is a fused
    qkv. `swapped`: the original has the two halves of the rows in the other order (scale and shift of a norm).
    `last_swapped`: the same in the last block alone, whose layer outputs two such halves.
    """

    ours: str  # `transformer_blocks.{}.attn.to_k`
    original: str  # `double_blocks.{}.img_attn.qkv`
    part: int = 0
    shares: tuple[int, ...] = (1,)
    swapped: bool = False
    last_swapped: bool = False
    ratio: float | None = None  # rows of the original's layer to a column, where families with its name differ in it


Layout = tuple[Rule, ...]


def fused(original: str, *ours: str, shares: tuple[int, ...] = (), ratio: float | None = None) -> Layout:
    """The rules of one fused layer: `fused("blocks.{}.qkv", "blocks.{}.to_q", …)`; equal shares by default."""
    sizes = shares or (1,) * len(ours)
    return tuple(Rule(name, original, part, sizes, ratio=ratio) for part, name in enumerate(ours))


@dataclass(frozen=True)
class PublishedLayers:
    """The layers of a published model that have one name but for its numbers: the last of each number, and the shapes of their weights."""

    last: Sequence[int]
    shapes: Sequence[Sequence[int]]


PublishedModel = Mapping[str, PublishedLayers]  # by the names of diffusers with `{}` for each number


@dataclass(frozen=True)
class Names:
    """The names of one family's modules in LoRA files.

    `denoiser` is the component's name in diffusers' form; `prefixes` begin each component's keys in kohya's. `also` are
    names that are read and never written.
    """

    family: str
    denoiser: str  # `unet` or `transformer`
    prefixes: Mapping[str, str]
    layout: Layout = field(default=(), repr=False)
    also: Layout = field(default=(), repr=False)
    like: str = ""  # the family that is meant where names and shapes are of both
    published: Sequence[PublishedModel] = field(default=(), repr=False)  # the denoisers, where they are known


def rules_of_original(layout: Layout, name: str) -> tuple[tuple[Rule, ...], tuple[str, ...]] | None:
    """The rules of a module by the original's name, with dots or with underscores in their place, and its numbers.

    They are in the order of their parts. None when the layout has no such module.
    """
    return _rules(layout, "original", name)


def rules_of_ours(layout: Layout, name: str) -> str | None:
    """diffusers' name of a module, which may come with underscores in place of dots; None when there is none."""
    found = _rules(layout, "ours", name)
    return found and found[0][0].ours.format(*found[1])


def rule_of(layout: Layout, module: str) -> tuple[Rule, str] | None:
    """The rule of a module of diffusers and the original's name with its numbers; None when there is none."""
    found = _rules(layout, "ours", module, with_dots=True)
    return found and (found[0][0], found[0][0].original.format(*found[1]))


def _rules(
    layout: Layout, side: str, name: str, *, with_dots: bool = False
) -> tuple[tuple[Rule, ...], tuple[str, ...]] | None:
    for rules, pattern in _index(layout, side, with_dots or "." in name).get(_shape_of(name), ()):
        if match := pattern.fullmatch(name):
            return rules, match.groups()
    return None


_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


def split_numbers(name: str) -> tuple[str, list[int]]:
    """A module's name with `{}` for each number, `blocks.{}.to_out.{}`, and the numbers."""
    return _NUMBER.sub("{}", name), [int(number) for number in _NUMBER.findall(name)]


def _shape_of(name: str) -> str:
    return _NUMBER.sub("#", name).replace(".", "_")


@cache
def _index(layout: Layout, side: str, with_dots: bool) -> dict[str, list[tuple[tuple[Rule, ...], re.Pattern[str]]]]:
    """Rules by the form of a name; those of one fused layer together."""
    together: dict[str, list[Rule]] = {}
    for rule in layout:
        together.setdefault(getattr(rule, side), []).append(rule)
    found: dict[str, list[tuple[tuple[Rule, ...], re.Pattern[str]]]] = {}
    for name, rules in together.items():
        pattern = re.escape(name if with_dots else name.replace(".", "_")).replace(r"\{\}", r"(\d+)")
        shape = _shape_of(name.replace("{}", "0"))
        found.setdefault(shape, []).append((tuple(sorted(rules, key=lambda rule: rule.part)), re.compile(pattern)))
    return found
