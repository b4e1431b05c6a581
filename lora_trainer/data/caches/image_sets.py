"""Sets of class images on the disk: what a base model generated for prior preservation.

    CACHE/class_images/KEY/0000.png, 0000.txt     an image and its prompt, each written whole
    CACHE/class_images/KEY/class_images.json      its mark, written last: how they were generated, and each image's digest

    CACHE/class_images/KEY/set.lock               whoever generates it holds this lock

A set without its mark is not finished: what is there is kept, and the rest is generated.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.disk import write_with_retry
from lora_trainer.core.io import atomic_path, read_json, sha256_file, write_json, write_text
from lora_trainer.data.caches.files import named

if TYPE_CHECKING:
    from PIL import Image

SETS, RECIPE, LOCK = "class_images", "class_images.json", "set.lock"
KEY = re.compile(r"[0-9a-f]{64}")
FILE = re.compile(r"[0-9]{4,}\.(png|txt)|class_images\.json|set\.lock")
HALF = re.compile(r"\.([0-9]{4,}\.(png|txt)|class_images\.json)\.[^.]+\.part")
PIXEL_BYTES = 3  # a PNG takes less


def image_path(folder: Path, number: int) -> Path:
    return folder / f"{number:04}.png"


def write_class_image(folder: Path, number: int, image: Image.Image, prompt: str) -> None:
    """Write an image after its caption: where the image is, both are whole. Raises TrainingFailed for a full disk."""
    path = image_path(folder, number)

    def write() -> None:
        write_text(path.with_suffix(".txt"), prompt + "\n")
        with atomic_path(path) as temporary:
            image.save(temporary, format="PNG")

    write_with_retry(f"class image {path.name}", folder, write, PIXEL_BYTES * image.width * image.height)


def missing_images(folder: Path, count: int) -> list[int]:
    return [number for number in range(count) if not image_path(folder, number).is_file()]


def finish_set(folder: Path, prompts: Sequence[str], recipe: Mapping[str, Any]) -> list[str]:
    """Mark a set as finished; the sha256 of every image's file, as they are in the mark."""
    images = [
        {"file": path.name, "prompt": prompt, "sha256": sha256_file(path)}
        for number, prompt in enumerate(prompts)
        for path in [image_path(folder, number)]
    ]
    write = partial(write_json, folder / RECIPE, {**recipe, "images": images})
    write_with_retry(RECIPE, folder, write, 200 * len(images))
    return [each["sha256"] for each in images]


def read_set(folder: Path, count: int) -> list[str] | None:
    """The sha256 of every image of a finished set, whose time of last use becomes now; None for another set."""
    try:
        digests = recorded_digests(folder)
        if digests_in(folder, count) != digests:
            return None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    with contextlib.suppress(OSError):  # a cache that may not be written to
        os.utime(folder / RECIPE)
    return digests


def recorded_digests(folder: Path) -> list[str]:
    """The sha256 of each image when the set was finished. Raises OSError, ValueError, LookupError or TypeError for none."""
    return [str(each["sha256"]) for each in read_json(folder / RECIPE)["images"]]


def digests_in(folder: Path, count: int) -> list[str]:
    """The sha256 of each image's file, empty for one that is missing. Raises OSError for one that cannot be read."""
    paths = [image_path(folder, number) for number in range(count)]
    return [sha256_file(path) if path.is_file() else "" for path in paths]


def remove_damaged(folder: Path, count: int) -> None:
    """Remove the images of a finished set that have changed, so that they are generated again; by the set's owner only."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        digests = recorded_digests(folder)
        (folder / RECIPE).unlink()
        for number, (content, digest) in enumerate(zip(digests_in(folder, count), digests, strict=False)):
            if content != digest:
                image_path(folder, number).unlink(missing_ok=True)


def list_sets(cache: Path) -> Iterator[tuple[Path, int, float]]:
    """(folder, bytes, time of last use) of each set."""
    with contextlib.suppress(OSError):
        for folder in sorted(path for path in (cache / SETS).iterdir() if KEY.fullmatch(path.name)):
            with contextlib.suppress(OSError):
                facts = [path.stat() for path in (*named(folder, FILE), *named(folder, HALF))]
                yield (
                    folder,
                    sum(each.st_size for each in facts),
                    max(each.st_mtime for each in (*facts, folder.stat())),
                )


def half_written(cache: Path) -> list[Path]:
    return [path for folder, _, _ in list_sets(cache) for path in named(folder, HALF)]


def remove_set(folder: Path) -> int:
    """Remove a set's own files; the bytes that were freed. What is left of an interrupted removal is an unfinished set."""
    freed = 0
    for path in [folder / RECIPE, *named(folder, FILE), *named(folder, HALF)]:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            freed += size
    with contextlib.suppress(OSError):
        folder.rmdir()
    return freed
