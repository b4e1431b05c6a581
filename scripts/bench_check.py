"""Measure what reading and decoding many images costs, beside the plain library doing the same.

    python scripts/bench_check.py --images 100000

Draws that many JPEGs of 96 to 256 pixels with captions into a folder of their own (or takes
`--data DIR`), then prints wall and CPU time of each row, its ratio to the plain one,
and the load of the machine. Caches are in a temporary folder, so our first read is cold;
the files themselves are in the system's memory for every row.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from PIL import Image, ImageDraw

from lora_trainer.data.images import workers
from lora_trainer.data.images.decode import measure_images
from lora_trainer.data.images.images import IMAGE_ENDINGS
from lora_trainer.data.manifest import read_manifest

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample

FOLDER = 5000  # images in one folder


def draw(root: Path, count: int, first: int = 0) -> None:
    """Noise with shapes, as JPEG of about 10 KB, and a caption beside each."""
    random = np.random.default_rng(first)
    for number in range(first, first + count):
        width, height = (int(side) for side in random.integers(96, 257, 2))
        coarse = random.normal(128.0, 40.0, (8, 8, 3)).clip(0, 255).astype(np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        noisy = smooth + random.normal(0.0, 12.0, smooth.shape).astype(np.float32)
        image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        pen = ImageDraw.Draw(image)
        for _ in range(4):
            left, top, red, green = (int(value) for value in random.integers(0, 90, 4))
            pen.ellipse((left, top, left + 40, top + 30), fill=(red * 2, green * 2, number % 256))
        folder = root / f"{number // FOLDER:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number:07d}.jpg", quality=88)
        (folder / f"{number:07d}.txt").write_text(f"image {number} of shapes over noise", "utf-8")


def draw_all(root: Path, count: int) -> None:
    """Draw all images on all CPUs."""
    share = -(-count // workers.usable_cpus())
    with ThreadPoolExecutor(workers.usable_cpus()) as pool:
        list(pool.map(lambda first: draw(root, min(share, count - first), first), range(0, count, share)))


def cpu_seconds() -> float:
    """CPU seconds of this process and of its ended child processes."""
    workers._close_all()
    spent = psutil.Process().cpu_times()
    return float(spent.user + spent.system + spent.children_user + spent.children_system)


def timed(name: str, do: Callable[[], object], plain: tuple[float, float] | None = None) -> tuple[float, float]:
    """Run it, print a row and return (wall, CPU) seconds."""
    cpu_before, begun = cpu_seconds(), time.perf_counter()
    do()
    wall, spent = time.perf_counter() - begun, cpu_seconds() - cpu_before
    ratios = "" if plain is None else f"{wall / plain[0]:8.2f} {spent / plain[1]:8.2f}"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{name:34} {wall:9.1f} {spent:9.1f} {ratios:17} {load:6.1f}", flush=True)
    return wall, spent


def plain_header(path: Path) -> tuple[int, int]:
    """What the usual script does for one image: its size, its hash and its caption."""
    data = path.read_bytes()
    hashlib.sha256(data).hexdigest()
    caption = path.with_suffix(".txt")
    if caption.is_file():
        caption.read_text("utf-8")
    with Image.open(io.BytesIO(data)) as image:
        image.getexif()
        return image.size


def plain_decode(path: Path) -> None:
    with Image.open(path) as image:
        image.load()


def on_all_cpus(do: Callable[[Path], object], paths: Sequence[Path]) -> None:
    """In threads: Pillow releases the GIL while it decodes."""
    with ThreadPoolExecutor(workers.usable_cpus()) as pool:
        for _ in pool.map(do, paths, chunksize=64):
            pass


def measure(root: Path, most_decoded: int) -> None:
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS)
    size = sum(path.stat().st_size for path in paths) / max(1, len(paths)) / 1024
    print(f"{len(paths):,} images of {size:.1f} KiB on average; {workers.usable_cpus()} CPUs")
    print(f"{'':34} {'wall s':>9} {'CPU s':>9} {'wall':>8} {'CPU':>8} {'load':>6}")
    samples: list[Sample] = []

    def list_all() -> None:
        samples[:] = read_manifest([root], allow_missing_captions=True)[0].samples

    plain = timed("plain: size, hash, caption", lambda: [plain_header(path) for path in paths])
    timed("ours: all headers and captions", list_all, plain)
    timed("ours: again", list_all, plain)
    picked = samples[:most_decoded]
    print(f"{len(picked):,} of them decoded in full")
    plain = timed("plain: Image.load in threads", lambda: on_all_cpus(plain_decode, [s.path for s in picked]))
    timed("ours: decoded and measured", lambda: measure_images(picked), plain)
    timed("ours: again", lambda: measure_images(picked), plain)
    peak = psutil.Process().memory_info().rss / 2**20
    print(f"memory of this process: {peak:.0f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--decode", type=int, default=10_000, help="how many of them to decode in full")
    parser.add_argument("--data", type=Path, help="your own images instead of drawn ones")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_check_") as scratch:
        os.environ["LORA_TRAINER_CACHE"] = str(Path(scratch) / "cache")
        root = arguments.data or Path(scratch) / "images"
        if arguments.data is None:
            draw_all(root, arguments.images)
            time.sleep(2.5)  # a file written just now is not remembered
        measure(root, arguments.decode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
