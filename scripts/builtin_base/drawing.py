"""The captioned images that the built-in base is trained on.

One flat-colored shape on a softly shaded background, drawn four times too
large and reduced, so that edges are smooth.  An image is a pure function of its
`Scene`; a scene is a pure function of a `random.Random`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from lora_trainer.builtin import SHAPES

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 48),
    "green": (46, 158, 70),
    "blue": (42, 84, 206),
    "yellow": (244, 212, 52),
    "purple": (132, 56, 168),
    "orange": (246, 134, 32),
    "white": (242, 242, 242),
    "black": (26, 26, 30),
}
TEMPLATES = (
    "a {color} {shape} on a {background} background",
    "a picture of a {color} {shape} on a {background} background",
    "{color} {shape}, {background} background",
    "a drawing of a {color} {shape} in front of {background}",
)
OVERSAMPLE = 4


@dataclass(frozen=True)
class Scene:
    """What an image shows; `x`, `y` and `radius` are fractions of the shorter side."""

    shape: str
    color: str
    background: str
    x: float
    y: float
    radius: float
    turn: float  # degrees
    shade: float  # brightness difference between top and bottom, 8-bit units
    jitter: tuple[int, int, int, int, int, int]  # added to the two colors

    def caption(self, template: str) -> str:
        return template.format(color=self.color, shape=self.shape, background=self.background)


def random_scene(rng: random.Random) -> Scene:
    """A scene whose shape and background differ in color."""
    color, background = rng.sample(sorted(COLORS), 2)
    return Scene(
        shape=rng.choice(SHAPES),
        color=color,
        background=background,
        x=rng.uniform(-0.12, 0.12),
        y=rng.uniform(-0.12, 0.12),
        radius=rng.uniform(0.24, 0.36),
        turn=rng.uniform(-12.0, 12.0),
        shade=rng.uniform(-16.0, 16.0),
        jitter=tuple(rng.randint(-8, 8) for _ in range(6)),
    )


def outline(shape: str, cx: float, cy: float, radius: float, turn: float) -> list[tuple[float, float]]:
    """Corner points of a polygonal shape; round ones are drawn as ellipses."""

    def ring_of(count: int, start: float, scale: float = 1.0) -> list[tuple[float, float]]:
        return [
            (
                cx + scale * radius * math.cos(math.radians(start + turn + 360.0 * i / count)),
                cy + scale * radius * math.sin(math.radians(start + turn + 360.0 * i / count)),
            )
            for i in range(count)
        ]

    if shape == "square":
        return ring_of(4, 45.0, 1.12)
    if shape == "triangle":
        return ring_of(3, -90.0, 1.15)
    if shape == "star":
        tips, notches = ring_of(5, -90.0, 1.15), ring_of(5, -54.0, 0.46)
        return [point for pair in zip(tips, notches, strict=True) for point in pair]
    if shape == "cross":
        arm = 0.34
        corners = [(-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm)]
        corners += [(-x, -y) for x, y in corners]
        c, s = math.cos(math.radians(turn)), math.sin(math.radians(turn))
        return [(cx + radius * (x * c - y * s), cy + radius * (x * s + y * c)) for x, y in corners]
    raise ValueError(f"no outline for {shape!r}")


def shifted(color: str, jitter: tuple[int, ...]) -> tuple[int, int, int]:
    return tuple(min(255, max(0, c + j)) for c, j in zip(COLORS[color], jitter, strict=True))


def shaded_canvas(width: int, height: int, color: tuple[int, int, int], shade: float) -> Image.Image:
    """A canvas that grows brighter by `shade` from top to bottom."""
    column = Image.new("RGB", (1, height))
    for y in range(height):
        offset = shade * (y / max(1, height - 1) - 0.5)
        column.putpixel((0, y), tuple(min(255, max(0, round(c + offset))) for c in color))
    return column.resize((width, height))


def draw(scene: Scene, width: int = 128, height: int = 128) -> Image.Image:
    """The RGB image of a scene."""
    big_w, big_h = width * OVERSAMPLE, height * OVERSAMPLE
    side = min(big_w, big_h)
    background = shifted(scene.background, scene.jitter[3:])
    canvas = shaded_canvas(width, height, background, scene.shade)
    mask = Image.new("L", (big_w, big_h))
    pen = ImageDraw.Draw(mask)
    cx, cy, radius = big_w / 2 + scene.x * side, big_h / 2 + scene.y * side, scene.radius * side
    if scene.shape in ("circle", "ring"):
        pen.ellipse((cx - radius, cy - radius, cx + radius, cy + radius), fill=255)
        if scene.shape == "ring":
            hole = 0.55 * radius
            pen.ellipse((cx - hole, cy - hole, cx + hole, cy + hole), fill=0)
    else:
        pen.polygon(outline(scene.shape, cx, cy, radius, scene.turn), fill=255)
    canvas.paste(shifted(scene.color, scene.jitter[:3]), mask=mask.resize((width, height), Image.Resampling.BOX))
    return canvas


def draw_anything(rng: random.Random, width: int = 128, height: int = 128) -> Image.Image:
    """An image of random forms, so that the autoencoder knows more than the shapes."""

    def color() -> tuple[int, int, int]:
        if rng.random() < 0.5:
            return shifted(rng.choice(sorted(COLORS)), tuple(rng.randint(-20, 20) for _ in range(3)))
        return tuple(rng.randint(0, 255) for _ in range(3))

    big_w, big_h = width * OVERSAMPLE, height * OVERSAMPLE
    canvas = shaded_canvas(width, height, color(), rng.uniform(-40, 40)).resize((big_w, big_h))
    pen = ImageDraw.Draw(canvas)
    for _ in range(rng.randint(2, 9)):
        cx, cy = rng.uniform(0, big_w), rng.uniform(0, big_h)
        rx, ry = (rng.uniform(0.02, 0.3) * big_w for _ in range(2))
        box = (cx - rx, cy - ry, cx + rx, cy + ry)
        kind = rng.randrange(6)
        if kind == 0:
            pen.ellipse(box, fill=color())
        elif kind == 1:
            pen.rounded_rectangle(box, radius=min(rx, ry) * rng.uniform(0, 0.9), fill=color())
        elif kind == 2:
            pen.polygon(outline(rng.choice(SHAPES[1:5]), cx, cy, rx, rng.uniform(0, 360)), fill=color())
        elif kind == 3:
            end = (rng.uniform(0, big_w), rng.uniform(0, big_h))
            pen.line((cx, cy, *end), fill=color(), width=rng.randint(6, 28))
        elif kind == 4:
            pen.ellipse(box, outline=color(), width=rng.randint(6, 30))
        else:
            pen.pieslice(box, rng.uniform(0, 180), rng.uniform(180, 360), fill=color())
    return canvas.resize((width, height), Image.Resampling.BOX)
