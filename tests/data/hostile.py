"""Small hostile files that must not be opened."""

from __future__ import annotations

import os
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def noise(seed: int = 0, size: tuple[int, int] = (64, 64)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def chunk(kind: bytes, data: bytes, crc: int | None = None) -> bytes:
    """One chunk of a PNG."""
    return (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) if crc is None else crc)
    )


def png(width: int, height: int, *extra: bytes, crc: int | None = None) -> bytes:
    """A gray 1-bit PNG. A large one has only the first rows."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0), crc)
    rows = zlib.compress(bytes(min(2**20, ((width + 7) // 8 + 1) * height)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def gif(frames: int, width: int = 4, height: int = 4) -> bytes:
    """A GIF with many one-pixel frames."""
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\x00\x00\x00\xff\xff\xff"
    frame = (
        b"\x21\xf9\x04\x00\x0a\x00\x00\x00" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    )
    return head + frame * frames + b"\x3b"


def tiff(width: int, height: int, next_directory: int = 0) -> bytes:
    """A gray 1-bit TIFF without pixels. `next_directory` may form a loop."""
    tags = [
        (256, 4, width),
        (257, 4, height),
        (258, 3, 1),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 200),
        (278, 4, height),
        (279, 4, 10),
    ]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\x00" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", next_directory) + bytes(200)


def webp(width: int, height: int) -> bytes:
    """A lossless WebP with only a size."""
    data = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\x00" * 8
    data += b"\x00" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", 12 + len(data)) + b"WEBPVP8L" + struct.pack("<I", len(data)) + data


def saved(path: Path, image: Image.Image, **options: object) -> bytes:
    image.save(path, **options)
    data = path.read_bytes()
    path.unlink()
    return data


def garbled_exif(path: Path) -> None:
    noise(1).save(path, exif=b"Exif\x00\x00II*\x00" + b"\xff" * 60)


def cut(path: Path) -> None:
    path.write_bytes(saved(path, noise(2))[:3000])


def bad_crc(path: Path) -> None:
    path.write_bytes(png(32, 32, crc=1))


def write_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the whole path may be too long for a socket's address
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path.name)
    finally:
        os.chdir(here)


def bytes_of(data: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(data), None)[1]


def link(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


INFLATING = zlib.compress(bytes(100_000_000), 1)
BOMB_TEXT = chunk(b"zTXt", b"Comment\x00\x00" + INFLATING)
BOMB_PROFILE = chunk(b"iCCP", b"icc\x00\x00" + INFLATING)

# The files, and the code of the one finding of each.
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "bomb.png": (bytes_of(png(60_000, 60_000)), "too_large"),
    "wide.png": (bytes_of(png(2**31 - 1, 2**31 - 1)), "too_large"),
    "bomb.gif": (bytes_of(gif(1, 65_535, 65_535)), "too_large"),
    "bomb.tif": (bytes_of(tiff(100_000, 100_000)), "too_large"),
    "bomb.webp": (bytes_of(webp(16_384, 16_384)), "too_large"),
    "text_bomb.png": (bytes_of(png(32, 32, BOMB_TEXT)), "unreadable"),
    "profile_bomb.png": (bytes_of(png(32, 32, BOMB_PROFILE)), "unreadable"),
    "cut.png": (cut, "unreadable"),
    "cut.jpg": (lambda path: (path.write_bytes(saved(path, noise(3), quality=95)[:2000]), None)[1], "unreadable"),
    "cut.webp": (lambda path: (path.write_bytes(saved(path, noise(4))[:900]), None)[1], "unreadable"),
    "empty.png": (bytes_of(b""), "unreadable"),
    "text.png": (bytes_of(b"a photo of a cat\n"), "unreadable"),
    "bad_crc.png": (bad_crc, "unreadable"),
    "bad_pixels.png": (bytes_of(png(40, 40)[:-13] + b"?" + png(40, 40)[-12:]), "unreadable"),  # the checksum of IDAT
    "no_pixels.tif": (bytes_of(tiff(640, 640, next_directory=8)), "unreadable"),
    "circle.png": (link("circle.png"), "unreadable"),
    "nowhere.png": (link("nowhere/at/all.png"), "unreadable"),
    "zeros.png": (link("/dev/zero"), "unreadable"),
    "pipe.png": (lambda path: os.mkfifo(path), "unreadable"),
    "socket.png": (write_socket, "unreadable"),
    "many.gif": (bytes_of(gif(10_000)), "animated"),
}

# Unusual but valid files.
ODD: dict[str, Callable[[Path], None]] = {
    "exif.jpg": garbled_exif,
    "profile.png": lambda path: noise(5).save(path, icc_profile=b"no profile at all"),
    "print.jpg": lambda path: noise(6).convert("CMYK").save(path),
    "deep.png": lambda path: Image.fromarray(np.random.default_rng(7).integers(0, 65536, (64, 64), dtype=np.uint16)).save(path),
    "palette.png": lambda path: noise(8).convert("P").save(path, transparency=0),
    "line.png": lambda path: noise(9).convert("1").save(path),
    "phone.jpg": lambda path: noise(10).save(path, format="MPO", save_all=True, append_images=[noise(11)]),
    "out.png": lambda path: (noise(12).save(path.parent.parent / "elsewhere.png"), path.symlink_to("../elsewhere.png"), None)[2],
    "two\nlines \x1b[31mred.png": lambda path: noise(13).save(path),
    os.fsdecode(b"caf\xe9 \xff.png"): lambda path: noise(14).save(path),
    "long " + "x" * 240 + ".png": lambda path: noise(15).save(path),
}  # fmt: skip


def state_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every entry with its type, mode, times and bytes. Only regular files are opened."""
    found: dict[str, tuple[object, ...]] = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            entry = os.lstat(path)
            data: object = Path(path).read_bytes() if os.path.isfile(path) and entry.st_size < 2**20 else None
            times = (entry.st_mtime_ns, entry.st_ctime_ns)
            found[path] = (entry.st_mode, entry.st_size, *times, os.path.islink(path) and os.readlink(path), data)
    return found
