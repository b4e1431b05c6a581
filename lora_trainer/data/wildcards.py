"""Wildcards of a caption: `a {red|blue} ball` is one of two texts.

    {a|b|c}      one of them; each may hold further wildcards
    {a}          its contents, as in kohya's scripts
    {{ and }}    literal braces outside of a wildcard, as in kohya's scripts
    \\{ \\| \\}     literal anywhere

A brace without its partner is an ordinary character, and so is `{}`.
"""

from __future__ import annotations

from collections.abc import Callable

Pick = Callable[[int, int], int]  # (number of choices, position of the wildcard) -> which is taken

ESCAPED = ("\\{", "\\}", "\\|")


def filled(text: str, pick: Pick) -> str:
    """The text with each wildcard replaced by the choice that `pick` takes."""
    if "{" not in text and "}" not in text and "\\|" not in text:
        return text
    return _plain(text, 0, len(text), pick, outside=True)


def _plain(text: str, start: int, end: int, pick: Pick, *, outside: bool) -> str:
    """The part of the text from `start` to `end`, its wildcards filled."""
    parts: list[str] = []
    place = start
    while place < end:
        two = text[place : min(place + 2, end)]
        if two in ESCAPED:
            parts.append(two[1])
            place += 2
        elif outside and two in ("{{", "}}"):
            parts.append(two[0])
            place += 2
        elif two[0] == "{" and (bars := _bars(text, place, end)):
            chosen = pick(len(bars) - 1, place)
            parts.append(_plain(text, bars[chosen] + 1, bars[chosen + 1], pick, outside=False))
            place = bars[-1] + 1
        else:
            parts.append(two[0])
            place += 1
    return "".join(parts)


def _bars(text: str, start: int, end: int) -> list[int]:
    """Positions of the brace at `start`, its bars and its closing brace; empty when it has no partner or contents."""
    found, depth, place = [start], 0, start
    while place < end:
        if text[place : place + 2] in ESCAPED:
            place += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return [*found, place] if place > start + 1 else []
        if depth == 1 and text[place] == "|":
            found.append(place)
        place += 1
    return []
