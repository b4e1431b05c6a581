"""Scenes of named icons for the built-in base, the hundred names that it is judged on, and that judge.

    python scripts/builtin_base/named.py --work base-work [--base lora_trainer/builtin/base] [--sheet FILE.png]

The judge compares features that took no part in the training: histograms of oriented gradients (Dalal and Triggs 2005)
and mean colors on a grid. A drawn icon is right if, of 300 icons, the one of its name is the nearest.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base.drawing import COLORS, shaded_canvas, shifted
from builtin_base.icons import Icon, collect
from lora_trainer.evaluation.verdict import Estimate

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAMES = Path(__file__).with_name("names.json")
JUDGED, AMONG = 100, 300
PEOPLE = re.compile(
    r"\b(man|men|woman|women|person|people|boy|girl|child|family|couple|kiss|button|face|keycap|o’clock)\b"
)
TEMPLATES = (
    "{a} {name} on a {background} background",
    "a picture of {a} {name} on a {background} background",
    "{name}, {background} background",
    "an icon of {a} {name} in front of {background}",
)
PROMPT = "an icon of {a} {name} in front of white"
CELL = 16  # pixels of a cell of the gradients' histograms
DIRECTIONS = 9
SIDE = 128


@dataclass(frozen=True)
class NamedScene:
    """An icon on a background; `x`, `y` and `size` are fractions of the shorter side."""

    icon: int
    name: str
    background: str
    x: float
    y: float
    size: float
    shade: float
    jitter: tuple[int, int, int]

    def captions(self) -> tuple[str, ...]:
        return tuple(filled(template, self.name, self.background) for template in TEMPLATES)


def filled(template: str, name: str, background: str) -> str:
    article = "an" if name[0] in "aeiou" and not name.startswith("one") else "a"
    return template.format(a=article, name=name, background=background)


def spoken(name: str) -> str:
    """A name as it stands in captions: "clock: one-thirty" is "one-thirty clock"."""
    head, _, detail = name.lower().partition(": ")
    return f"{detail} {head}" if detail else head


def random_named_scene(icons: list[Icon], numbers: list[int], rng: random.Random) -> NamedScene:
    number = rng.choice(numbers)
    return NamedScene(
        icon=number,
        name=spoken(icons[number].name),
        background="white" if rng.random() < 0.4 else rng.choice(sorted(COLORS)),
        x=rng.uniform(-0.05, 0.05),
        y=rng.uniform(-0.05, 0.05),
        size=rng.uniform(0.8, 0.98),
        shade=rng.uniform(-12.0, 12.0),
        jitter=tuple(rng.randint(-8, 8) for _ in range(3)),
    )


def show(scene: NamedScene, pixels: NDArray[np.uint8], width: int = SIDE, height: int = SIDE) -> Image.Image:
    """The RGB image of a scene; `pixels` are all icons' [N, side, side, 4]."""
    canvas = shaded_canvas(width, height, shifted(scene.background, scene.jitter), scene.shade)
    short = min(width, height)
    side = round(scene.size * short)
    icon = Image.fromarray(pixels[scene.icon]).convert("RGBa").resize((side, side), Image.Resampling.LANCZOS)
    icon = icon.convert("RGBA")
    place = (round((width - side) / 2 + scene.x * short), round((height - side) / 2 + scene.y * short))
    canvas.paste(icon, place, icon)
    return canvas


def learned(icons: list[Icon]) -> list[int]:
    """The icons whose names are learned: emoji."""
    return [number for number, icon in enumerate(icons) if icon.source == "emoji" and icon.named]


def choose_names(icons: list[Icon]) -> dict[str, list[str]]:
    """300 things of one or two words, no people and faces, of which the first 100 are judged; by chance alone."""
    names = sorted({p.name for p in (icons[i] for i in learned(icons)) if re.fullmatch(r"[a-z]+( [a-z]+)?", p.name)})
    chosen = random.Random(20_000).sample([name for name in names if not PEOPLE.search(name)], AMONG)
    return {"judged": chosen[:JUDGED], "among": chosen}


