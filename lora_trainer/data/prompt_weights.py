"""Prompt weighting in a caption, written as the AUTOMATIC1111 web UI reads it.

    (word)       1.1 times          ((word))    1.21 times
    (word:1.3)   1.3 times          [word]      1 / 1.1 times
    \\( \\) \\[ \\] \\\\   the character itself

Weights of nested brackets are multiplied. A bracket that is never closed weighs all that follows; one
that closes nothing is an ordinary character.
"""

from __future__ import annotations

import re

ROUND, SQUARE = 1.1, 1 / 1.1
WeightedText = tuple[tuple[str, float], ...]  # text and weight, in order

_PARTS = re.compile(
    r"\\(?P<escaped>[()\[\]\\])"
    r"|:\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\s*\)"
    r"|(?P<bracket>[()\[\]])"
    r"|(?P<text>[^()\[\]:\\]+|[:\\])"
)


def parse_weights(text: str) -> WeightedText:
    """The text in parts of one weight each; neighbors of equal weight are merged."""
    parts: list[tuple[str, float]] = []
    opened: list[tuple[str, int]] = []  # bracket, and the piece that it opens before

    def close(bracket: str, weight: float) -> bool:
        """Weigh all text since the last such bracket. False when none is open."""
        place = next((index for index in reversed(range(len(opened))) if opened[index][0] == bracket), None)
        if place is None:
            return False
        _, first = opened.pop(place)
        parts[first:] = [(part, each * weight) for part, each in parts[first:]]
        return True

    for found in _PARTS.finditer(text):
        bracket, weight = found["bracket"], found["weight"]
        if found["escaped"]:
            parts.append((found["escaped"], 1.0))
            continue
        if bracket in ("(", "["):
            opened.append((bracket, len(parts)))
            continue
        closed = (
            (weight is not None and close("(", float(weight)))
            or (bracket == ")" and close("(", ROUND))
            or (bracket == "]" and close("[", SQUARE))
        )
        if not closed:
            parts.append((found[0], 1.0))
    while opened:
        bracket, _ = opened[-1]
        close(bracket, ROUND if bracket == "(" else SQUARE)
    return _merged(parts)


def _merged(parts: list[tuple[str, float]]) -> WeightedText:
    merged: list[tuple[str, float]] = []
    for part, weight in parts:
        if merged and merged[-1][1] == weight:
            merged[-1] = (merged[-1][0] + part, weight)
        else:
            merged.append((part, weight))
    return tuple(merged) or (("", 1.0),)


def plain(text: str) -> str:
    """The text without brackets and weights."""
    return "".join(part for part, _ in parse_weights(text))


def spoken(text: str) -> str | WeightedText:
    """The caption for the text encoder: weighted parts, or plain text where all words weigh the same."""
    parts = parse_weights(text)
    return parts if any(weight != 1.0 for _, weight in parts) else "".join(part for part, _ in parts)


def plain_caption(caption: str | WeightedText) -> str:
    """The caption's text, without weights."""
    return caption if isinstance(caption, str) else " ".join(text for text, _ in caption)
