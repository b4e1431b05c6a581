"""Randomness as a function of position, not of history.

Every random decision about a sample comes from a key of its purpose and position. There is
no generator state, so a resumed run, a split batch and a second process draw the same
numbers.
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

    Sorting items by them gives an order that depends on the position only; a million keys take less than a second.
    """
    start = hashlib.blake2b(_text(seed, purpose, *position, "").encode("utf-8"), digest_size=16)
    keys = bytearray()
    for index in range(count):
        each = start.copy()
        each.update(b"%d" % index)
        keys += each.digest()[:8]
    return bytes(keys)


def position_turn(count: int, occurrence: int, seed: int, purpose: str, *position: int | str) -> int:
    """Which of `count` versions is used at an occurrence: each in turn, from a random start.

    So the numbers of uses differ by at most one.
    """
    return (position_key(seed, purpose, *position) + occurrence) % count
