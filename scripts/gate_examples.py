"""Draw good and bad datasets and print their scores and findings: the table in docs/scores.md.

python scripts/gate_examples.py             print the table
python scripts/gate_examples.py --keep DIR  keep the datasets there, to inspect them
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.views import Framing
from lora_trainer.dataset_check import DataReport, DatasetGate, check_dataset

SIDE, COUNT = 512, 20
Make = Callable[[int, int, int], Image.Image]


def color(draw: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in draw.integers(0, 256, 3))
    return red, green, blue


def photo(width: int, height: int, seed: int) -> Image.Image:
    """Noise whose power falls with frequency as in photographs, with a dozen sharp shapes on top."""
    draw = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :])
    frequency[0, 0] = np.inf
    waves = np.fft.fft2(draw.standard_normal((3, height, width))) / frequency**1.6
    planes = np.real(np.fft.ifft2(waves)).transpose(1, 2, 0)
    planes = planes / planes.std()
    mixed = 0.9 * planes.mean(axis=2, keepdims=True) + 0.5 * planes
    image = Image.fromarray(np.clip(128 + 50 * mixed, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        left, top = int(draw.integers(0, width)), int(draw.integers(0, height))
        across, down = draw.integers(width // 16, width // 4, 2)
        pen.ellipse((left, top, left + int(across), top + int(down)), fill=color(draw))
    return image


def drawing(width: int, height: int, seed: int) -> Image.Image:
    """Flat areas with outlines, softened a little by scaling, as in much drawn art."""
    draw = np.random.default_rng(seed)
    image = Image.new("RGB", (2 * width, 2 * height), color(draw))
    pen = ImageDraw.Draw(image)
    for _ in range(7):
        x, y = int(draw.integers(0, 2 * width)), int(draw.integers(0, 2 * height))
        radius = int(draw.integers(width // 4, width))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), color(draw), (20, 20, 20), 6)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def good(folder: Path, make: Make = photo, count: int = COUNT) -> list[Path]:
    """Write images of several shapes, each with its own caption."""
    folder.mkdir(parents=True)
    paths = []
    for number in range(count):
        width, height = ((SIDE, SIDE), (640, SIDE), (SIDE, 640))[number % 3]
        path = folder / f"{number:02}.png"
        make(width, height, number).save(path, compress_level=1)
        path.with_suffix(".txt").write_text(f"a thing, number {number}", encoding="utf-8")
        paths.append(path)
    return paths


def change_images(paths: list[Path], change: Callable[[Image.Image], Image.Image], each: int = 2) -> None:
    """Change every other image in place; with `each=1` change all of them."""
    for path in paths[::each]:
        change(Image.open(path).convert("RGB")).save(path, compress_level=1)


def worn(image: Image.Image, quality: int = 10) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def boxed(image: Image.Image) -> Image.Image:
    bar = image.height // 8
    whole = Image.new("RGB", (image.width, image.height + 2 * bar), "black")
    whole.paste(image, (0, bar))
    return whole


def enlarged(image: Image.Image) -> Image.Image:
    small = image.resize((image.width // 5, image.height // 5))
    return small.resize(image.size, Image.Resampling.BICUBIC)


def cut_short(paths: list[Path]) -> None:
    for path in paths[::2]:
        path.write_bytes(path.read_bytes()[:5000])


def without_captions(paths: list[Path]) -> None:
    for path in paths[::2]:
        path.with_suffix(".txt").unlink()


def copied(paths: list[Path]) -> None:
    for path in paths[::2]:
        path.write_bytes(paths[1].read_bytes())


def saved_again(paths: list[Path]) -> None:
    for number, path in enumerate(paths[::2]):
        image = Image.open(paths[1]).convert("RGB")
        image.resize((SIDE + 8 * number, SIDE + 6 * number)).save(path)


def garbled(paths: list[Path]) -> None:
    for path in paths[::2]:
        path.with_suffix(".txt").write_text("a cafÃ© in MÃ¼nchen", encoding="utf-8")


def typed(paths: list[Path], count: int) -> None:
    for path in paths[:count]:
        path.with_suffix(".txt").write_text("asdf", encoding="utf-8")


def misnamed(paths: list[Path]) -> None:
    for path in paths[::2]:
        path.rename(path.with_suffix(".jpg"))


SETS: dict[str, Callable[[Path], object]] = {
    "good photographs": lambda folder: good(folder),
    "good drawings with flat areas": lambda folder: good(folder, drawing),
    "good, a little soft (Gaussian of 1 pixel)": lambda folder: change_images(good(folder, drawing), lambda each: each.filter(ImageFilter.GaussianBlur(1))),
    "four good ones": lambda folder: good(folder, count=4),
    "half of the files cut short": lambda folder: cut_short(good(folder)),
    "half without a caption": lambda folder: without_captions(good(folder)),
    "half enlarged more than twice": lambda folder: change_images(good(folder), lambda each: each.resize((200, 200))),
    "half enlarged 1.3 times": lambda folder: change_images(good(folder), lambda each: each.resize((400, 400))),
    "half blurred (Gaussian of 3 pixels)": lambda folder: change_images(good(folder), lambda each: each.filter(ImageFilter.GaussianBlur(3))),
    "half enlarged before, 5 times": lambda folder: change_images(good(folder), enlarged),
    "half saved as JPEG 10 before": lambda folder: change_images(good(folder), worn),
    "half with black bars": lambda folder: change_images(good(folder), boxed),
    "half of one color": lambda folder: change_images(good(folder), lambda each: Image.new("RGB", each.size, "navy")),
    "half copies of one": lambda folder: copied(good(folder)),
    "half one image in other sizes": lambda folder: saved_again(good(folder)),
    "half with garbled captions": lambda folder: garbled(good(folder)),
    "one blurred": lambda folder: change_images(good(folder), lambda each: each.filter(ImageFilter.GaussianBlur(3)), COUNT),
    "one with the caption asdf": lambda folder: typed(good(folder), 1),
    "all blurred": lambda folder: change_images(good(folder), lambda each: each.filter(ImageFilter.GaussianBlur(3)), 1),
    "all saved as JPEG 8 before": lambda folder: change_images(good(folder), lambda each: worn(each, 8), 1),
    "all with black bars": lambda folder: change_images(good(folder), boxed, 1),
    "all with the caption asdf": lambda folder: typed(good(folder), COUNT),
    "all enlarged 1.3 times": lambda folder: change_images(good(folder), lambda each: each.resize((400, 400)), 1),
    "half with a wrong ending": lambda folder: misnamed(good(folder)),
}  # fmt: skip


def evaluate(folder: Path) -> DataReport:
    """Check the dataset for a model of 512 pixels and buckets in steps of 64."""
    manifest, found = read_manifest([folder])
    return check_dataset(manifest, found, DatasetGate([Framing((SIDE,), 64)], caption_limit=77))


def row(name: str, report: DataReport) -> str:
    """The dataset's line of the table."""
    counts = Counter((finding.severity, finding.code) for finding in report.findings)
    findings = [f"{count} {severity}{'s' * (count > 1)} `{code}`" for (severity, code), count in sorted(counts.items())]
    verdict = "passes" if report.passed else "refused"
    return f"| {name} | {report.score:.3f} | {verdict} | {', '.join(findings) or 'none'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder for the datasets")
    kept = parser.parse_args().keep
    print(f"| set of {COUNT} | score | verdict | findings |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in SETS.items():
            folder = (kept or Path(scratch)) / name.replace(" ", "_").replace(",", "").replace("(", "").replace(")", "")
            make(folder)
            print(row(name, evaluate(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
