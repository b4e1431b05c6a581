"""Draw pomo, a round fruit with a leaf, a face, hands and a sign, in 24 poses with captions: the example of the next base.

    python scripts/builtin_base/draw_mascot.py OUT [--sheet FILE.png]

Pomo always carries its sign in its left hand, which is on the right of the image, and its leaf points there too: a LoRA that
was trained on mirrored images shows it. Everything has an outline, as in a picture book.
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
LINE = 0.05  # width of an outline, in half heights of the figure


@dataclass(frozen=True)
class Pose:
    """How pomo stands. Angles in degrees: 0 is straight down, 90 straight out, 180 straight up."""

    words: str  # after the name in a caption
    sign: str = "heart"
    right_arm: float = 35.0  # the hand at the left of the image
    left_arm: float = 70.0  # the one with the sign
    eyes: str = "open"
    look: Point = (0.0, 0.0)
    mouth: str = "smile"
    lift: float = 0.0  # how far it is above the ground
    lean: float = 0.0  # turned clockwise
    legs: tuple[float, float] = (12.0, 12.0)


POSES = (
    Pose("stands and smiles, holding a sign with a heart"),
    Pose("waves with one hand and holds a sign with a star", "star", right_arm=150, mouth="open"),
    Pose(
        "jumps high with a big smile, a sign with an arrow in its hand",
        "arrow",
        140,
        110,
        mouth="open",
        lift=0.22,
        legs=(40, 40),
    ),
    Pose("is sad and lets its sign with a cross hang down", "cross", 20, 35, look=(0, 0.5), mouth="sad"),
    Pose("is surprised, its sign shows a question mark", "?", 80, 80, eyes="wide", mouth="o"),
    Pose("sleeps standing up, with a sign that says Z", "Z", 15, 60, eyes="closed", mouth="flat", lean=-6),
    Pose("winks and lifts its sign with a heart", "heart", 60, 130, eyes="wink"),
    Pose(
        "runs to the left with a sign with an arrow",
        "arrow",
        100,
        95,
        look=(-0.6, 0),
        lean=-12,
        legs=(50, 45),
        lift=0.06,
    ),
    Pose(
        "dances on one leg, sign with a note in hand",
        "note",
        130,
        120,
        eyes="happy",
        mouth="open",
        lean=10,
        legs=(5, 60),
    ),
    Pose("looks up at its sign with a star", "star", 30, 140, look=(0.6, -0.7)),
    Pose("looks to the left, a sign with a cross in its hand", "cross", 35, 75, look=(-0.8, 0)),
    Pose("points to the left and holds a sign with an arrow", "arrow", 92, 70, look=(-0.7, 0)),
    Pose("cheers with both arms up, the sign says !", "!", 160, 150, eyes="happy", mouth="open"),
    Pose("laughs with closed eyes, holding a sign with a heart", "heart", 45, 80, eyes="happy", mouth="open"),
    Pose("is angry, on its sign is an exclamation mark", "!", 25, 90, eyes="angry", mouth="sad"),
    Pose("bows a little, with a sign with a note", "note", 50, 60, eyes="closed", lean=14),
    Pose("shrugs, its sign has a question mark", "?", 75, 105, look=(0.4, -0.4), mouth="flat"),
    Pose("walks to the right with a sign with a star", "star", 50, 75, look=(0.7, 0), lean=6, legs=(35, 30)),
    Pose("sings, holding up a sign with a note", "note", 70, 135, eyes="closed", mouth="o"),
    Pose("stands with its legs apart, a sign with a cross in its hand", "cross", 60, 85, legs=(38, 38)),
    Pose(
        "floats in the air and looks down, sign with an arrow",
        "arrow",
        95,
        100,
        look=(0, 0.8),
        mouth="o",
        lift=0.2,
        legs=(25, 25),
    ),
    Pose("is shy and looks away from its sign with a heart", "heart", 12, 65, look=(-0.7, 0.5), mouth="small"),
    Pose("greets with a raised hand, a sign with a Z beside it", "Z", 165, 65, mouth="smile"),
    Pose("is tired, half asleep, its sign with a star hangs low", "star", 10, 40, eyes="half", mouth="flat", lean=-4),
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


def draw_eyes(canvas: OutlinedCanvas, pose: Pose) -> None:
    for side in (-1, 1):
        x, y = 0.2 * side, -0.1
        kind = "happy" if pose.eyes == "wink" and side == 1 else pose.eyes
        if kind == "closed":
            canvas.arc(x, y - 0.03, 0.1, 0.08, 10, 170)
            continue
        if kind == "happy":
            canvas.arc(x, y + 0.06, 0.1, 0.12, 190, 350)
            continue
        height = {"wide": 0.2, "half": 0.09}.get(kind, 0.16)
        canvas.ellipse(x, y, 0.13, height, (255, 255, 255), 0.035)
        px, py = x + 0.05 * pose.look[0], y + 0.6 * height * pose.look[1]
        canvas.ellipse(px, py, 0.065, min(0.085, height), INK, 0)
        canvas.ellipse(px + 0.02, py - 0.03, 0.024, 0.024, (255, 255, 255), 0)
        if kind == "angry":
            canvas.line([(x + 0.15 * side, y - 0.26), (x - 0.1 * side, y - 0.15)], LINE, INK)
        if kind == "half":
            canvas.line([(x - 0.14, y - 0.08), (x + 0.14, y - 0.08)], LINE, INK)


def draw_mouth(canvas: OutlinedCanvas, kind: str) -> None:
    if kind == "open":
        chord = [(0.17 * math.cos(a), 0.16 + 0.2 * math.sin(a)) for a in [math.pi * i / 16 for i in range(17)]]
        canvas.polygon(chord, MOUTH, 0.03)
        canvas.ellipse(0.0, 0.29, 0.08, 0.045, TONGUE, 0)
    elif kind == "o":
        canvas.ellipse(0.0, 0.2, 0.07, 0.09, MOUTH, 0.03)
    elif kind == "sad":
        canvas.arc(0.0, 0.31, 0.14, 0.12, 205, 335)
    elif kind == "flat":
        canvas.line([(-0.1, 0.2), (0.1, 0.2)], LINE, INK)
    else:
        wide = 0.08 if kind == "small" else 0.16
        canvas.arc(0.0, 0.14, wide, 0.12, 20, 160)


def draw_mark(canvas: OutlinedCanvas, sign: str, x: float, y: float, size: float) -> None:
    """What stands on the sign, in red."""
    if sign == "heart":
        points = []
        for step in range(40):
            a = 2 * math.pi * step / 40
            points.append(
                (
                    x + size * math.sin(a) ** 3,
                    y - size * (13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16,
                )
            )
        canvas.polygon(points, MARK, 0)
    elif sign == "star":
        canvas.polygon(
            [
                (x + r * math.sin(math.pi * i / 5), y - r * math.cos(math.pi * i / 5))
                for i, r in enumerate([size * 1.1, size * 0.48] * 5)
            ],
            MARK,
            0,
        )
    elif sign == "arrow":
        canvas.line([(x + size * 0.9, y), (x - size * 0.6, y)], 0.07, MARK)
        canvas.line(
            [(x - size * 0.1, y - size * 0.7), (x - size * 0.9, y), (x - size * 0.1, y + size * 0.7)], 0.07, MARK
        )
    elif sign == "cross":
        canvas.line([(x - size * 0.7, y - size * 0.7), (x + size * 0.7, y + size * 0.7)], 0.08, MARK)
        canvas.line([(x - size * 0.7, y + size * 0.7), (x + size * 0.7, y - size * 0.7)], 0.08, MARK)
    elif sign == "note":
        canvas.ellipse(x - size * 0.3, y + size * 0.6, size * 0.35, size * 0.28, MARK, 0)
        canvas.line([(x, y + size * 0.55), (x, y - size * 0.8), (x + size * 0.6, y - size * 0.45)], 0.055, MARK)
    elif sign == "Z":
        corners = [(-0.6, -0.75), (0.6, -0.75), (-0.6, 0.75), (0.6, 0.75)]
        canvas.line([(x + size * dx, y + size * dy) for dx, dy in corners], 0.07, MARK)
    else:  # ! and ?
        if sign == "!":
            canvas.line([(x, y - size * 0.9), (x, y + size * 0.2)], 0.08, MARK)
        else:
            angles = [math.radians(200 + 25 * i) for i in range(10)]
            hook = [(x + size * 0.5 * math.cos(a), y - size * 0.45 + size * 0.5 * math.sin(a)) for a in angles]
            canvas.line([*hook, (x, y + size * 0.3)], 0.065, MARK)
        canvas.ellipse(x, y + size * 0.8, 0.05, 0.05, MARK, 0)


def hand_of(side: int, angle: float) -> tuple[list[Point], Point]:
    """Shoulder, elbow and hand of an arm, and where the hand is. `side` is -1 at the left of the image."""
    shoulder = (side * 0.52, 0.08)
    a = math.radians(angle)
    elbow = (shoulder[0] + side * 0.2 * math.sin(a), shoulder[1] + 0.2 * math.cos(a) + 0.03)
    hand = (elbow[0] + side * 0.2 * math.sin(a), elbow[1] + 0.2 * math.cos(a) - 0.03)
    return [shoulder, elbow, hand], hand


def draw_pomo(canvas: OutlinedCanvas, pose: Pose) -> None:
    for side, angle in zip((-1, 1), pose.legs, strict=True):
        a = math.radians(angle)
        foot = (side * (0.18 + 0.3 * math.sin(a)), 0.56 + 0.32 * math.cos(a))
        canvas.limb([(side * 0.18, 0.5), foot], 0.1, SKIN)
        canvas.ellipse(foot[0] + side * 0.05, foot[1], 0.15, 0.08, SHOE)
    arm, hand = hand_of(1, pose.left_arm)
    # The sign stands upright whatever the arm does.
    top = hand[1] - 0.34
    canvas.limb([(hand[0], hand[1] + 0.16), (hand[0], top)], 0.045, STALK)
    canvas.polygon(
        [
            (hand[0] - 0.25, top - 0.21),
            (hand[0] + 0.25, top - 0.21),
            (hand[0] + 0.25, top + 0.21),
            (hand[0] - 0.25, top + 0.21),
        ],
        BOARD,
    )
    draw_mark(canvas, pose.sign, hand[0], top, 0.15)
    canvas.limb([(0.0, -0.5), (0.03, -0.68)], 0.05, STALK)
    leaf = [(0.03 + 0.34 * t, -0.66 - 0.16 * math.sin(math.pi * t) - 0.1 * t) for t in [i / 10 for i in range(11)]]
    leaf += [(0.03 + 0.34 * t, -0.66 + 0.1 * math.sin(math.pi * t) - 0.1 * t) for t in [1 - i / 10 for i in range(11)]]
    canvas.polygon(leaf, LEAF, 0.04)
    canvas.ellipse(0.0, 0.08, 0.6, 0.58, SKIN)
    canvas.ellipse(0.0, 0.34, 0.36, 0.26, BELLY, 0)
    for side in (-1, 1):
        canvas.ellipse(side * 0.4, 0.12, 0.09, 0.06, BLUSH, 0)
    draw_eyes(canvas, pose)
    draw_mouth(canvas, pose.mouth)
    other, other_hand = hand_of(-1, pose.right_arm)
    for points, place in ((arm, hand), (other, other_hand)):
        canvas.limb(points, 0.1, SKIN)
        canvas.ellipse(*place, 0.1, 0.1, GLOVE, 0.04)


def draw_pose(number: int) -> tuple[Image.Image, str]:
    """Image `number` and its caption."""
    rng = random.Random(f"pomo {number}")
    pose, background = POSES[number], BACKGROUNDS[number % len(BACKGROUNDS)]
    # Six images of each size, shared out so that no background meets one size only.
    width, height = SIZES[(number + number // len(SIZES)) % len(SIZES)]
    color = shifted(background, tuple(rng.randint(-8, 8) for _ in range(3)))
    image = shaded_canvas(width, height, color, rng.uniform(-16.0, 16.0))
    short = min(width, height)
    unit = rng.uniform(0.36, 0.41) * short
    canvas = OutlinedCanvas(2 * short * OVERSAMPLE, unit * OVERSAMPLE)
    draw_pomo(canvas, pose)
    layer = canvas.layer.rotate(-pose.lean, Image.Resampling.BICUBIC)
    layer = layer.convert("RGBa").resize((2 * short, 2 * short), Image.Resampling.BOX).convert("RGBA")
    # Its sign reaches further than its other hand.
    x, y = width / 2 - 0.18 * unit + rng.uniform(-0.03, 0.03) * short, height / 2 + rng.uniform(-0.02, 0.05) * short
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
