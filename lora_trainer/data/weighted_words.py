"""Weighted words in a caption, written as the AUTOMATIC1111 web UI reads them.

    (word)       1.1 times          ((word))    1.21 times
    (word:1.3)   1.3 times          [word]      1 / 1.1 times
    \\( \\) \\[ \\] \\\\   the character itself

Weights of brackets that stand in each other are multiplied. A bracket that is never closed
weighs all that follows; one that closes nothing stands for itself.
"""

from __future__ import annotations

import re

ROUND, SQUARE = 1.1, 1 / 1.1
Pieces = tuple[tuple[str, float], ...]  # text and weight, in order

_PARTS = re.compile(
    r"\\(?P<escaped>[()\[\]\\])"
    r"|:\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\s*\)"
    r"|(?P<bracket>[()\[\]])"
    r"|(?P<text>[^()\[\]:\\]+|[:\\])"
)


def read_pieces(text: str) -> Pieces:
    """The text in pieces of one weight each; pieces of equal weight beside each other are one."""
    pieces: list[tuple[str, float]] = []
    opened: list[tuple[str, int]] = []  # bracket, and the piece that it opens before

    def close(bracket: str, weight: float) -> bool:
        """Weigh what stands since the last such bracket. False when none is open."""
        place = next((index for index in reversed(range(len(opened))) if opened[index][0] == bracket), None)
        if place is None:
            return False
        _, first = opened.pop(place)
        pieces[first:] = [(part, each * weight) for part, each in pieces[first:]]
        return True

    for found in _PARTS.finditer(text):
        bracket, weight = found["bracket"], found["weight"]
        if found["escaped"]:
            pieces.append((found["escaped"], 1.0))
            continue
        if bracket in ("(", "["):
            opened.append((bracket, len(pieces)))
            continue
        closed = (
            (weight is not None and close("(", float(weight)))
            or (bracket == ")" and close("(", ROUND))
            or (bracket == "]" and close("[", SQUARE))
        )
        if not closed:
            pieces.append((found[0], 1.0))
    while opened:
        bracket, _ = opened[-1]
        close(bracket, ROUND if bracket == "(" else SQUARE)
    return _merged(pieces)


def _merged(pieces: list[tuple[str, float]]) -> Pieces:
    merged: list[tuple[str, float]] = []
    for part, weight in pieces:
        if merged and merged[-1][1] == weight:
            merged[-1] = (merged[-1][0] + part, weight)
        else:
            merged.append((part, weight))
    return tuple(merged) or (("", 1.0),)


def plain(text: str) -> str:
    """The text without brackets and weights."""
    return "".join(part for part, _ in read_pieces(text))


def spoken(text: str) -> str | Pieces:
    """What the text encoder is asked for: pieces, or plain text where no word weighs more or less than another."""
    pieces = read_pieces(text)
    return pieces if any(weight != 1.0 for _, weight in pieces) else "".join(part for part, _ in pieces)
