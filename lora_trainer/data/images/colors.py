"""What an image's header says about its colors, and how they become sRGB's, as viewers and browsers show them.

An embedded ICC profile is converted by littleCMS, through Pillow: perceptually, as browsers do, and with black kept black.
A PNG may state its colors by its gAMA and cHRM chunks instead; these become a profile.
"""

from __future__ import annotations

import functools
import io
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageChops

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.ImageCms import ImageCmsTransform

    from lora_trainer.data.sample import Colors

GRAY_MODES = ("1", "L", "LA", "F")  # and all that begin with I
SAME_LEVELS = 2  # of 255; a profile that changes no color by more is one of sRGB: their makers rounded differently
PROFILES_KEPT = 8  # photographs of one camera have one profile
PROBE_STEP = 15  # levels from one probed color to the next; divides 255

# Pillow compares the transparent color of a PNG, which is in the file's own depth, with pixels of 8 bits.
KEY_SCALES = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}
DEEP_KEY = "I;16B"  # these pixels keep their depth; Pillow has no alpha for them

# CIE xy of white, red, green and blue, in the order of cHRM. PNG's own for sRGB.
SRGB_CHROMATICITIES = (0.3127, 0.3290, 0.6400, 0.3300, 0.3000, 0.6000, 0.1500, 0.0600)
SRGB_GAMMA = 1 / 2.2  # what a gAMA of sRGB's curve says
NEAR_CHROMATICITY, NEAR_GAMMA = 0.01, 0.05  # libpng's own tolerances: nearer ones are sRGB's, rounded
SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
D50 = (0.9642, 1.0, 0.8249)
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


@dataclass(frozen=True)
class Conversion:
    """How an image's colors become sRGB's. `mode` is what the transform takes; without one the pixels stay."""

    colors: Colors
    mode: str = ""
    transform: ImageCmsTransform | None = None


def colors_of(image: Image.Image) -> Colors:
    """How an open image's colors are read, before its pixels are decoded."""
    if "transparency" in image.info and _raw_mode(image) in (*KEY_SCALES, DEEP_KEY):
        return "converted"
    return conversion_of(image).colors


def conversion_of(image: Image.Image) -> Conversion:
    """How the colors of an open image become sRGB's."""
    if image.mode == "LAB":  # needs no profile
        return Conversion("")
    info = image.info
    if "icc_profile" in info:
        profile = info["icc_profile"]
        # Pillow has None for a profile whose parts are missing or cannot be unpacked.
        if not isinstance(profile, bytes):
            return Conversion("damaged")
    elif "srgb" in info or not ("gamma" in info or "chromaticity" in info):
        return Conversion("")
    else:
        made = png_profile(info.get("gamma"), info.get("chromaticity"))
        if made is None:
            return Conversion("")
        profile = made
    if image.mode == "CMYK":
        return _read_profile(profile, "CMYK")
    is_gray = image.mode in GRAY_MODES or image.mode.startswith("I")
    return _read_profile(profile, "L" if is_gray else "RGB")


