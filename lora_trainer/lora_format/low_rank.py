"""The arithmetic of the tools for LoRA files: sums of low-rank updates, and the best update of a lower rank.

The best rank-r approximation of an update in the Frobenius norm is its first r singular directions (Eckart and Young 1936).
Of up @ down they are those of a core that is as small as the rank, between the Q factors of both: no layer's full
matrix is formed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_trainer.lora_format.kinds.lora import LoraPair

EXACT_SIDE = 384  # matrices up to this side, or of little more than the wanted rank, are decomposed exactly
OVERSAMPLING, POWER_ITERATIONS = 24, 6  # of the randomized decomposition
SEED = 0  # of its draws, so that the same files give the same LoRA


@dataclass(frozen=True)
class RankLimits:
    """How many singular directions of a layer stay: each limit that is set gives a number, and the smallest counts; at least 1.

    `rank` is the most. `energy` is the share of the sum of squares of the singular values, `frobenius` the share of its
    square root (energy = frobenius²), and `ratio` the largest singular value over the smallest that stays.
    """

    rank: int | None = None
    energy: float | None = None
    frobenius: float | None = None
    ratio: float | None = None

    def count(self, values: Tensor, total: float | None = None) -> int:
        """How many of the singular values [n], largest first, stay; `total` is the sum of squares of all, if these are some."""
        squares = values.double().square()
        whole = float(squares.sum()) if total is None else total
        if whole <= 0.0:
            return 1
        wanted = len(values)
        share = max(self.energy or 0.0, (self.frobenius or 0.0) ** 2)
        if share > 0.0:
            reached = squares.cumsum(0) >= share * whole * (1 - 1e-12)
            wanted = min(wanted, int(reached.int().argmax()) + 1 if bool(reached.any()) else wanted)
        if self.ratio is not None:
            wanted = min(wanted, int((values >= values[0] / self.ratio).sum()))
        return max(1, min(wanted, self.rank or wanted))


@dataclass(frozen=True)
class LayerRow:
    """What became of one layer: its ranks, the share of its norm that was kept, and the error as a share of the norm.

    `norm` is the Frobenius norm of its change, 0 where it was not computed.
    """

    name: str
    rank_before: int
    rank: int
    kept: float = 1.0
    error: float = 0.0
    norm: float = 0.0


def below_share(layers: Sequence[LayerRow], keep: RankLimits) -> tuple[str, ...]:
    """A note on the layers that keep less of their norm than `energy` or `frobenius` asks for, since another limit is lower."""
    share = max(math.sqrt(keep.energy or 0.0), keep.frobenius or 0.0)
    count = sum(layer.kept < share - 1e-6 for layer in layers)
    if not count:
        return ()
    return (f"{count} of {len(layers)} layers keep less than {share:.2%} of their norm: --rank or --ratio limits them",)


def sharing(modules: Mapping[str, LoraPair]) -> list[list[str]]:
    """The modules whose pairs have one down projection in common, as in a LoRA that was trained on a fused layer.

    Each module is in one group. Groups keep sharing: a fused layer of the original code would have a multiple of the rank otherwise.
    """
    groups: dict[tuple[str, bytes], list[str]] = {}
    for name, pair in modules.items():
        content = pair.down.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        key = f"{name.partition('.')[0]} {pair.down.dtype} {list(pair.down.shape)}"
        groups.setdefault((key, hashlib.sha256(content.tobytes()).digest()), []).append(name)
    return list(groups.values())


def scale_updates(modules: Mapping[str, LoraPair], weight: float = 1.0) -> dict[str, LoraPair]:
    """The updates times `weight` in fp32, with alpha = rank.

    A power of two moves between the halves, so that both have numbers of the same size and fp16 rounds neither more.
    """
    found: dict[str, LoraPair] = {}
    for group in sharing(modules):
        ups = {name: modules[name].up.float() * (modules[name].scale * weight) for name in group}
        down = modules[group[0]].down.float()
        found |= _balanced(ups, down)
    return {name: found[name] for name in modules}


def _balanced(ups: Mapping[str, Tensor], down: Tensor) -> dict[str, LoraPair]:
    """Pairs of one down projection; multiplied by a power of two, which rounds nothing."""
    largest, other = max((float(up.abs().max()) for up in ups.values()), default=0.0), float(down.abs().max())
    shift = 0
    if 0.0 < largest < math.inf and 0.0 < other < math.inf:
        shift = round((math.log2(other) - math.log2(largest)) / 2)
    down = down * 2.0**-shift
    return {name: LoraPair(down, up * 2.0**shift, float(len(down))) for name, up in ups.items()}


def join_pairs(pairs: Sequence[LoraPair]) -> LoraPair:
    """The sum of updates of one module, exactly: downs below each other, ups beside each other; the ranks add up.

    The pairs have alpha = rank, as `scale_updates` gives them.
    """
    down, up = torch.cat([pair.down for pair in pairs]), torch.cat([pair.up for pair in pairs], dim=1)
    return LoraPair(down, up, float(len(down)))


def compress(pairs: Mapping[str, LoraPair], keep: RankLimits) -> tuple[dict[str, LoraPair], LayerRow]:
    """The best pairs of a lower rank of modules that share their down projection, which they keep sharing.

    The module names' first stands for the group in the returned row. Computed in float64.
    """
    first = next(iter(pairs.values()))
    down = first.down.double().flatten(1)  # [r, in]
    rows = [pair.up.double().flatten(1) * pair.scale for pair in pairs.values()]
    of_up, of_down = torch.linalg.qr(torch.cat(rows)), torch.linalg.qr(down.T.contiguous())
    left, values, right = torch.linalg.svd(of_up.R @ of_down.R.T, full_matrices=False)
    rank = keep.count(values)
    up, new_down = of_up.Q @ left[:, :rank], right[:rank] @ of_down.Q.T
    found = dict(zip(pairs, _split(up, new_down, values[:rank], [len(each) for each in rows], first), strict=True))
    total = float(values.square().sum())
    lost = float(values[rank:].square().sum()) / total if total else 0.0
    return found, LayerRow(next(iter(pairs)), first.rank, rank, math.sqrt(max(0.0, 1.0 - lost)), math.sqrt(lost))


def _split(up: Tensor, down: Tensor, values: Tensor, rows: Iterable[int], like: LoraPair) -> list[LoraPair]:
    """Pairs of one down projection: up [sum of rows, r], down [r, in], singular values [r], in the shapes of `like`."""
    roots = values.clamp(min=0.0).sqrt()
    shared = (roots[:, None] * down).float().reshape(len(down), *like.down.shape[1:]).contiguous()
    ending = [1] * (like.up.ndim - 2)
    return [
        LoraPair(shared, part.float().reshape(len(part), -1, *ending).contiguous(), float(len(shared)))
        for part in (up * roots).split(list(rows))
    ]


def factor(
    change: Tensor, keep: RankLimits, most: int, clamp_quantile: float | None = None
) -> tuple[LoraPair, float, float]:
    """The pair of the first singular directions of a layer's whole change, the share of its norm that they hold, and the error.

    `change` is `[out, in]` or `[out, in, k, k]`, in fp32; `most` is the highest rank that is computed. With
    `clamp_quantile` numbers beyond that quantile are cut off, as sd-scripts' extraction does.
    """
    matrix = change.flatten(1)
    left, values, right = principal(matrix, min(most, *matrix.shape))
    total = float(matrix.double().square().sum())
    rank = keep.count(values, total)
    up, down = left[:, :rank] * values[:rank], right[:rank]
    if clamp_quantile is not None:
        both = torch.cat([up.flatten(), down.flatten()]).sort().values
        limit = float(both[min(len(both) - 1, int(clamp_quantile * len(both)))])
        up, down = up.clamp(-limit, limit), down.clamp(-limit, limit)
    ending = [1] * (change.ndim - 2)
    pair = LoraPair(down.reshape(rank, *change.shape[1:]).contiguous(), up.reshape(len(up), rank, *ending), float(rank))
    balanced = _balanced({"": pair.up.contiguous()}, pair.down)[""]
    lost = float((matrix - up @ down).double().square().sum()) / total if total else 0.0
    kept = float(values[:rank].double().square().sum()) / total if total else 1.0
    return balanced, math.sqrt(min(1.0, kept)), math.sqrt(lost)


def principal(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first `rank` singular vectors and values of a matrix [m, n]: [m, r], [r], [r, n].

    Large matrices by a randomized range with power iterations (Halko, Martinsson and Tropp 2011, algorithm 4.4), with draws
    of a generator of its own; others exactly.
    """
    short, width = min(matrix.shape), rank + OVERSAMPLING
    if short <= EXACT_SIDE or 2 * width >= short:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, :rank], values[:rank], right[:rank]
    generator = torch.Generator().manual_seed(SEED)
    base = torch.linalg.qr(matrix @ torch.randn(matrix.shape[1], width, generator=generator)).Q
    for _ in range(POWER_ITERATIONS):
        base = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ base).Q).Q
    left, values, right = torch.linalg.svd(base.T @ matrix, full_matrices=False)
    return (base @ left)[:, :rank], values[:rank], right[:rank]
