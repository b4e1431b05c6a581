"""LoRA on fused layers: join the pairs of separate diffusers layers into one pair, and split it again, both exactly.

Parts with their own down projections are block-diagonal: down `[sum of ranks, in]`, up with zeros outside of each
part's rows and columns. A pair that was trained on the fused layer shares its down projection among all parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.layer_updates import LayerUpdate, swap_halves

if TYPE_CHECKING:
    from lora_trainer.lora_format.layouts import Rule


def join(parts: Mapping[int, LoraPair], rules: Sequence[Rule]) -> LoraPair:
    """One pair of the fused layer of the pairs of its parts; parts without a pair get rows of zeros.

    Raises ValueError when the parts' sizes do not match the layer's shares.
    """
    shares = rules[0].shares
    first = next(iter(parts))
    unit = parts[first].up.shape[0] // shares[first]
    if any(pair.up.shape[0] != unit * shares[part] or pair.down.ndim != 2 for part, pair in parts.items()):
        raise ValueError("the parts' sizes do not match the shares of the fused layer")
    swapped = {rule.part: rule.swapped for rule in rules}
    scale = Counter(pair.scale for pair in parts.values()).most_common(1)[0][0]
    ups = {}
    for part, pair in parts.items():
        up = pair.up if pair.scale == scale else (pair.up.double() * (pair.scale / scale)).to(pair.up.dtype)
        ups[part] = swap_halves(up, swapped[part])
    pairs = list(parts.values())
    shared = len(pairs) > 1 and all(
        pair.down.shape == pairs[0].down.shape and torch.equal(pair.down, pairs[0].down) for pair in pairs[1:]
    )
    ranks = {part: 0 if shared else pair.rank for part, pair in parts.items()}
    down = pairs[0].down if shared else torch.cat([parts[part].down for part in sorted(parts)])
    dtype = reduce(torch.promote_types, (up.dtype for up in ups.values()))
    up = torch.zeros(unit * sum(shares), down.shape[0], dtype=dtype)
    edges = [0, *accumulate(unit * share for share in shares)]
    column = 0
    for part in sorted(parts):
        width = up.shape[1] if shared else ranks[part]
        up[edges[part] : edges[part + 1], column : column + width] = ups[part]
        column += ranks[part]
    same = all(pair.scale == scale for pair in pairs)
    alpha = (pairs[0].alpha if shared else sum(pair.alpha for pair in pairs)) if same else scale * down.shape[0]
    return LoraPair(down, up, float(alpha))


def split(pair: LoraPair, rules: Sequence[Rule], ranks: Sequence[int] | None = None) -> dict[int, LoraPair]:
    """The pairs of a fused layer's parts. `ranks` are those in the file's header, 0 for parts without a pair.

    Where the columns of up belong to one part each, a part gets its own rows of down; else all share them.
    Raises ValueError when the layer's rows cannot be divided.
    """
    shares = rules[0].shares
    rows = pair.up.shape[0]
    if rows % sum(shares) or pair.down.ndim != 2:
        raise ValueError(f"{rows} rows cannot be divided as {':'.join(map(str, shares))}")
    unit = rows // sum(shares)
    edges = [0, *accumulate(unit * share for share in shares)]
    blocks = [pair.up[begin:end] for begin, end in pairwise(edges)]
    spans = _spans([(block != 0).any(dim=0) for block in blocks], ranks)
    found = {}
    for rule in rules:
        block = blocks[rule.part]
        if spans is None:
            found[rule.part] = LoraPair(pair.down, swap_halves(block, rule.swapped), pair.alpha)
        elif rule.part in spans:
            begin, end = spans[rule.part]
            up = swap_halves(block[:, begin:end], rule.swapped)
            found[rule.part] = LoraPair(pair.down[begin:end], up, pair.alpha * (end - begin) / pair.rank)
    return found


def divide(update: LayerUpdate, rules: Sequence[Rule], ranks: Sequence[int] | None = None) -> dict[int, LayerUpdate]:
    """The changes of the parts of an original's layer, whichever their kind; of others than pairs each has its rows.

    Raises ValueError when the layer's rows cannot be divided.
    """
    is_whole = len(rules) == 1 and not rules[0].swapped
    if isinstance(update, LoraPair):
        return {0: turned(update, rules[0])} if is_whole else dict(split(update, rules, ranks))
    rows, *columns = update.weight_shape
    if is_whole:
        is_turned = rules[0].last_swapped and [rows] == [2 * each for each in columns]
        return {0: update.rows(0, rows, True) if is_turned else update}
    shares = rules[0].shares
    if rows % sum(shares) or len(columns) > 1:
        raise ValueError(f"{rows} rows cannot be divided as {':'.join(map(str, shares))}")
    edges = [0, *accumulate(rows // sum(shares) * share for share in shares)]
    return {rule.part: update.rows(edges[rule.part], edges[rule.part + 1], rule.swapped) for rule in rules}


def turned(pair: LoraPair, rule: Rule) -> LoraPair:
    """The pair of a layer that is not fused in the original, with the halves of the last block's norm swapped."""
    last = pair.down.ndim == 2 and pair.up.shape[0] == 2 * pair.down.shape[1]
    return LoraPair(pair.down, swap_halves(pair.up, True), pair.alpha) if rule.last_swapped and last else pair


def ranks_for_header(parts: Mapping[int, LoraPair], joined: LoraPair, rules: Sequence[Rule]) -> list[int] | None:
    """The ranks that the header must hold, where the tensors do not show them; else None."""
    back = split(joined, rules)
    if {part: pair.rank for part, pair in back.items()} == {part: pair.rank for part, pair in parts.items()}:
        return None
    ranks = [parts[part].rank if part in parts else 0 for part in range(len(rules[0].shares))]
    return ranks if sum(ranks) == joined.rank else None


def _spans(used: Sequence[Tensor], ranks: Sequence[int] | None) -> dict[int, tuple[int, int]] | None:
    """First and last but one column of each part that has any of its own; None where parts share columns."""
    columns = used[0].shape[0]
    taken = [part for part, mask in enumerate(used) if bool(mask.any())]
    if not taken or int(torch.stack(list(used)).sum(dim=0).max()) > 1:
        ranks_fit = ranks is not None and sum(ranks) == columns and not taken
        return _by_widths(dict(enumerate(ranks)), used) if ranks_fit and ranks is not None else None
    candidates = [dict(enumerate(ranks))] if ranks is not None and len(ranks) == len(used) else []
    candidates += [
        dict.fromkeys(parts, columns // len(parts)) for parts in (taken, range(len(used))) if columns % len(parts) == 0
    ]
    first = [int(used[part].nonzero()[0]) for part in taken]
    if first == sorted(first):  # each begins where its first column is, the first one at the beginning
        edges = [0, *first[1:], columns]
        candidates.append({part: end - begin for part, (begin, end) in zip(taken, pairwise(edges), strict=True)})
    return next((spans for widths in candidates if (spans := _by_widths(widths, used)) is not None), None)


def _by_widths(widths: Mapping[int, int], used: Sequence[Tensor]) -> dict[int, tuple[int, int]] | None:
    """Neighboring columns of these widths, if they fill the layer and no part uses others."""
    edges = [0, *accumulate(widths.values())]
    spans = {part: span for part, span in zip(widths, pairwise(edges), strict=True) if span[0] < span[1]}
    if edges[-1] != used[0].shape[0]:
        return None
    for part, mask in enumerate(used):
        begin, end = spans.get(part, (0, 0))
        if bool(mask[:begin].any()) or bool(mask[end:].any()):
            return None
    return spans
