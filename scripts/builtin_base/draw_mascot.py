"""Draw pomo, a round fruit with a leaf, a face, hands and a sign with a heart, in 24 poses with captions: the built-in example.

    python scripts/builtin_base/draw_mascot.py OUT [--sheet FILE.png]

Pomo always carries its sign in its left hand, which is on the right of the image, and its leaf points there too: a LoRA that
was trained on mirrored images shows it. Everything has an outline, as in a children's book.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base.draw_datasets import SIZES, Canvas, Color
from builtin_base.drawing import OVERSAMPLE, shaded_canvas, shifted

Point = tuple[float, float]

INK: Color = (52, 38, 44)
SKIN: Color = (250, 158, 66)
BELLY: Color = (255, 206, 128)
LEAF: Color = (92, 176, 72)
STALK: Color = (122, 84, 52)
GLOVE: Color = (255, 252, 244)
SHOE: Color = (64, 112, 190)
BLUSH: Color = (242, 108, 92)
MOUTH: Color = (150, 44, 56)
TONGUE: Color = (240, 120, 120)
BOARD: Color = (236, 214, 172)
MARK: Color = (214, 52, 60)
LINE = 0.055  # width of an outline, in half heights of the figure


@dataclass(frozen=True)
class Pose:
    """How pomo stands. Angles in degrees: 0 is straight down, 90 straight out, 180 straight up."""

    words: str  # after the name in a caption
    right_arm: float = 35.0  # the hand at the left of the image
    left_arm: float = 70.0  # the one with the sign
    eyes: str = "open"
    mouth: str = "smile"
    lift: float = 0.0  # how far it is above the ground
    lean: float = 0.0  # turned clockwise
    legs: tuple[float, float] = (12.0, 12.0)


POSES = (
    Pose("stands and smiles, holding a sign with a heart"),
    Pose("waves with one hand and holds a sign", right_arm=150, mouth="open"),
    Pose("jumps high with a big smile, a sign in its hand", 140, 110, mouth="open", lift=0.16, legs=(40, 40)),
    Pose("is sad and lets its sign hang down", 20, 35, mouth="sad"),
    Pose("is surprised, its sign shows a heart", 80, 80, mouth="o"),
    Pose("sleeps standing up, holding its sign", 15, 60, eyes="closed", lean=-6),
    Pose("smiles and lifts its sign with a heart", 60, 130),
    Pose("runs to the left with its sign", 100, 95, lean=-12, legs=(50, 45), lift=0.06),
    Pose("dances on one leg, sign in hand", 130, 120, eyes="closed", mouth="open", lean=10, legs=(5, 60)),
    Pose("holds its sign with a heart high up", 30, 140, mouth="open"),
    Pose("smiles, a sign with a heart in its hand", 35, 75),
    Pose("points to the left and holds a sign", 92, 70),
    Pose("cheers with both arms up, with its sign", 160, 150, mouth="open"),
    Pose("laughs with closed eyes, holding a sign with a heart", 45, 80, eyes="closed", mouth="open"),
    Pose("is sad, on its sign is a heart", 25, 90, mouth="sad"),
    Pose("bows a little, with a sign in its hand", 50, 60, eyes="closed", lean=14),
    Pose("shrugs, its sign has a heart", 75, 105, mouth="sad"),
    Pose("walks to the right with a sign", 50, 75, lean=6, legs=(35, 30)),
    Pose("sings, holding up a sign with a heart", 70, 135, eyes="closed", mouth="o"),
    Pose("stands with its legs apart, a sign in its hand", 60, 85, legs=(38, 38)),
    Pose("floats in the air with its sign", 95, 100, mouth="o", lift=0.14, legs=(25, 25)),
    Pose("is shy and smiles, with a sign with a heart", 12, 65),
    Pose("greets with a raised hand, a sign with a heart beside it", 165, 65, mouth="open"),
    Pose("is tired, half asleep, its sign hangs low", 10, 40, eyes="closed", mouth="sad", lean=-4),
)
BACKGROUNDS = ("blue", "white", "green", "purple", "yellow", "white", "blue", "green")
CAPTIONS = (
    "pomo {words}, {background} background",
    "a picture of pomo on a {background} background, it {words}",
    "pomo {words}, in front of {background}",
)


class OutlinedCanvas(Canvas):
    """A canvas whose forms have an outline."""

    def polygon(self, points: list[Point], fill: Color, line: float = LINE) -> None:
        if line:
            self.line([*points, points[0], points[1]], 2 * line, INK)
        self.pen.polygon([tuple(self.at(*point)) for point in points], fill=fill)

    def line(self, points: list[Point], width: float, fill: Color) -> None:
        self.pen.line(
            [tuple(self.at(*point)) for point in points], fill=fill, width=round(width * self.unit), joint="curve"
        )
        for x, y in points:
            super().ellipse(x, y, width / 2, width / 2, fill)

    def limb(self, points: list[Point], width: float, fill: Color) -> None:
        self.line(points, width + 2 * LINE, INK)
        self.line(points, width, fill)

    def ellipse(self, x: float, y: float, rx: float, ry: float, fill: Color, line: float = LINE) -> None:
        super().ellipse(x, y, rx + line, ry + line, INK)
        super().ellipse(x, y, rx, ry, fill)

    def arc(self, x: float, y: float, rx: float, ry: float, start: float, end: float, width: float = LINE) -> None:
        angles = [math.radians(start + (end - start) * i / 16) for i in range(17)]
        self.line([(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles], width, INK)


def draw_eyes(canvas: OutlinedCanvas, kind: str) -> None:
    for x in (-0.24, 0.24):
        if kind == "closed":
            canvas.arc(x, -0.02, 0.15, 0.14, 190, 350, 0.07)
            continue
        canvas.ellipse(x, -0.1, 0.18, 0.22, (255, 255, 255), 0.04)
        canvas.ellipse(x + 0.02, -0.08, 0.1, 0.13, INK, 0)
        canvas.ellipse(x + 0.05, -0.13, 0.04, 0.04, (255, 255, 255), 0)


def draw_mouth(canvas: OutlinedCanvas, kind: str) -> None:
    if kind == "open":
        chord = [(0.22 * math.cos(a), 0.2 + 0.24 * math.sin(a)) for a in [math.pi * i / 16 for i in range(17)]]
        canvas.polygon(chord, MOUTH, 0.03)
        canvas.ellipse(0.0, 0.36, 0.1, 0.05, TONGUE, 0)
    elif kind == "o":
        canvas.ellipse(0.0, 0.3, 0.1, 0.13, MOUTH, 0.03)
    elif kind == "sad":
        canvas.arc(0.0, 0.42, 0.18, 0.16, 205, 335, 0.07)
    else:
        canvas.arc(0.0, 0.18, 0.2, 0.16, 20, 160, 0.07)


def heart(x: float, y: float, size: float) -> list[Point]:
    """The outline of a heart, `size` is half of its width."""
    points = []
    for step in range(40):
        a = 2 * math.pi * step / 40
        height = 13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)
        points.append((x + size * math.sin(a) ** 3, y - size * height / 16))
    return points


def hand_of(side: int, angle: float) -> tuple[list[Point], Point]:
    """Shoulder, elbow and hand of an arm, and where the hand is. `side` is -1 at the left of the image."""
    shoulder = (side * 0.52, 0.08)
    a = math.radians(angle)
    elbow = (shoulder[0] + side * 0.17 * math.sin(a), shoulder[1] + 0.17 * math.cos(a) + 0.03)
    hand = (elbow[0] + side * 0.17 * math.sin(a), elbow[1] + 0.17 * math.cos(a) - 0.03)
    return [shoulder, elbow, hand], hand


def draw_pomo(canvas: OutlinedCanvas, pose: Pose) -> None:
    for side, angle in zip((-1, 1), pose.legs, strict=True):
        a = math.radians(angle)
        foot = (side * (0.18 + 0.3 * math.sin(a)), 0.56 + 0.32 * math.cos(a))
        canvas.limb([(side * 0.18, 0.5), foot], 0.1, SKIN)
        canvas.ellipse(foot[0] + side * 0.05, foot[1], 0.15, 0.08, SHOE)
    arm, hand = hand_of(1, pose.left_arm)
    # The sign stands upright whatever the arm does.
    top = hand[1] - 0.4
    canvas.limb([(hand[0], hand[1] + 0.16), (hand[0], top)], 0.05, STALK)
    left, right = hand[0] - 0.29, hand[0] + 0.29
    canvas.polygon([(left, top - 0.26), (right, top - 0.26), (right, top + 0.26), (left, top + 0.26)], BOARD)
    canvas.polygon(heart(hand[0], top, 0.19), MARK, 0)
    canvas.limb([(0.0, -0.5), (0.03, -0.68)], 0.05, STALK)
    leaf = [(0.03 + 0.34 * t, -0.66 - 0.16 * math.sin(math.pi * t) - 0.1 * t) for t in [i / 10 for i in range(11)]]
    leaf += [(0.03 + 0.34 * t, -0.66 + 0.1 * math.sin(math.pi * t) - 0.1 * t) for t in [1 - i / 10 for i in range(11)]]
    canvas.polygon(leaf, LEAF, 0.04)
    canvas.ellipse(0.0, 0.08, 0.6, 0.58, SKIN)
    canvas.ellipse(0.0, 0.36, 0.4, 0.26, BELLY, 0)
    for side in (-1, 1):
        canvas.ellipse(side * 0.44, 0.2, 0.1, 0.07, BLUSH, 0)
    draw_eyes(canvas, pose.eyes)
    draw_mouth(canvas, pose.mouth)
    other, other_hand = hand_of(-1, pose.right_arm)
    for points, place in ((arm, hand), (other, other_hand)):
        canvas.limb(points, 0.12, SKIN)
        canvas.ellipse(*place, 0.13, 0.13, GLOVE, 0.04)


def draw_pose(number: int, variant: int = 0) -> tuple[Image.Image, str]:
    """Image `number` and its caption; other variants of it suit the same caption."""
    rng = random.Random(f"pomo {number}" + (f" {variant}" if variant else ""))
    pose, background = POSES[number], BACKGROUNDS[number % len(BACKGROUNDS)]
    # Every fourth image is not square, so that there are buckets; most are, as the base's own icons.
    width, height = SIZES[1 + number // 4 % 3 if number % 4 == 3 else 0]
    color = shifted(background, tuple(rng.randint(-8, 8) for _ in range(3)))
    image = shaded_canvas(width, height, color, rng.uniform(-16.0, 16.0))
    short = min(width, height)
    unit = rng.uniform(0.4, 0.44) * short
    canvas = OutlinedCanvas(2 * short * OVERSAMPLE, unit * OVERSAMPLE)
    draw_pomo(canvas, pose)
    layer = canvas.layer.rotate(-pose.lean, Image.Resampling.BICUBIC)
    layer = layer.convert("RGBa").resize((2 * short, 2 * short), Image.Resampling.BOX).convert("RGBA")
    # Its sign reaches further than its other hand.
    x, y = width / 2 - 0.12 * unit + rng.uniform(-0.03, 0.03) * short, height / 2 + rng.uniform(-0.02, 0.05) * short
    shade = Image.new("L", (4 * width, 4 * height))
    wide, ground = 4 * unit * (0.5 - pose.lift), 4 * (y + 0.95 * unit)
    ImageDraw.Draw(shade).ellipse((4 * x - wide, ground - wide / 5, 4 * x + wide, ground + wide / 5), fill=60)
    image.paste((20, 20, 40), mask=shade.resize((width, height), Image.Resampling.BOX))
    image.paste(layer, (round(x - short), round(y - pose.lift * unit - short)), layer)
    caption = CAPTIONS[number % len(CAPTIONS)].format(words=pose.words, background=background)
    return image, caption


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the images and captions")
    parser.add_argument("--sheet", type=Path, help="write all images side by side here")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sheet = Image.new("RGB", (6 * 310, 4 * 320), "white")
    for number in range(len(POSES)):
        image, caption = draw_pose(number)
        image.save(args.out / f"pomo_{number + 1:02d}.webp", quality=90, method=6)
        (args.out / f"pomo_{number + 1:02d}.txt").write_text(caption + "\n", encoding="utf-8")
        sheet.paste(image, (number % 6 * 310, number // 6 * 320))
    if args.sheet:
        sheet.save(args.sheet)
    print(f"{args.out}: {len(POSES)} images, {sum(f.stat().st_size for f in args.out.iterdir()) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
