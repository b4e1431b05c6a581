"""What the dataset check finds on real images: a fault is planted into some of 40 images, and the check is asked.

    python scripts/dataset_check_study.py FOLDER FOLDER …
    python scripts/dataset_check_study.py FOLDER --faults black moved --trials 60

Each folder is a set, with its subfolders. First its images are checked as they are, and what the check says of them is listed file by
file: look at them, because some have the fault. Then each fault is planted into one image of 40, into 8 and into all of them, and the
table says in which share of them it was found, with Wilson's 95 % interval. Nothing is written into the folders.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gate_examples import boxed, evaluate
from lora_trainer.data.images.images import IMAGE_ENDINGS, load_rgb
from lora_trainer.dataset_check.image_texts import can_read, find_texts
from lora_trainer.evaluation.verdict import Estimate

if TYPE_CHECKING:
    from lora_trainer.dataset_check import DataReport

SIDE = 768  # pixels of an image's longer side before the fault
COUNT = 40
PLANTED = {"1 of 40": 1, "20 %": 8, "100 %": 40}
Plant = Callable[[Image.Image, Sequence[Image.Image], random.Random], Image.Image]  # of an image; three others
# Of whole images: what they are in, and not whether they are good.
NO_FAULTS = {"upscaled", "too_small", "cropped", "transparent", "mirrored", "series", "wrong_ending", "animated"}


@dataclass(frozen=True)
class Fault:
    """How a fault gets into an image, and the findings that name it. A copy is of another image, and both stay in the set."""

    plant: Plant
    codes: tuple[str, ...] = ()
    is_copy: bool = False
    quality: int = 95  # of the JPEG that is written; 0 for PNG


def simple(change: Callable[[Image.Image], Image.Image]) -> Plant:
    return lambda image, others, rng: change(image)


def burnt_out(image: Image.Image) -> Image.Image:
    """Exposed so long that 60 % of the pixels are white in all channels."""
    values = np.asarray(image, dtype=np.float64)
    level = max(8.0, float(np.quantile(values.min(axis=2), 0.4)))
    return Image.fromarray((values * 255 / level).round().clip(0, 255).astype(np.uint8))


def enlarged(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    factor = rng.choice((2, 3, 4, 6))
    small = image.resize((image.width // factor, image.height // factor), Image.Resampling.BOX)
    return small.resize((small.width * factor, small.height * factor), Image.Resampling.NEAREST)


def noisy(levels: float) -> Callable[[Image.Image], Image.Image]:
    def change(image: Image.Image) -> Image.Image:
        values = np.asarray(image, dtype=np.float64)
        noise = np.random.default_rng(int(values.sum()) % 2**32).normal(0.0, levels, values.shape)
        return Image.fromarray((values + noise).round().clip(0, 255).astype(np.uint8))

    return change


def moved(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """Along a straight line of 30 pixels in any direction."""
    angle = rng.uniform(0, np.pi)
    total = np.zeros((image.height, image.width, 3))
    steps = np.linspace(-15, 15, 31)
    for step in steps:
        place = (1, 0, step * np.cos(angle), 0, 1, step * np.sin(angle))
        total += np.asarray(image.transform(image.size, Image.Transform.AFFINE, place, Image.Resampling.BILINEAR))
    whole = Image.fromarray((total / len(steps)).round().astype(np.uint8))
    return whole.crop((16, 16, image.width - 16, image.height - 16))


def grainy(image: Image.Image) -> Image.Image:
    return noisy(8)(image.filter(ImageFilter.GaussianBlur(3)))


def dated(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    image = image.copy()
    text = f"{rng.randint(1, 28)} {rng.randint(1, 12)} '{rng.randint(90, 99)}"
    place = round(0.75 * image.width), round(0.92 * image.height)
    ImageDraw.Draw(image).text(place, text, (255, 140, 30), ImageFont.load_default(0.05 * image.height))
    return image


def marked(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """A word across the middle, half of it seen through."""
    layer = Image.new("RGBA", image.size)
    font = ImageFont.load_default(0.11 * image.width)
    ImageDraw.Draw(layer).text((0.1 * image.width, 0.45 * image.height), "stockphoto", (255, 255, 255, 128), font)
    whole = image.convert("RGBA")
    whole.alpha_composite(layer)
    return whole.convert("RGB")


def screenshot(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """A phone that shows the image in a program: a bar with clock and battery, a title, and buttons below."""
    width, height = rng.choice(((1080, 2340), (1170, 2532), (1080, 1920)))
    paper, ink = rng.choice((("white", "black"), ("black", "white"), ((18, 18, 18), "white"), ((0, 90, 120), "white")))
    whole = Image.new("RGB", (width, height), paper)
    pen = ImageDraw.Draw(whole)
    bar = round(0.035 * height)
    font, larger = (ImageFont.load_default(share * bar) for share in (0.5, 0.9))
    pen.text((0.06 * width, 0.25 * bar), f"{rng.randint(0, 23)}:{rng.randint(10, 59)}", ink, font)
    pen.text((0.78 * width, 0.25 * bar), "5G", ink, font)
    pen.rectangle((0.88 * width, 0.32 * bar, 0.94 * width, 0.68 * bar), outline=ink, width=3)
    pen.rectangle((0.885 * width, 0.38 * bar, 0.92 * width, 0.62 * bar), fill=ink)
    pen.text((0.06 * width, 1.6 * bar), "Photos", ink, larger)
    shown = ImageOps.contain(image, (width, round(0.7 * height)))
    whole.paste(shown, ((width - shown.width) // 2, round(0.12 * height)))
    for place in (0.2, 0.5, 0.8):
        left, top = place * width, 0.94 * height
        pen.ellipse((left - 0.7 * bar, top - 0.7 * bar, left + 0.7 * bar, top + 0.7 * bar), outline=ink, width=4)
    return whole


def cut(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """85 % of both sides, anywhere."""
    width, height = (round(0.85 * side) for side in image.size)
    left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
    return image.crop((left, top, left + width, top + height))


def turned(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    """By 3°, without the corners that this leaves empty."""
    whole = image.rotate(rng.choice((-3, 3)), Image.Resampling.BICUBIC)
    lost = [round(0.06 * side) for side in image.size]
    return whole.crop((lost[0], lost[1], image.width - lost[0], image.height - lost[1]))


def framed(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
    color = rng.choice(("white", "black", (180, 150, 90)))
    return ImageOps.expand(image, round(0.06 * max(image.size)), color)


def beside_others(columns: int, rows: int, gap: int) -> Plant:
    def plant(image: Image.Image, others: Sequence[Image.Image], rng: random.Random) -> Image.Image:
        parts = [image, *others[: columns * rows - 1]]
        size = (image.width - gap * (columns - 1)) // columns, (image.height - gap * (rows - 1)) // rows
        whole = Image.new("RGB", image.size, "white")
        for number, part in enumerate(parts):
            place = number % columns * (size[0] + gap), number // columns * (size[1] + gap)
            whole.paste(ImageOps.fit(part, size), place)
        return whole

    return plant


def upside_down(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.ROTATE_180)


FAULTS: Mapping[str, Fault] = {
    "black, 8 % of its light": Fault(
        simple(lambda image: image.point(lambda value: round(0.08 * value))), ("underexposed", "uniform")
    ),
    "burnt out, 60 % white": Fault(simple(burnt_out), ("overexposed", "uniform")),
    "enlarged by nearest neighbor, 2 to 6 times": Fault(enlarged, ("pixelated",)),
    "noise of 40 levels": Fault(simple(noisy(40)), ("noisy",)),
    "2 bits a channel": Fault(simple(lambda image: ImageOps.posterize(image, 2)), ("posterized",)),
    "inverted": Fault(simple(ImageOps.invert)),
    "sideways": Fault(simple(lambda image: image.transpose(Image.Transpose.ROTATE_90))),
    "upside down": Fault(simple(upside_down)),
    "squashed to 60 %": Fault(simple(lambda image: image.resize((round(0.6 * image.width), image.height)))),
    "moved by 30 pixels, any direction": Fault(moved, ("motion_blur", "blurred")),
    "Gaussian of 3 pixels": Fault(simple(lambda image: image.filter(ImageFilter.GaussianBlur(3))), ("blurred",)),
    "Gaussian of 3 pixels under noise of 8": Fault(simple(grainy), ("blurred",)),
    "JPEG 10 of 1,024 × 1,024": Fault(
        simple(lambda image: ImageOps.fit(image, (1024, 1024))), ("over_compressed",), quality=10
    ),
    "a date in the corner": Fault(dated, ("text_on_image",)),
    "a word across the middle": Fault(marked, ("text_on_image",)),
    "screenshot of a phone": Fault(screenshot, ("screenshot",), quality=0),
    "copy cut to 85 %": Fault(cut, ("near_duplicate",), is_copy=True),
    "copy turned by 3°": Fault(turned, ("near_duplicate",), is_copy=True),
    "copy in a frame": Fault(framed, ("near_duplicate",), is_copy=True),
    "black bars": Fault(simple(boxed), ("border",)),
    "two images side by side, a seam": Fault(beside_others(2, 1, 0), ("collage",)),
    "four images, seams": Fault(beside_others(2, 2, 0), ("collage",)),
    "four images, white gutters": Fault(beside_others(2, 2, 8), ("collage",)),
}


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS and path.is_file())


def write(image: Image.Image, place: Path, quality: int) -> None:
    if quality:
        image.save(place.with_suffix(".jpg"), quality=quality)
    else:
        image.save(place.with_suffix(".png"), compress_level=1)


def check_untouched(folder: Path, work: Path) -> tuple[DataReport, float]:
    """The report on a set as it is, and the seconds that it took. Captions are no part of it, so each image has one of its own."""
    place = work / "untouched"
    place.mkdir()
    for number, path in enumerate(files_of(folder)):
        (place / f"{number:04}_{path.name}").symlink_to(path.resolve())
        (place / f"{number:04}_{path.stem}.txt").write_text(f"a thing, number {number}", encoding="utf-8")
    began = time.perf_counter()
    report = evaluate(place)
    seconds = time.perf_counter() - began
    shutil.rmtree(place)
    return report, seconds


def print_untouched(folder: Path, report: DataReport, seconds: float) -> None:
    print(
        f"\n{folder}: {report.counted} images as they are, score {report.score:.3f}, {1000 * seconds / report.counted:.0f} s for 1,000"
    )
    for code, found in report.grouped:
        if code not in NO_FAULTS:
            names = ", ".join(report.name_of(each.path) for each in found if each.path is not None)
            print(f"  {found[0].severity} {code}: {len(found)} {names}")


def share(found: int, of: int) -> str:
    interval = Estimate.of_share(found / of, of)
    return f"{found} of {of} [{interval.low:.0%} {interval.high:.0%}]"


class Study:
    """The images of one set, made smaller once, and the trials with them."""

    def __init__(self, folder: Path, work: Path) -> None:
        self._files = files_of(folder)
        self._kept = work / folder.name
        self._place = work / "trial"

    def smaller(self, path: Path) -> Path:
        """The image with at most SIDE pixels on its longer side, as JPEG 95."""
        kept = self._kept / f"{path.parent.name}_{path.stem}.jpg"
        if not kept.is_file():
            kept.parent.mkdir(exist_ok=True)
            image = load_rgb(path)
            if max(image.size) > SIDE:
                image = ImageOps.contain(image, (SIDE, SIDE), Image.Resampling.LANCZOS)
            image.save(kept, quality=95)
        return kept

    def trial(self, fault: Fault, count: int, rng: random.Random) -> tuple[int, int, DataReport]:
        """In how many images the fault was found, of how many, and the report on 40 images of the set, or on all if fewer."""
        self._place.mkdir()
        chosen = [self.smaller(path) for path in rng.sample(self._files, min(COUNT, len(self._files)))]
        # A copy takes the place of another image of the set.
        count = min(count, len(chosen) // 2 if fault.is_copy else len(chosen))
        for number, path in enumerate(chosen):
            place = self._place / f"{number:02}"
            if number < count:
                source = chosen[-1 - number] if fault.is_copy else path
                others = [load_rgb(each) for each in rng.sample(chosen, 3)]
                write(fault.plant(load_rgb(source), others, rng), place, fault.quality)
            else:
                os.link(path, place.with_suffix(".jpg"))
            place.with_suffix(".txt").write_text(f"a thing, number {number}", encoding="utf-8")
        report = evaluate(self._place)
        found = sum(is_found(report, fault, number, len(chosen) - 1 - number) for number in range(count))
        if "text_on_image" in fault.codes and can_read():
            found = len(find_texts([each for each in report.samples if int(each.path.stem) < count]))
        shutil.rmtree(self._place)
        return found, count, report


def is_found(report: DataReport, fault: Fault, number: int, original: int) -> bool:
    if fault.is_copy:
        names = {f"{number:02}", f"{original:02}"}
        return any(names <= {path.stem for path in group} for group in report.groups)
    return any(
        finding.code in fault.codes
        for path, findings in report.files.items()
        if path.stem == f"{number:02}"
        for finding in findings
    )


def print_table(studies: Sequence[Study], names: Sequence[str], trials: int) -> None:
    print(f"\n| fault | {' | '.join(PLANTED)} | score of 100 % |\n|---|{'---|' * (len(PLANTED) + 1)}")
    for name in names:
        cells, scores = [], []
        for label, count in PLANTED.items():
            rng = random.Random(f"{name} {label}")
            rounds = [
                studies[number % len(studies)].trial(FAULTS[name], count, rng)
                for number in range(max(len(studies), trials // count))
            ]
            cells.append(share(sum(found for found, _, _ in rounds), sum(of for _, of, _ in rounds)))
            scores = [report.score for *_, report in rounds]
        print(f"| {name} | {' | '.join(cells)} | {np.mean(scores):.3f} |", flush=True)


def print_twice(study: Study, files: Sequence[Path], place: Path) -> None:
    """Images, and each of them a second time: as the same file, and saved again."""
    for name, quality in (("the same file", 0), ("saved again as JPEG 80", 80)):
        place.mkdir()
        for number, path in enumerate(files):
            for copy in ("", "b"):
                target = place / f"{number:02}{copy}.jpg"
                if copy and quality:
                    load_rgb(study.smaller(path)).save(target, quality=quality)
                else:
                    shutil.copy(study.smaller(path), target)
                target.with_suffix(".txt").write_text(f"a thing, number {target.stem}", encoding="utf-8")
        report = evaluate(place)
        print(f"every image twice, {name}: score {report.score:.3f}, {'passed' if report.passed else 'refused'}")
        shutil.rmtree(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), help="beginnings of the names of faults")
    parser.add_argument("--trials", type=int, default=40, help="at least one; images with the fault in each column")
    arguments = parser.parse_args()
    names = [name for name in FAULTS if name.startswith(tuple(arguments.faults))]
    with tempfile.TemporaryDirectory() as work:
        os.environ["LORA_TRAINER_CACHE"] = work  # measures are kept there, so that an untouched image is measured once
        for folder in arguments.folders:
            print_untouched(folder, *check_untouched(folder, Path(work)))
        if names:
            studies = [Study(folder, Path(work)) for folder in arguments.folders]
            print_table(studies, names, arguments.trials)
            print_twice(studies[0], files_of(arguments.folders[0])[: COUNT // 2], Path(work) / "twice")


if __name__ == "__main__":
    main()
