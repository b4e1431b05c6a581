"""File names of the images of a grid."""

from __future__ import annotations


def strength_name(strength: float | None) -> str:
    """The end of a file's name: `without`, `with` at full strength, else `with_0.5`."""
    if strength is None:
        return "without"
    return "with" if strength == 1.0 else f"with_{strength:.12g}"


def image_name(name: str, row: int, strength: float | None) -> str:
    """The file of one image of a grid."""
    return f"{name}_{row:02d}_{strength_name(strength)}.png"
