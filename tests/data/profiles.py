"""Hand-made ICC profiles, and the colors that they describe by the formulas of their standards."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

D50 = np.array([0.9642, 1.0, 0.8249])
D65_XY, D50_XY = (0.3127, 0.3290), (0.3457, 0.3585)
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


@dataclass(frozen=True)
class Space:
    """An RGB space: CIE xy of white and of the primaries, and its curve. `exponent` None is sRGB's curve."""

    white: tuple[float, float]
    primaries: tuple[tuple[float, float], ...]
    exponent: float | None


SRGB = Space(D65_XY, ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06)), None)
P3 = Space(D65_XY, ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)), None)
ADOBE = Space(D65_XY, ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06)), 563 / 256)
PROPHOTO = Space(D50_XY, ((0.7347, 0.2653), (0.1596, 0.8404), (0.0366, 0.0001)), 1.8)


def to_xyz(space: Space) -> Values:
    """Linear RGB to XYZ under D50, [3, 3]."""
    white, *primaries = (np.array([x / y, 1.0, (1 - x - y) / y]) for x, y in (space.white, *space.primaries))
    columns = np.stack(primaries, axis=1)
    adapted = np.linalg.inv(BRADFORD) @ np.diag(BRADFORD @ D50 / (BRADFORD @ white)) @ BRADFORD
    return np.asarray(adapted @ columns * np.linalg.solve(columns, white))


def srgb_to_linear(values: Values) -> Values:
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def linear_to_srgb(values: Values) -> Values:
    return np.where(values <= 0.0031308, values * 12.92, 1.055 * np.clip(values, 0, None) ** (1 / 2.4) - 0.055)


def stored_as(space: Space, srgb: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What a file in another space holds for colors of sRGB [..., 3]."""
    linear = srgb_to_linear(srgb / 255.0) @ to_xyz(SRGB).T @ np.linalg.inv(to_xyz(space)).T
    linear = np.clip(linear, 0.0, 1.0)
    encoded = linear_to_srgb(linear) if space.exponent is None else linear ** (1 / space.exponent)
    return np.rint(encoded * 255).astype(np.uint8)


def shown_as(space: Space, stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The colors of sRGB that a file in another space shows for its values [..., 3]."""
    values = stored / 255.0
    linear = srgb_to_linear(values) if space.exponent is None else values**space.exponent
    linear = linear @ to_xyz(space).T @ np.linalg.inv(to_xyz(SRGB)).T
    return np.rint(linear_to_srgb(np.clip(linear, 0.0, 1.0)) * 255).astype(np.uint8)


def _fixed(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def _profile(model: bytes, pcs: bytes, kind: bytes, tags: dict[bytes, bytes]) -> bytes:
    tags = {b"wtpt": b"XYZ \0\0\0\0" + _fixed(*D50), **tags}
    start, index, content = 132 + 12 * len(tags), b"", b""
    for name, data in tags.items():
        index += name + struct.pack(">II", start + len(content), len(data))
        content += data + b"\0" * (-len(data) % 4)
    head = struct.pack(
        ">I4xI4s4s4s12x4s28x12s48x", start + len(content), 0x02400000, kind, model, pcs, b"acsp", _fixed(*D50)
    )
    return head + struct.pack(">I", len(tags)) + index + content


def _curve(exponent: float | None) -> bytes:
    if exponent is not None:
        return b"curv\0\0\0\0" + struct.pack(">IHxx", 1, round(exponent * 256))
    levels = np.rint(srgb_to_linear(np.linspace(0, 1, 1024)) * 65535).astype(">u2")
    return b"curv\0\0\0\0" + struct.pack(">I", 1024) + levels.tobytes()


def rgb_profile(space: Space) -> bytes:
    tags = {}
    for number, name in enumerate((b"r", b"g", b"b")):
        tags[name + b"XYZ"] = b"XYZ \0\0\0\0" + _fixed(*to_xyz(space)[:, number])
        tags[name + b"TRC"] = _curve(space.exponent)
    return _profile(b"RGB ", b"XYZ ", b"mntr", tags)


def gray_profile(exponent: float) -> bytes:
    return _profile(b"GRAY", b"XYZ ", b"mntr", {b"kTRC": _curve(exponent)})


def cmyk_profile(lightness: Callable[[Values], Values]) -> bytes:
    """A press that prints no colors: `lightness` gives L* (0 to 100) of inks [N, 4] between 0 and 1."""
    corners = np.stack(np.meshgrid(*[[0.0, 1.0]] * 4, indexing="ij"), axis=-1).reshape(-1, 4)
    lab = np.full((16, 3), 128.0)
    lab[:, 0] = lightness(corners) * 2.55
    ramp = bytes(range(256))
    table = b"mft1\0\0\0\0" + struct.pack(">BBBx", 4, 3, 2) + _fixed(1, 0, 0, 0, 1, 0, 0, 0, 1)
    table += ramp * 4 + np.rint(lab).astype(np.uint8).tobytes() + ramp * 3
    return _profile(b"CMYK", b"Lab ", b"prtr", {b"A2B0": table})
