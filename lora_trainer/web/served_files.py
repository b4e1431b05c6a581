"""Files of runs as answers: by their content, never as a page of this server; and thumbnails."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import threading
from pathlib import Path

from starlette.responses import FileResponse

from lora_trainer.core.errors import Problem
from lora_trainer.core.io import atomic_path
from lora_trainer.data.images.images import TURNS, BrokenImageError, opened, orientation_of, to_rgb
from lora_trainer.data.images.masks import to_mask
from lora_trainer.data.sample import Span
from lora_trainer.web.safety import Refusal

REPORT = "report.html"
# The report may run the scripts that it came with, in an origin of its own: it cannot ask this server for anything.
SANDBOX = (
    "sandbox allow-scripts allow-popups; default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
TEXTS = (".json", ".jsonl", ".toml", ".csv", ".txt", ".log")
SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
}
MOST_PIXELS = 100_000_000
WIDTHS = (32, 2048)
MOST_THUMBNAILS = 20_000  # of some 10 kB each
PRUNED_AFTER = 200  # new ones
decoding = threading.BoundedSemaphore(2)  # of images at the same time: a large one takes 300 MB
made = itertools.count()


def inside(folder: Path, name: str) -> Path:
    """A regular file in a folder, links followed. Raises Refusal where it is outside, hidden, or missing."""
    missing = Refusal(404, Problem("file_missing", f"There is no file {name[:200]}.", "It may be written later."))
    parts = name.split("/")
    if any(not part or part.startswith(".") or "\\" in part or not part.isprintable() for part in parts):
        raise missing
    try:
        path, root = Path(os.path.realpath(folder / name)), os.path.realpath(folder)
        if not path.is_relative_to(root) or not stat.S_ISREG(path.stat().st_mode):
            raise missing
    except (OSError, ValueError):
        raise missing from None
    return path


def answer_with(path: Path, name: str) -> FileResponse:
    """A file: images as what they are, text as text, the report in a sandbox, and all else to be saved."""
    with open(path, "rb") as file:
        kind = image_type_of(file.read(16))
    if kind is None and name == REPORT:
        headers = {"content-security-policy": SANDBOX, "x-frame-options": "SAMEORIGIN"}
        return FileResponse(path, media_type="text/html; charset=utf-8", headers=headers)
    if kind is None and path.suffix in TEXTS:
        return FileResponse(path, media_type="text/plain; charset=utf-8")
    if kind is not None:
        return FileResponse(path, media_type=kind, headers={"cache-control": "private, no-cache"})
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)


def image_type_of(head: bytes) -> str | None:
    """The type of an image by its first bytes; None for what is no image that browsers show."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for signature, kind in SIGNATURES.items() if head.startswith(signature)), None)


def thumbnail(path: Path, width: int, folder: Path) -> Path:
    """A smaller copy of an image, kept in `folder` by its content. Raises Refusal for what is no image."""
    return small_copy(path, None, hashlib.sha256(path.read_bytes()).hexdigest(), width, folder)


def small_copy(path: Path, span: Span | None, content: str, width: int, folder: Path, *, is_mask: bool = False) -> Path:
    """The same of an image whose `content` is known; it may lie in a shard. It is turned as it is seen.

    A mask is shown as the gray that training uses, without loss.
    """
    kept = folder / content[:2] / (f"{content}-{width}-mask.webp" if is_mask else f"{content}-{width}.webp")
    if kept.is_file():
        with contextlib.suppress(OSError):
            os.utime(kept)
        return kept
    try:
        with decoding, opened(path, span) as image:
            if image.width * image.height > MOST_PIXELS:
                raise BrokenImageError("too_large", "has too many pixels.", "")
            turn = None if image.format == "TIFF" else TURNS.get(orientation_of(image))
            image.draft("RGB", (width, width))
            small = to_mask(image) if is_mask else to_rgb(image)
            small = small if turn is None else small.transpose(turn)
            small.thumbnail((width, 8 * width))
    except BrokenImageError:
        raise Refusal(
            415, Problem("image_not_shown", f"{path.name} is not an image that can be shown.", "Download it.")
        ) from None
    with atomic_path(kept) as temporary:
        small.save(temporary, "WEBP", quality=82, lossless=is_mask)
    if next(made) % PRUNED_AFTER == 0:
        prune(folder)
    return kept


def prune(folder: Path) -> None:
    """Delete the thumbnails that were shown longest ago, where there are too many."""
    found = []
    for path in folder.glob("*/*.webp"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[: max(0, len(found) - MOST_THUMBNAILS)]:
        path.unlink(missing_ok=True)
