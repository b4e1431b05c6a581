"""Draw the datasets of subjects that tests and studies train: the built-in base has never seen them.

    python scripts/builtin_base/draw_datasets.py

`zobo`, a small robot, and `fungo`, a spotted mushroom with a face, are kept for tests; `pingo`, a penguin, is for the study of the verdict. Each has 24 images of four aspect ratios with their captions.
The subjects keep their own colors; place, size, tilt and background differ.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base.drawing import COLORS, OVERSAMPLE, shaded_canvas, shifted

Color = tuple[int, int, int]

ROOT = Path(__file__).resolve().parents[2]
SIZES = ((256, 256), (240, 300), (300, 240), (208, 312))  # width, height: 1:1, 4:5, 5:4, 2:3
IMAGES = 24
CAPTIONS = (
    "{name} on a {background} background",
    "a picture of {name} on a {background} background",
    "{name}, {background} background",
    "a drawing of {name} in front of {background}",
)
INK: Color = (34, 38, 50)
TEAL: Color = (38, 166, 164)
DEEP_TEAL: Color = (24, 118, 124)
STEEL: Color = (176, 188, 198)
SCREEN: Color = (226, 244, 240)
SUN: Color = (250, 204, 46)
CORAL: Color = (240, 110, 96)
CAP: Color = (206, 46, 58)
CREAM: Color = (250, 238, 212)
STEM: Color = (238, 216, 178)
BLUSH: Color = (240, 150, 132)
BEAK: Color = (246, 150, 40)
COAT: Color = (58, 74, 118)
SCARF: Color = (206, 60, 88)


class Canvas:
    """A transparent layer whose unit is the subject's half height, with its origin in the middle."""

    def __init__(self, side: int, unit: float) -> None:
        self.layer = Image.new("RGBA", (side, side))
        self.pen = ImageDraw.Draw(self.layer)
        self.middle, self.unit = side / 2, unit

    def at(self, *numbers: float) -> list[float]:
        return [self.middle + self.unit * number for number in numbers]

    def ellipse(self, x: float, y: float, rx: float, ry: float, fill: Color) -> None:
        self.pen.ellipse(self.at(x - rx, y - ry, x + rx, y + ry), fill=fill)

    def box(self, x: float, y: float, rx: float, ry: float, corner: float, fill: Color) -> None:
        self.pen.rounded_rectangle(self.at(x - rx, y - ry, x + rx, y + ry), radius=corner * self.unit, fill=fill)

    def line(self, points: list[tuple[float, float]], width: float, fill: Color) -> None:
        flat = [self.at(*point) for point in points]
        self.pen.line([tuple(point) for point in flat], fill=fill, width=round(width * self.unit), joint="curve")
        for point in points:
            self.ellipse(*point, width / 2, width / 2, fill)

    def smile(self, x: float, y: float, rx: float, ry: float, width: float, fill: Color) -> None:
        angles = [math.radians(20 + 14 * i) for i in range(11)]
        self.line([(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles], width, fill)

    def chord(self, x: float, y: float, rx: float, ry: float, start: float, end: float, fill: Color) -> None:
        self.pen.chord(self.at(x - rx, y - ry, x + rx, y + ry), start, end, fill=fill)


def draw_zobo(canvas: Canvas) -> None:
    """A robot: antenna with a ball, a wide head with a screen for a face, a small body."""
    canvas.line([(0.0, -0.62), (0.0, -0.86)], 0.07, INK)
    canvas.ellipse(0.0, -0.9, 0.13, 0.13, SUN)
    for side in (-1, 1):
        canvas.line([(side * 0.36, 0.46), (side * 0.56, 0.6)], 0.13, STEEL)
        canvas.ellipse(side * 0.58, 0.62, 0.1, 0.1, SUN)
        canvas.box(side * 0.2, 0.9, 0.13, 0.1, 0.07, INK)
        canvas.box(side * 0.7, -0.22, 0.09, 0.17, 0.06, DEEP_TEAL)
    canvas.box(0.0, 0.55, 0.38, 0.32, 0.12, STEEL)
    canvas.ellipse(0.0, 0.56, 0.12, 0.12, CORAL)
    canvas.box(0.0, -0.22, 0.66, 0.44, 0.2, TEAL)
    canvas.box(0.0, -0.21, 0.52, 0.31, 0.14, SCREEN)
    for side in (-1, 1):
        canvas.ellipse(side * 0.23, -0.28, 0.1, 0.12, INK)
        canvas.ellipse(side * 0.23 + 0.03, -0.32, 0.035, 0.035, SCREEN)
    canvas.smile(0.0, -0.16, 0.17, 0.13, 0.06, INK)


def draw_fungo(canvas: Canvas) -> None:
    """A mushroom: a domed cap with pale spots, a stout stem with a face."""
    canvas.box(0.0, 0.42, 0.36, 0.5, 0.22, STEM)
    canvas.box(0.0, 0.04, 0.44, 0.1, 0.1, CREAM)
    canvas.chord(0.0, 0.0, 0.84, 0.88, 180, 360, CAP)
    canvas.box(0.0, -0.01, 0.84, 0.09, 0.09, CAP)
    for x, y, radius in ((-0.48, -0.22, 0.13), (-0.12, -0.58, 0.15), (0.34, -0.42, 0.13), (0.06, -0.2, 0.09)):
        canvas.ellipse(x, y, radius, radius * 0.94, CREAM)
    canvas.ellipse(0.62, -0.16, 0.09, 0.09, CREAM)
    for side in (-1, 1):
        canvas.ellipse(side * 0.16, 0.36, 0.065, 0.085, INK)
        canvas.ellipse(side * 0.16 + 0.02, 0.33, 0.024, 0.024, CREAM)
        canvas.ellipse(side * 0.27, 0.5, 0.065, 0.045, BLUSH)
    canvas.smile(0.0, 0.45, 0.1, 0.09, 0.045, INK)


def draw_pingo(canvas: Canvas) -> None:
    """A penguin: a dark blue coat, a cream belly, an orange beak and feet, a red scarf."""
    for side in (-1, 1):
        canvas.ellipse(side * 0.26, 0.92, 0.2, 0.09, BEAK)
        canvas.line([(side * 0.52, 0.0), (side * 0.7, 0.42)], 0.2, COAT)
    canvas.ellipse(0.0, 0.28, 0.58, 0.66, COAT)
    canvas.ellipse(0.0, 0.38, 0.4, 0.5, CREAM)
    canvas.ellipse(0.0, -0.48, 0.46, 0.44, COAT)
    for side in (-1, 1):
        canvas.ellipse(side * 0.17, -0.46, 0.19, 0.22, CREAM)
        canvas.ellipse(side * 0.15, -0.48, 0.07, 0.09, INK)
    canvas.ellipse(0.0, -0.3, 0.15, 0.09, BEAK)
    canvas.box(0.0, -0.08, 0.44, 0.09, 0.08, SCARF)
    canvas.box(0.26, 0.12, 0.1, 0.22, 0.06, SCARF)


SUBJECTS: dict[str, Callable[[Canvas], None]] = {"zobo": draw_zobo, "fungo": draw_fungo, "pingo": draw_pingo}
# Backgrounds that would swallow part of the subject are left out.
UNFIT = {"zobo": ("yellow", "black"), "fungo": ("red", "black"), "pingo": ("orange", "white", "black")}


def place(subject: Image.Image, width: int, height: int, background: Color, rng: random.Random) -> Image.Image:
    """The subject, given as a large square layer, tilted and moved a little on a shaded background."""
    canvas = shaded_canvas(width, height, background, rng.uniform(-16.0, 16.0))
    tilted = subject.rotate(rng.uniform(-10.0, 10.0), Image.Resampling.BICUBIC)
    small = tilted.resize((tilted.width // OVERSAMPLE, tilted.height // OVERSAMPLE), Image.Resampling.BOX)
    side = min(width, height)
    x = (width - small.width) / 2 + rng.uniform(-0.09, 0.09) * side
    y = (height - small.height) / 2 + rng.uniform(-0.07, 0.07) * height
    canvas.paste(small, (round(x), round(y)), small)
    return canvas


def draw_subject(name: str, number: int) -> tuple[Image.Image, str]:
    """Image `number` of a subject and its caption."""
    rng = random.Random(f"{name} {number}")
    backgrounds = [color for color in COLORS if color not in UNFIT[name]]
    background = backgrounds[number % len(backgrounds)]
    # Six images of each size, shared out so that no background meets one size only.
    width, height = SIZES[(number + number // len(SIZES)) % len(SIZES)]
    unit = rng.uniform(0.36, 0.43) * min(width, height) * OVERSAMPLE
    if height > 1.4 * width:  # room above and below
        unit *= 1.1
    canvas = Canvas(2 * min(width, height) * OVERSAMPLE, unit)
    SUBJECTS[name](canvas)
    color = shifted(background, tuple(rng.randint(-8, 8) for _ in range(3)))
    caption = CAPTIONS[rng.randrange(len(CAPTIONS))].format(name=name, background=background)
    return place(canvas.layer, width, height, color, rng), caption


def draw_data_set(name: str, folder: Path) -> None:
    """Write the subject's images and captions into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(IMAGES):
        image, caption = draw_subject(name, number)
        image.save(folder / f"{name}_{number + 1:02d}.webp", quality=92, method=6)
        (folder / f"{name}_{number + 1:02d}.txt").write_text(caption + "\n", encoding="utf-8")
    print(f"{folder}: {IMAGES} images, {sum(f.stat().st_size for f in folder.iterdir()) / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zobo", type=Path, default=ROOT / "tests" / "data_sets" / "zobo")
    parser.add_argument("--fungo", type=Path, default=ROOT / "tests" / "data_sets" / "fungo")
    args = parser.parse_args()
    draw_data_set("zobo", args.zobo)
    draw_data_set("fungo", args.fungo)


if __name__ == "__main__":
    main()
