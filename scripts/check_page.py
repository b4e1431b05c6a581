"""Write docs/check.png, the README's screenshot of a `check` page: a dataset with most kinds of faults.

    python scripts/check_page.py --keep DIR

Needs chromium. The page and the dataset stay in DIR.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageFilter

from gate_examples import boxed, good, worn
from lora_trainer.cli.main import main as command

SIZE = (1280, 1918)
IMAGE = Path(__file__).parents[1] / "docs" / "check.png"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", required=True, help="an empty folder for the dataset and its page"
    )
    parser.add_argument("--image", type=Path, metavar="FILE", default=IMAGE)
    arguments = parser.parse_args()
    data, page = arguments.keep / "faulty", arguments.keep / "check.html"
    write_faulty(data)
    command(["check", str(data), "--html", str(page)])
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium was not found. Install it.")
    shot = arguments.keep / "shot.png"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE[0]},{SIZE[1]}"]
    subprocess.run([browser, *options, f"--screenshot={shot}", page.resolve().as_uri()], check=True, timeout=60)
    # 256 colors are enough for a page and a quarter of the bytes.
    Image.open(shot).convert("RGB").quantize(256).save(arguments.image, optimize=True)
    print(f"{arguments.image}: {arguments.image.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
