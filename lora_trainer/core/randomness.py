"""Randomness as a function of position, not of history.

Every random decision about a sample is drawn from a key made of what it is for and
where it stands: no generator state is kept, so a resumed run, a split batch and a
second process draw the same numbers.
"""

from __future__ import annotations

import hashlib


def position_key(seed: int, purpose: str, *position: int | str) -> int:
    """A 128-bit key for one decision, e.g. `position_key(42, "noise", step, sample_id, 0)`."""
    text = _text(seed, purpose, *position)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest(), "big")


def _text(seed: int, purpose: str, *position: int | str) -> str:
    return "\x1f".join([str(seed), purpose, *(str(part) for part in position)])


def position_uniform(seed: int, purpose: str, *position: int | str) -> float:
    """A number in [0, 1) for one decision."""
    return (position_key(seed, purpose, *position) >> 75) / float(1 << 53)


def position_keys(count: int, seed: int, purpose: str, *position: int | str) -> bytes:
    """The first 8 bytes of `position_key(seed, purpose, *position, index)` of each index below `count`.

    Sorted by them, items are in an order that depends on the position only; a million in less than a second.
    """
    start = hashlib.blake2b(_text(seed, purpose, *position, "").encode("utf-8"), digest_size=16)
    keys = bytearray()
    for index in range(count):
        each = start.copy()
        each.update(b"%d" % index)
        keys += each.digest()[:8]
    return bytes(keys)


def position_turn(count: int, visit: int, seed: int, purpose: str, *position: int | str) -> int:
    """Which of `count` versions is taken on a visit: each in turn, from a start that the position draws.

    So all of them are used equally often, but for one.
    """
    return (position_key(seed, purpose, *position) + visit) % count
