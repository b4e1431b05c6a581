"""Drawn images, those of scripts/gate_examples.py, and how they are read back from files."""

from __future__ import annotations

import io

from PIL import Image

from gate_examples import drawing, photo

__all__ = ["drawing", "photo", "saved"]


def saved(image: Image.Image, kind: str = "PNG", **settings: object) -> Image.Image:
    """The same image as a file of that format returns it, not decoded yet."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return Image.open(file)
