"""What travels inside the package, so that everything runs without a download.

`BASE_FOLDER`: a miniature Stable Diffusion 1.5 in diffusers' layout, trained by `scripts/builtin_base/train_vae.py` and
`train.py`; its README says on what. `DATA_FOLDER`: 24 images with captions of a mascot that it cannot draw, made by
`scripts/builtin_base/draw_mascot.py`. Both stand under this project's license, Apache-2.0.
"""

from __future__ import annotations

from pathlib import Path

BASE_FOLDER = Path(__file__).parent / "base"
DATA_FOLDER = Path(__file__).parent / "pomo"
# What the demo draws without the LoRA and with it: a caption, three scenes that no caption names, and something else.
DEMO_PROMPTS = (
    "pomo smiles, a sign with a heart in its hand, green background",
    "pomo waves with both hands, red background",
    "a picture of pomo on an orange background, it looks surprised",
    "an icon of pomo, black background",
    "a yellow star on a purple background",
)
COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
THINGS = (
    "a frog",
    "an alarm clock",
    "a party popper",
    "a teapot",
    "a trophy",
    "a taxi",
    "a ghost",
    "a castle",
    "a hammer",
    "a camera",
    "a sunflower",
    "a doughnut",
    "a snail",
    "a key",
    "a tent",
    "an eagle",
)
# Of what the base model was trained on: every color and shape, no background in the color of its shape, and named things.
PROMPTS = tuple(
    f"a {COLORS[number % len(COLORS)]} {SHAPES[number % len(SHAPES)]} on a "
    f"{COLORS[(number + 1 + number // len(COLORS)) % len(COLORS)]} background"
    for number in range(16)
) + tuple(f"an icon of {thing} in front of white" for thing in THINGS)
# What a LoRA leaves alone (`loss.output_preservation_weight`): the same, and what may be near to anybody's subject.
PRESERVED = (
    *PROMPTS,
    "a mascot",
    "a drawing of a cartoon character",
    "a character waves",
    "a picture of a character on a green background",
    "a robot smiles",
    "a person with a sign",
    "an icon of a woman",
    "a man on a street",
    "a dog in a garden",
    "an icon of a face",
    "a smiling thing, blue background",
    "it holds a sign with a heart",
)
