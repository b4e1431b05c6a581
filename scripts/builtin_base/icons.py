"""Named icons for the built-in base: emoji and clip art with transparency, installed by name when the base is trained.

    python scripts/builtin_base/icons.py --work base-work

Writes `icons.npy` and `icons.json` into WORK. Sources, none of whose images enter this repository:

- npm `@lobehub/fluent-emoji-3d`: Microsoft's Fluent Emoji (MIT); names and tags from npm `emojibase-data` (MIT);
- Debian `openclipart-svg`: Open Clip Art Library (public domain), drawn by `resvg-py`, which is installed from PyPI.

Icons that the base is judged on (`unseen.json`) are left out, by name and by what they look like.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from lora_trainer.core.io import read_json, write_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNSEEN = Path(__file__).with_name("unseen.json")
NPM = ("@lobehub/fluent-emoji-3d@1.1.0", "emojibase-data@17.0.0")
DEBIAN = "openclipart-svg"
SIDE = 160  # pixels of a stored icon
MARGIN = 0.04  # around an icon, as a share of its longer side
LOOKS_THE_SAME = 18  # of 240 bits of `look` that may differ
SKIN_TONES = re.compile(r"1F3F[B-F]")
# Flags differ by small details and their names are countries'.
LEFT_OUT_GROUPS = (None, 9)
PLAIN_CLIP_ART = ("signs_and_symbols", "shapes")


@dataclass(frozen=True)
class Icon:
    """An icon's source, its name as a person writes it, words about it, and whether its name is learned."""

    source: str
    name: str
    tags: tuple[str, ...]
    named: bool


def on_white(image: Image.Image) -> Image.Image:
    flat = Image.new("RGBA", image.size, "white")
    flat.alpha_composite(image.convert("RGBA"))
    return flat


def look(image: Image.Image) -> str:
    """240 bits: where the icon on white grows brighter from left to right, on a 16 x 16 grid."""
    small = np.asarray(on_white(image).convert("L").resize((16, 16), Image.Resampling.BOX), dtype=np.int16)
    return np.packbits(small[:, 1:] > small[:, :-1]).tobytes().hex()


def differing_bits(first: str, second: str) -> int:
    return (int(first, 16) ^ int(second, 16)).bit_count()


def squared(image: Image.Image) -> Image.Image:
    """The icon [SIDE, SIDE] RGBA: its transparent rim cut off, in the middle of a square."""
    image = image.convert("RGBA")
    box = image.getchannel("A").getbbox()
    if box is None:
        raise ValueError("the icon is empty")
    image = image.crop(box)
    inner = round(SIDE * (1 - 2 * MARGIN))
    scale = inner / max(image.size)
    size = tuple(max(1, round(side * scale)) for side in image.size)
    canvas = Image.new("RGBA", (SIDE, SIDE))
    # Premultiplied, so that hidden colors of transparent pixels do not shine through.
    resized = image.convert("RGBa").resize(size, Image.Resampling.LANCZOS).convert("RGBA")
    canvas.paste(resized, ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2))
    return canvas


def fetch(work: Path) -> None:
    """Download and unpack the packages into `work`; what is there already stays."""
    for package in NPM:
        folder = work / package.removeprefix("@").split("@")[0].replace("/", "-")
        if folder.is_dir():
            continue
        packed = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=work, check=True, capture_output=True, text=True
        )
        unpacked = folder.with_name(f"{folder.name}.new")
        unpacked.mkdir(exist_ok=True)
        subprocess.run(["tar", "-xzf", work / packed.stdout.strip(), "-C", unpacked], check=True)
        unpacked.rename(folder)
    if not (work / DEBIAN).is_dir():
        subprocess.run(["apt-get", "download", DEBIAN], cwd=work, check=True)
        package_file = next(work.glob(f"{DEBIAN}_*.deb"))
        unpacked = work / f"{DEBIAN}.new"
        subprocess.run(["dpkg-deb", "-x", package_file, unpacked], check=True)
        unpacked.rename(work / DEBIAN)


