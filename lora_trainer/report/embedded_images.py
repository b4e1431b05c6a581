"""Images inside the page: re-encoded as WebP and small enough that the page can be mailed."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from lora_trainer.data.images.images import BrokenImageError, load_rgb

BUDGET = 2_000_000  # bytes of all images of a page, before base64 makes a third more of them
LADDER = ((512, 85), (384, 82), (256, 80), (192, 75), (128, 60), (64, 50))  # longest side in pixels, quality


def embedded(paths: Iterable[Path]) -> dict[Path, str]:
    """A data URI for each image that can be read, all at the best size that the budget allows."""
    sources = {path: image for path in dict.fromkeys(paths) if (image := read(path)) is not None}
    coded: dict[Path, bytes] = {}
    for side, quality in LADDER:
        coded = {path: webp(image, side, quality) for path, image in sources.items()}
        if sum(map(len, coded.values())) <= BUDGET:
            break
    return {path: "data:image/webp;base64," + base64.b64encode(data).decode("ascii") for path, data in coded.items()}


def read(path: Path) -> Image.Image | None:
    """The image, at most as large as the page shows it; None when it cannot be read."""
    try:
        image = load_rgb(path)
    except (BrokenImageError, OSError):
        return None
    image.thumbnail((LADDER[0][0], LADDER[0][0]), Image.Resampling.LANCZOS)
    return image


def webp(image: Image.Image, side: int, quality: int) -> bytes:
    smaller = image.copy()
    smaller.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    smaller.save(buffer, format="WEBP", quality=quality)
    return buffer.getvalue()