@functools.lru_cache(maxsize=PROFILES_KEPT)
def _read_profile(profile: bytes, mode: str) -> Conversion:
    from PIL import ImageCms

    try:
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        # Programs leave the profile of a colored image in its gray copy: gray is a color of it.
        if mode == "L" and own.profile.xcolor_space.strip() == "RGB":
            mode = "RGB"
        transform = ImageCms.buildTransform(
            own,
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.PERCEPTUAL,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
        if mode != "CMYK" and _changes_nothing(mode, transform):
            return Conversion("")
    except Exception:  # noqa: BLE001 - a damaged profile, or one for other images, must not cost a good image
        return Conversion("damaged")
    return Conversion("converted", mode, transform)


def _changes_nothing(mode: str, transform: ImageCmsTransform) -> bool:
    levels = np.arange(256, dtype=np.uint8)
    if mode == "L":
        probe = Image.fromarray(levels[None])
    else:
        colors = np.stack(np.meshgrid(*[levels[::PROBE_STEP]] * 3, indexing="ij"), axis=-1)
        grays = np.repeat(levels[:, None], 3, axis=1)
        probe = Image.fromarray(np.concatenate([colors.reshape(-1, 3), grays])[None])
    changes = ImageChops.difference(probe.convert("RGB"), apply_transform(probe, transform))
    return int(np.asarray(changes).max()) <= SAME_LEVELS


def apply_transform(image: Image.Image, transform: ImageCmsTransform) -> Image.Image:
    """An image of the transform's mode in sRGB's colors."""
    converted = Image.new("RGB", image.size)
    transform.apply(image, converted)
    converted.info.clear()  # the profile that is sRGB's now
    return converted


def png_profile(gamma: float | None, chromaticities: tuple[float, ...] | None) -> bytes | None:
    """An ICC profile of the colors that a PNG's gAMA and cHRM state, as browsers read them; None where they are sRGB's."""
    exponent = None
    if gamma and abs(gamma / SRGB_GAMMA - 1) > NEAR_GAMMA:
        exponent = 1 / gamma
    places: tuple[float, ...] = SRGB_CHROMATICITIES
    if chromaticities is not None and any(
        abs(own - usual) > NEAR_CHROMATICITY for own, usual in zip(chromaticities, places, strict=True)
    ):
        places = chromaticities
    if exponent is None and places is SRGB_CHROMATICITIES:
        return None
    try:
        return _matrix_profile(_primaries(places), exponent)
    except (ZeroDivisionError, np.linalg.LinAlgError, struct.error, ValueError, OverflowError):
        return b""  # no colors: a damaged profile


def _primaries(places: tuple[float, ...]) -> NDArray[np.float64]:
    """XYZ of red, green and blue, the columns [3, 3], as they look where white is D50."""
    white, red, green, blue = (
        np.array([x / y, 1.0, (1.0 - x - y) / y]) for x, y in zip(places[::2], places[1::2], strict=True)
    )
    columns = np.stack([red, green, blue], axis=1)
    lit = columns * np.linalg.solve(columns, white)
    adapted = np.diag(BRADFORD @ np.array(D50) / (BRADFORD @ white))
    return np.asarray(np.linalg.inv(BRADFORD) @ adapted @ BRADFORD @ lit)


def _matrix_profile(primaries: NDArray[np.float64], exponent: float | None) -> bytes:
    """An ICC profile (version 4) with three primaries and one curve: a power, or sRGB's where there is none."""
    curve = (0, exponent) if exponent is not None else (3, *SRGB_CURVE)
    tags = {b"wtpt": b"XYZ \0\0\0\0" + _fixed(*D50)}
    for number, name in enumerate((b"r", b"g", b"b")):
        tags[name + b"XYZ"] = b"XYZ \0\0\0\0" + _fixed(*primaries[:, number])
        tags[name + b"TRC"] = b"para\0\0\0\0" + struct.pack(">HH", curve[0], 0) + _fixed(*curve[1:])
    start, index, content = 128 + 4 + 12 * len(tags), b"", b""
    for name, data in tags.items():
        index += name + struct.pack(">II", start + len(content), len(data))
        content += data
    length, version = start + len(content), 0x04300000
    header = struct.pack(">I4xI4s4s4s12x4s28x12s48x", length, version, b"mntr", b"RGB ", b"XYZ ", b"acsp", _fixed(*D50))
    return header + struct.pack(">I", len(tags)) + index + content


def _fixed(*values: float) -> bytes:
    """ICC's s15Fixed16 numbers."""
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def scale_key(image: Image.Image) -> None:
    """Give the transparent color of an opened PNG the depth that its pixels will have."""
    scale = KEY_SCALES.get(_raw_mode(image))
    key = image.info.get("transparency")
    if scale is None or key is None:
        return
    if isinstance(key, int):
        image.info["transparency"] = int(key * scale)
    else:
        image.info["transparency"] = tuple(int(value * scale) for value in key)


def _raw_mode(image: Image.Image) -> str:
    """How a PNG's pixels are stored, by Pillow's names; empty for other files."""
    tiles = getattr(image, "tile", None)
    if image.format != "PNG" or not tiles:
        return ""
    return str(tiles[0][3])