def features(image: Image.Image) -> NDArray[np.float32]:
    """Gradients' histograms by cell, and colors of an 8 x 8 grid, each of unit length."""
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float32) / 255.0
    gray = pixels.mean(axis=2)
    dy, dx = np.gradient(gray)
    strength = np.hypot(dx, dy)
    direction = (np.arctan2(dy, dx) % math.pi) / math.pi * DIRECTIONS
    low = np.floor(direction).astype(int)
    share = direction - low
    cells = SIDE // CELL
    found = np.zeros((cells, cells, DIRECTIONS), np.float32)
    rows, columns = (index // CELL for index in np.indices(gray.shape))
    np.add.at(found, (rows, columns, low % DIRECTIONS), strength * (1 - share))
    np.add.at(found, (rows, columns, (low + 1) % DIRECTIONS), strength * share)
    found = np.sqrt(found / (np.linalg.norm(found, axis=2, keepdims=True) + 0.5)).ravel()
    grid = pixels.reshape(8, SIDE // 8, 8, SIDE // 8, 3).mean(axis=(1, 3)).ravel() - 0.5
    return np.concatenate(
        [found / max(1e-6, float(np.linalg.norm(found))), grid / max(1e-6, float(np.linalg.norm(grid)))]
    )


def nearest(images: list[Image.Image], references: list[Image.Image]) -> list[int]:
    """For each image the reference whose features are the most similar, once both sets are centered."""
    own, theirs = (np.stack([features(image) for image in each]) for each in (images, references))
    middle = theirs.mean(axis=0)
    own, theirs = own - middle, theirs - middle
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    return [int(row.argmax()) for row in own @ theirs.T]


def references(names: list[str], icons: list[Icon], pixels: NDArray[np.uint8]) -> list[Image.Image]:
    """Each name's icon on white."""
    numbers = {icons[i].name: i for i in learned(icons)}
    plain = {"background": "white", "x": 0.0, "y": 0.0, "size": 0.9, "shade": 0.0, "jitter": (0, 0, 0)}
    return [show(NamedScene(icon=numbers[name], name=name, **plain), pixels) for name in names]


def sheet_of(names: list[str], drawn: list[Image.Image], right: list[bool]) -> Image.Image:
    """Each name's image; the names of those that are right are green."""
    columns, side, foot = 10, 96, 16
    rows = -(-len(names) // columns)
    sheet = Image.new("RGB", (columns * (side + 4), rows * (side + foot)), "white")
    pen = ImageDraw.Draw(sheet)
    for i, name in enumerate(names):
        x, y = i % columns * (side + 4), i // columns * (side + foot)
        sheet.paste(drawn[i].resize((side, side), Image.Resampling.LANCZOS), (x, y))
        pen.text((x + 2, y + side), name, fill=(20, 120, 50) if right[i] else (170, 40, 40), font_size=10)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder of icons.py")
    parser.add_argument("--base", type=Path, default=Path("lora_trainer/builtin/base"))
    parser.add_argument("--sheet", type=Path, help="write the hundred images here")
    parser.add_argument("--choose", action="store_true", help="write names.json, once, before anything is trained")
    args = parser.parse_args()
    icons, pixels = collect(args.work)
    if args.choose:
        NAMES.write_text(json.dumps(choose_names(icons), indent=0) + "\n", encoding="utf-8")
        return
    from builtin_base.judge import sample

    names = json.loads(NAMES.read_text(encoding="utf-8"))
    real = references(names["among"], icons, pixels)
    drawn = sample(args.base, [filled(PROMPT, spoken(name), "white") for name in names["judged"]])
    right = [place == i for i, place in enumerate(nearest(drawn, real))]
    found = Estimate.of_share(sum(right) / len(right), len(right))
    print(
        f"{sum(right)} of {len(right)} names right among {len(real)}: {found.low:.3f} to {found.high:.3f}, chance {1 / len(real):.4f}"
    )
    if args.sheet:
        sheet_of(names["judged"], drawn, right).save(args.sheet)


if __name__ == "__main__":
    main()
