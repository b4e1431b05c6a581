"""How long the search for a file's pattern may take: patterns in headers are regular expressions of strangers.

peft looks each layer up by patterns (`alpha_pattern`), and some take longer than anybody waits. Python cannot interrupt a search,
so a pattern is counted before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

MOST_PLACES = 3e8  # of all patterns and names together: seconds
# Repeated groups, groups with flags or a look-around, and references to groups.
UNCOUNTED = re.compile(r"\)\s*[*+{]|[*+}][*+]|\(\?(?!:)|\\\d")
ATOMS = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)  # an escape or a class is one letter
REPEATS, CHOICES = re.compile(r"[*+{]"), re.compile(r"[?|]")
ANY_PARENT = r"(.*\.)?"  # how peft begins a pattern


def takes_too_long(patterns: Iterable[str], names: Sequence[str]) -> bool:
    """Whether patterns could take too long on names, or cannot be counted."""
    longest = max(map(len, names), default=1)
    places = 0.0
    for pattern in patterns:
        places += _places(pattern, longest) * max(1, len(names))
        if places > MOST_PLACES:
            return True
    return False


def _places(pattern: str, length: int) -> float:
    """The most places at which a search may be on a name of this length: each repetition may end anywhere in it."""
    if UNCOUNTED.search(ATOMS.sub("a", pattern.replace(ANY_PARENT, ""))) or UNCOUNTED.search(pattern):
        return math.inf
    places = 0.0
    for alternative in _alternatives(ATOMS.sub("a", pattern.replace(ANY_PARENT, "*"))):
        repeats = len(REPEATS.findall(alternative)) + 1  # one for the parent that peft puts before all
        places += math.comb(length + repeats, repeats) * 2.0 ** min(1000, len(CHOICES.findall(alternative)))
    return places


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between bars outside of groups."""
    parts, depth = [""], 0
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
