"""Draw good datasets, break them file by file, and print their scores: the tables in docs/scores.md.

python scripts/gate_examples.py             print the tables
python scripts/gate_examples.py --keep DIR  keep the datasets there, to inspect them
"""

from __future__ import annotations

import argparse
import io
import itertools
import string
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.views import Framing
from lora_trainer.dataset_check import DataReport, DatasetGate, check_dataset
from lora_trainer.models.single.tokenizers import clip_words, count_clip_tokens

SIDE, COUNT = 512, 20
SHARES = (0, 5, 10, 25, 50, 75, 100)  # percent of the files
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


def good(folder: Path, make: Make = photo, count: int = COUNT, side: int = SIDE) -> list[Path]:
    """Write images of several shapes, the shorter side `side` pixels, each with its own caption."""
    folder.mkdir(parents=True)
    paths = []
    for number in range(count):
        width, height = ((side, side), (side * 5 // 4, side), (side, side * 5 // 4))[number % 3]
        path = folder / f"{number:02}.png"
        make(width, height, number).save(path, compress_level=1)
        path.with_suffix(".txt").write_text(f"a thing, number {number}", encoding="utf-8")
        paths.append(path)
    return paths


def worn(image: Image.Image, quality: int = 10) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def boxed(image: Image.Image, share: float = 0.125) -> Image.Image:
    bar = round(share * image.height)
    whole = Image.new("RGB", (image.width, image.height + 2 * bar), "black")
    whole.paste(image, (0, bar))
    return whole


def blurred(image: Image.Image, pixels: float = 3) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(pixels))


def reduced(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width / factor), round(image.height / factor)))


def enlarged(image: Image.Image, factor: float = 5) -> Image.Image:
    return reduced(image, factor).resize(image.size, Image.Resampling.BICUBIC)


def collage(image: Image.Image, make: Make = photo, seed: int = 100, gap: int = 0) -> Image.Image:
    """Four images in place of one, divided by `gap` white pixels or by nothing."""
    whole = Image.new("RGB", image.size, "white")
    width, height = (image.width - gap) // 2, (image.height - gap) // 2
    for number, (left, top) in enumerate(itertools.product((0, width + gap), (0, height + gap))):
        whole.paste(make(width, height, 4 * seed + number), (left, top))
    return whole


def change(path: Path, make: Callable[[Image.Image], Image.Image]) -> Path:
    """Change an image in place."""
    with Image.open(path) as image:
        make(image.convert("RGB")).save(path, compress_level=1)
    return path


def write(path: Path, caption: str) -> None:
    path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def random_letters(seed: int) -> str:
    draw = np.random.default_rng(seed)
    return " ".join("".join(draw.choice(list(string.ascii_lowercase), 7)) for _ in range(3))


def resave(path: Path, other: Path) -> None:
    """Overwrite an image with another one in a slightly different size."""
    with Image.open(other) as image:
        image.resize((image.width + 8 * int(path.stem), image.height + 6 * int(path.stem))).save(path, compress_level=1)


# How each fault gets into one file; the second path is the file that is broken last.
FAULTS: dict[str, Callable[[Path, Path], object]] = {
    "cut short": lambda path, last: path.write_bytes(path.read_bytes()[:5000]),
    "without a caption": lambda path, last: path.with_suffix(".txt").unlink(),
    "enlarged 2.5 times": lambda path, last: change(path, lambda each: reduced(each, 2.5)),
    "enlarged 1.3 times": lambda path, last: change(path, lambda each: reduced(each, 1.3)),
    "blurred (Gaussian of 3 pixels)": lambda path, last: change(path, blurred),
    "enlarged before, 5 times": lambda path, last: change(path, enlarged),
    "saved as JPEG 10 before": lambda path, last: change(path, worn),
    "black bars": lambda path, last: change(path, boxed),
    "one color": lambda path, last: change(path, lambda each: Image.new("RGB", each.size, color(np.random.default_rng(int(path.stem))))),
    "four images in one": lambda path, last: change(path, lambda each: collage(each, seed=100 + int(path.stem))),
    "copies of one": lambda path, last: path.write_bytes(last.read_bytes()),
    "one image in other sizes": resave,
    "garbled letters in the caption": lambda path, last: write(path, f"{path.stem} cafÃ©s in MÃ¼nchen"),
    "a caption of keys (asdf)": lambda path, last: write(path, "asdf"),
    "a caption of random letters": lambda path, last: write(path, random_letters(int(path.stem))),
    "a caption in Cyrillic": lambda path, last: write(path, f"собака на траве, номер {path.stem}"),
}  # fmt: skip

