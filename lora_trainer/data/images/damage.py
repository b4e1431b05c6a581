"""Damaged images that their decoders show without a word: cut, or with zeros in place of their end.

What is looked for costs nearly nothing where nothing is wrong. Only PNG has checksums: what was exchanged or zeroed in
the middle of other formats is not found.
"""

from __future__ import annotations

import functools
import io
import os
import random
import re
import struct
from collections.abc import Callable
from typing import BinaryIO

import numpy as np
from PIL import Image

from lora_trainer.data.images.images import BrokenImageError

RAW_FORMATS = ("BMP", "PPM", "TIFF")
CODED_FORMATS = ("WEBP", "AVIF")
FEWEST_ZEROS, PIXELS_A_ZERO = 64, 3000  # of one color, WebP's own code ends in a byte of zeros for 5,000 pixels
GRAY = (127, 128)  # what libjpeg shows of blocks that are missing
CORNER = 4  # pixels of the side of the part that comes last
BYTES_A_PIXEL = 0.25  # more than noise takes that fills the rest of a JPEG
FEWEST_MISSING, FULL = 2, 0.9  # pixels of a row; share of those that are there or above them that are not black
WEBP_PIXELS = (b"VP8 ", b"VP8L", b"ALPH", b"ANMF")
SCAN, END, RESTARTS, INTERVAL = b"\xff\xda", b"\xff\xd9", rb"\xff[\xd0-\xd7]", 0xDD


def refuse_cut_off(image: Image.Image, open_again: Callable[[], BinaryIO]) -> bool:
    """Raise BrokenImageError for a decoded image whose end is missing. `open_again` opens the bytes of its file.

    Whether the end may be missing of a format whose pixels alone can show it: a drawing on black may end so, too.
    """
    is_cut = False
    if image.format in ("JPEG", "MPO"):
        is_cut = _is_jpeg_cut(image, open_again)
    elif image.format in CODED_FORMATS:
        with open_again() as file:
            data = file.read()
        data = data[: _end_of(image.format, data)].removesuffix(image.info.get("exif") or b"")
        zeros = len(data) - len(data.rstrip(b"\0"))
        is_cut = zeros > FEWEST_ZEROS + image.width * image.height / PIXELS_A_ZERO
    if is_cut:
        fix = "Copy or download it again, or remove it."
        raise BrokenImageError("unreadable", "is cut off: its end is missing or full of zeros.", fix)
    return image.format in RAW_FORMATS and _ends_in_a_row(image)


def _is_jpeg_cut(image: Image.Image, open_again: Callable[[], BinaryIO]) -> bool:
    """Whether a JPEG lacks some of its pixels. The file is read where its end shows a sign of it, or only its scans can."""
    corner = image.crop((image.width - CORNER, image.height - CORNER, image.width, image.height))
    is_gray = set(np.unique(np.asarray(corner)).tolist()) <= set(GRAY)
    with open_again() as file:
        file.seek(-FEWEST_ZEROS, os.SEEK_END)
        has_zeros = not file.read().strip(b"\0")  # as an interrupted copy leaves it
        if not (is_gray or has_zeros or "progressive" in image.info):
            return False
        file.seek(0)
        return _ends_early(image, file.read(), corner)


def _ends_early(image: Image.Image, data: bytes, corner: Image.Image) -> bool:
    """Whether the scans of a JPEG end before its pixels do, in front of the mark of its end."""
    start, interval = 2, 0
    while data[start : start + 2] != SCAN:  # past thumbnails
        if data[start + 1] == INTERVAL:
            interval = int.from_bytes(data[start + 4 : start + 6])
        start += 2 + int.from_bytes(data[start + 2 : start + 4])
        if start + 4 > len(data):
            return False
    end = data.find(END, start)
    if end < 0:
        return data.endswith(bytes(FEWEST_ZEROS))
    if "progressive" in image.info:
        return _lacks_scans(data, start, end)
    layers = image.layer  # type: ignore[attr-defined]
    if interval:
        width, height = (8 * max(layer[place] for layer in layers) if len(layers) > 1 else 8 for place in (1, 2))
        blocks = -(-image.width // width) * -(-image.height // height)
        return len(re.findall(RESTARTS, data[start:end])) < -(-blocks // interval) - 1
    # What comes behind the last pixel changes none: noise there shows only where pixels are missing.
    noise = random.Random(0).randbytes(int(image.width * image.height * BYTES_A_PIXEL) + 1024).replace(b"\xff", b"")
    with Image.open(io.BytesIO(data[:end] + noise + END), formats=("JPEG",)) as other:
        changed = other.crop((image.width - CORNER, image.height - CORNER, image.width, image.height))
    return changed.tobytes() != corner.tobytes()


def _lacks_scans(data: bytes, start: int, end: int) -> bool:
    """Whether the scans of a progressive JPEG do not bring every value of every component to its last bit."""
    lacking: dict[int, set[int]] = {}
    while 0 <= start < end:
        count = data[start + 4]
        first, last, bits = data[start + 5 + 2 * count : start + 8 + 2 * count]
        for number in range(count):
            values = lacking.setdefault(data[start + 5 + 2 * number], set(range(64)))
            if bits & 0x0F == 0:
                values.difference_update(range(first, last + 1))
        start = data.find(SCAN, start + 2, end)
    return any(lacking.values())


def _end_of(kind: str | None, data: bytes) -> int:
    """Where the pixels of a WebP end, and an AVIF, by what it says: zeros behind that are metadata or padding."""
    if kind == "WEBP":
        place, end = 12, len(data)
        while place + 8 <= len(data):
            size = int.from_bytes(data[place + 4 : place + 8], "little")
            if data[place : place + 4] in WEBP_PIXELS:
                end = place + 8 + size
            place += 8 + size + size % 2
        return end
    place = 0
    while place + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, place)
        if size == 1:  # 64 bits
            (size,) = struct.unpack_from(">Q", data.ljust(place + 16, b"\0"), place + 8)
        if size < 8:
            return len(data) if data[place + 4 : place + 8].strip(b"\0") else place
        place += size
    return place


def _ends_in_a_row(image: Image.Image) -> bool:
    """Whether the pixels of an image end in the middle of a row, and black follows to the last: few drawn edges do so."""
    if image.mode == "P" or all(np.any(image.getpixel((image.width - 1, y))) for y in (0, image.height - 1)):
        return False
    pixels = np.asarray(image)
    shown = pixels if pixels.ndim == 2 else functools.reduce(np.bitwise_or, np.moveaxis(pixels, 2, 0))
    width = image.width
    for rows in (shown, shown[::-1]):  # BMP begins below
        filled = np.flatnonzero(rows.any(axis=1))
        if rows[-1].any() or not len(filled):
            continue
        row = int(filled[-1])
        column = int(np.flatnonzero(rows[row])[-1]) + 1
        # Rounded corners are black on the left, too.
        if row and column <= width - FEWEST_MISSING and rows[row, :FEWEST_MISSING].all():
            return bool((rows[row, :column] != 0).mean() > FULL and (rows[row - 1, column:] != 0).mean() > FULL)
    return False