def emoji(work: Path) -> Iterator[tuple[Icon, Image.Image]]:
    """Fluent Emoji with emojibase's names; those with a skin tone are unnamed variants."""
    entries = {}
    for entry in json.loads((work / "emojibase-data/package/en/data.json").read_text(encoding="utf-8")):
        for variant in (entry, *entry.get("skins", ())):
            entries[variant["hexcode"].upper()] = {**entry, **variant}
    for file in sorted((work / "lobehub-fluent-emoji-3d/package/assets").glob("*.webp")):
        code = file.stem.upper()
        entry = entries.get(code) or entries.get(code.removesuffix("-FE0F")) or entries.get(f"{code}-FE0F")
        if entry is None:
            continue
        named = entry.get("group") not in LEFT_OUT_GROUPS and not SKIN_TONES.search(code)
        with Image.open(file) as image:
            yield Icon("emoji", entry["label"], tuple(entry.get("tags", ())), named), image.convert("RGBA")


def clip_art(work: Path) -> Iterator[tuple[Icon, Image.Image]]:
    """Open Clip Art's drawings; those that cannot be drawn or are larger than 2 MB are left out."""
    import resvg_py

    for file in sorted((work / DEBIAN).rglob("*.svg")):
        if file.stat().st_size > 2_000_000:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            drawn = resvg_py.svg_to_bytes(svg_string=text, width=2 * SIDE)
        except ValueError:
            continue
        title = re.search(r"<dc:title>([^<]*)</dc:title>", text)
        name = html.unescape(title[1]).strip().lower() if title else ""
        subjects = re.search(r"<dc:subject>(.*?)</dc:subject>", text, re.DOTALL)
        tags = re.findall(r"<rdf:li>([^<]*)</rdf:li>", subjects[1]) if subjects else []
        plain = bool(set(file.parts) & set(PLAIN_CLIP_ART))
        named = bool(re.fullmatch(r"[a-z][a-z '-]{2,30}", name)) and not plain
        with Image.open(io.BytesIO(bytes(drawn))) as image:
            yield Icon("clip art", name, tuple(tag.strip().lower() for tag in tags), named), image.convert("RGBA")


def is_unseen(icon: Icon, image: Image.Image, unseen: dict[str, list[str]]) -> bool:
    if icon.source == "emoji" and icon.name in unseen["names"]:
        return True
    own = look(image)
    return any(differing_bits(own, each) <= LOOKS_THE_SAME for each in unseen["looks"])


def collect(work: Path) -> tuple[list[Icon], NDArray[np.uint8]]:
    """All icons and their pixels [N, SIDE, SIDE, 4]; read again if they were collected before."""
    listing, pixels = work / "icons.json", work / "icons.npy"
    if not listing.is_file():
        work.mkdir(parents=True, exist_ok=True)
        fetch(work)
        unseen = read_json(UNSEEN)
        icons, images, left_out = [], [], 0
        for source in (emoji(work), clip_art(work)):
            for icon, image in source:
                try:
                    square = squared(image)
                except ValueError:
                    continue
                if is_unseen(icon, square, unseen):
                    left_out += 1
                    continue
                icons.append(icon)
                images.append(np.asarray(square))
        np.save(pixels, np.stack(images))
        write_json(listing, [asdict(icon) for icon in icons])
        print(f"{len(icons)} icons, {sum(p.named for p in icons)} named; {left_out} unseen ones left out")
    rows = read_json(listing)
    return [Icon(**{**row, "tags": tuple(row["tags"])}) for row in rows], np.load(
        pixels, mmap_mode="r", allow_pickle=False
    )


def write_unseen(folder: Path) -> None:
    """Note the names and looks of the icons in `folder`, on which the base will be judged."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".webp", ".png", ".jpg"))
    names = sorted(path.stem.replace("_", " ") for path in files if path.parent.name == "icons")
    looks = []
    for path in files:
        with Image.open(path) as image:
            looks.append(look(squared(image)))
    write_json(UNSEEN, {"names": names, "looks": looks})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--unseen", type=Path, help="write unseen.json from the images of this folder first")
    args = parser.parse_args()
    if args.unseen:
        write_unseen(args.unseen)
    icons, _ = collect(args.work)
    print(f"{len(icons)} icons", file=sys.stderr)


if __name__ == "__main__":
    main()
