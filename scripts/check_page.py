"""Write docs/check.png, the README's screenshot of a `check` page: a dataset with most kinds of faults.

    python scripts/check_page.py --keep DIR

The page and the dataset stay in DIR. With --page FILE, screenshots of that page, such as a run's report.html, are written
to DIR at the widths of a desktop and a phone (FILE-1280.png, FILE-390.png), and it fails if the page is wider than one of them:

    python scripts/check_page.py --keep DIR --page runs/cat/report.html

Needs chromium.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageFilter

from gate_examples import boxed, good, worn
from lora_trainer.cli.main import main as command

SIZE = (1280, 1918)
IMAGE = Path(__file__).parents[1] / "docs" / "check.png"
WIDTHS = (1280, 390)
# A window of Chromium has at least 500 pixels, so the page is in a frame; the title is read from the dumped document.
FRAME = """<!doctype html><body style="margin:0"><iframe src="{page}" style="width:{width}px;height:6000px;border:0"
onload="const d = this.contentDocument.documentElement; this.style.height = d.scrollHeight + 'px';
document.title = d.scrollWidth + 'x' + d.scrollHeight"></iframe>"""


def write_faulty(folder: Path) -> None:
    """Write twenty good images, then truncate one, blur two and give others one fault each."""
    paths = good(folder)
    paths[0].write_bytes(paths[0].read_bytes()[:5000])
    Image.open(paths[1]).resize((560, 600)).save(paths[2])
    shutil.copy(paths[1], paths[4])
    for path, change in ((paths[6], worn), (paths[8], boxed), *((each, soft) for each in (paths[10], paths[12]))):
        change(Image.open(path).convert("RGB")).save(path)
    paths[14].with_suffix(".txt").unlink()


def soft(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(4))


def chromium(*options: str) -> str:
    """Run a headless Chromium and return what it prints."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium was not found. Install it.")
    fixed = ["--headless", "--no-sandbox", "--hide-scrollbars", "--allow-file-access-from-files"]
    return subprocess.run([browser, *fixed, *options], check=True, timeout=120, capture_output=True, text=True).stdout


def shoot(page: Path, folder: Path, width: int) -> int:
    """Write a screenshot of the whole page at a width; returns how wide the page is."""
    frame, shot = folder / "frame.html", folder / f"{page.stem}-{width}.png"
    frame.write_text(FRAME.format(page=page.resolve().as_uri(), width=width), encoding="utf-8")
    title = re.search(r"<title>([0-9]+)x([0-9]+)</title>", chromium("--dump-dom", frame.resolve().as_uri()))
    assert title is not None, "the page was not loaded"
    chromium(f"--window-size={max(width, 500)},{title[2]}", f"--screenshot={shot}", frame.resolve().as_uri())
    Image.open(shot).crop((0, 0, width, int(title[2]))).save(shot)
    print(f"{shot}: the page is {title[1]} pixels wide")
    frame.unlink()
    return int(title[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", required=True, help="a folder for what is written")
    parser.add_argument("--image", type=Path, metavar="FILE", default=IMAGE)
    parser.add_argument("--page", type=Path, metavar="FILE", help="take screenshots of this page, and nothing else")
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.page is not None:
        wider = [width for width in WIDTHS if shoot(arguments.page, arguments.keep, width) > width]
        return int(bool(wider))
    data, page = arguments.keep / "faulty", arguments.keep / "check.html"
    write_faulty(data)
    command(["check", str(data), "--html", str(page)])
    shot = arguments.keep / "shot.png"
    chromium(f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}", page.resolve().as_uri())
    # 256 colors are enough for a page and a quarter of the bytes.
    Image.open(shot).convert("RGB").quantize(256).save(arguments.image, optimize=True)
    print(f"{arguments.image}: {arguments.image.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
