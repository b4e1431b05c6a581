"""What travels inside the package, so that everything runs without a download.

`BASE_FOLDER`: a miniature Stable Diffusion 1.5 in diffusers' layout, trained by
`scripts/builtin_base/train.py` of commit 3dbbf4a6. `DATA_FOLDER`: 24 images with captions of a subject
that it cannot draw, made by `scripts/builtin_base/draw_datasets.py`. Both were drawn
by programs of this project and stand under its licence, Apache-2.0.
"""

from __future__ import annotations

from pathlib import Path

BASE_FOLDER = Path(__file__).parent / "base"
DATA_FOLDER = Path(__file__).parent / "zobo"
COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
# Of what the base model was trained on: every color and shape, no background in the color of its shape.
PROMPTS = tuple(
    f"a {COLORS[number % len(COLORS)]} {SHAPES[number % len(SHAPES)]} on a "
    f"{COLORS[(number + 1 + number // len(COLORS)) % len(COLORS)]} background"
    for number in range(32)
)