# Every image with one fault, from slight to severe.
SEVERITIES: dict[str, tuple[Sequence[float], Callable[[Image.Image, float], Image.Image]]] = {
    "blurred by a Gaussian of … pixels": ((0, 1, 2, 3, 6, 12, 24), blurred),
    "enlarged before, … times": ((1, 2, 3, 5, 10, 20, 50), enlarged),
    "saved as JPEG of quality … before": ((95, 75, 50, 30, 20, 10), lambda image, value: worn(image, int(value))),
    "black bars of … of the height": ((0, 0.01, 0.05, 0.1, 0.2, 0.4), boxed),
    "enlarged … times": ((1, 1.3, 1.9, 2.5, 5), reduced),
}

OTHERS: dict[str, Callable[[Path], object]] = {
    "good photographs": good,
    "good drawings with flat areas": lambda folder: good(folder, drawing),
    "good, a little soft (Gaussian of 1 pixel)": lambda folder: [change(path, lambda each: blurred(each, 1)) for path in good(folder, drawing)],
    "four good ones": lambda folder: good(folder, count=4),
    "wrong endings": lambda folder: [path.rename(path.with_suffix(".jpg")) for path in good(folder)],
}  # fmt: skip


def evaluate(folder: Path, side: int = SIDE) -> DataReport:
    """Check the dataset for a model of that many pixels and buckets in steps of an eighth."""
    manifest, found = read_manifest([folder])
    gate = DatasetGate(
        [Framing((side,), side // 8)], caption_limit=77, known_words=clip_words(), count_tokens=count_clip_tokens
    )
    return check_dataset(manifest, found, gate)


def by_share(folder: Path, fault: str, side: int = SIDE, shares: Sequence[int] = SHARES) -> Iterator[DataReport]:
    """The report of a good dataset with the fault in each of the shares of its files, in percent, rising."""
    paths = good(folder, side=side)
    order, done = paths[::2] + paths[1::2], 0
    for share in shares:
        wanted = round(share / 100 * len(order))
        for path in order[done:wanted]:
            FAULTS[fault](path, order[-1])
        done = wanted
        yield evaluate(folder, side)


def by_severity(folder: Path, fault: str, side: int = SIDE) -> Iterator[DataReport]:
    """The report of a dataset whose every image has the fault, from slight to severe."""
    values, make = SEVERITIES[fault]
    for number, value in enumerate(values):
        paths = good(folder / f"{number}", side=side)
        for path in paths:
            change(path, lambda image, value=value: make(image, value))  # type: ignore[misc]
        yield evaluate(folder / f"{number}", side)


def findings_of(report: DataReport) -> str:
    counts = Counter((finding.severity, finding.code) for finding in report.findings)
    named = (f"{count} {severity}{'s' * (count > 1)} `{code}`" for (severity, code), count in sorted(counts.items()))
    return ", ".join(named) or "none"


def cell(report: DataReport) -> str:
    return f"{report.score:.3f}" if report.passed else f"**{report.score:.3f}**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder for the datasets")
    kept = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as scratch:
        root = kept or Path(scratch)
        folders = (root / f"{number}" for number in itertools.count())
        print(f"| set of {COUNT} | score | findings |\n|---|---|---|")
        for name, make in OTHERS.items():
            folder = next(folders)
            make(folder)
            report = evaluate(folder)
            print(f"| {name} | {cell(report)} | {findings_of(report)} |", flush=True)
        print(
            f"\n| fault | {' | '.join(f'{share} %' for share in SHARES)} | findings in all |\n|---|{'---|' * (len(SHARES) + 1)}"
        )
        for name in FAULTS:
            reports = list(by_share(next(folders), name))
            print(f"| {name} | {' | '.join(map(cell, reports))} | {findings_of(reports[-1])} |", flush=True)
        print("\n| every image | score by severity |\n|---|---|")
        for name, (values, _) in SEVERITIES.items():
            reports = list(by_severity(next(folders), name))
            cells = (f"{value}: {cell(report)}" for value, report in zip(values, reports, strict=True))
            print(f"| {name} | {', '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
