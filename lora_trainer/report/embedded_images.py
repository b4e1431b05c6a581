"""Images inside the page: re-encoded as WebP and small enough that the page can be mailed."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from PIL import Image

from lora_trainer.data.images.images import BrokenImageError, load_rgb

BUDGET = 2_000_000  # bytes of all images of a page, before base64 makes a third more of them
LADDER = ((512, 85), (384, 82), (256, 80), (192, 75), (128, 60), (64, 50))  # longest side in pixels, quality


def embedded(paths: Iterable[Path]) -> dict[Path, str]:
    """A data URI for each image that can be read, all at the best size that the budget allows."""
    images = {}
    for path in dict.fromkeys(paths):
        with suppress(BrokenImageError, OSError):
            images[path] = load_rgb(path)
            images[path].thumbnail((LADDER[0][0], LADDER[0][0]), Image.Resampling.LANCZOS)
    encoded: dict[Path, bytes] = {}
    for side, quality in LADDER:
        encoded = {path: to_webp(image, side, quality) for path, image in images.items()}
        if sum(map(len, encoded.values())) <= BUDGET:
            break
    return {path: webp_uri(data) for path, data in encoded.items()}


def to_webp(image: Image.Image, side: int, quality: int) -> bytes:
    """The image with at most `side` pixels at its longest side."""
    smaller = image.copy()
    smaller.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    smaller.save(buffer, format="WEBP", quality=quality)
    return buffer.getvalue()


def webp_uri(data: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(data).decode("ascii")
