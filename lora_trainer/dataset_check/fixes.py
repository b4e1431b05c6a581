"""Fixes of one image or one caption for the cleaned copy."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.bounded import TextError, decode, read_bounded
from lora_trainer.data.images.images import (
    ENDINGS_OF_FORMAT,
    TURNS,
    BrokenImageError,
    header_of,
    opened,
    orientation_of,
    to_srgb,
)
from lora_trainer.data.images.measures import SMALL_SIDE, Borders
from lora_trainer.data.sources.beside import JSON_ENDING
from lora_trainer.data.sources.names import ending_of
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES, tidy
from lora_trainer.data.views import Framing, plain_fits
from lora_trainer.dataset_check.caption_checks import fix_garbled

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.sources.found import SourceRequest


def fix_image(
    sample: Sample, codes: set[str], borders: Borders | None, framing: Framing
) -> tuple[bytes | None, list[str]]:
    """(the image as PNG, what was fixed), None where its bytes are good as they are."""
    animated = "animated" in codes
    cut = "border" in codes and borders is not None and sample.mask is None and not sample.controls
    if not animated and not cut:
        return None, []
    try:
        with opened(sample.path, sample.span) as image:
            turn = None if image.format == "TIFF" else TURNS.get(orientation_of(image))
            image.load()
            flat = to_srgb(image)
    except BrokenImageError as error:
        raise OSError(None, f"{sample.path} {error.message}") from error
    flat = flat.transpose(turn) if turn is not None else flat
    done = ["first frame taken"] if animated else []
    if cut and borders is not None:
        # The borders were measured in a smaller copy, so a line of it more is cut off.
        width, height = flat.size
        line = max(1, -(-max(flat.size) // SMALL_SIDE))
        left, right = (math.ceil(share * width) + line if share else 0 for share in (borders.left, borders.right))
        top, bottom = (math.ceil(share * height) + line if share else 0 for share in (borders.top, borders.bottom))
        box = left, top, width - right, height - bottom
        if _still_large(box, sample, framing):
            flat = flat.crop(box)
            done.append(f"border cut off: {flat.width}×{flat.height} left")
        elif not animated:
            return None, ["border left: the rest would be too small"]
    file = io.BytesIO()
    flat.save(file, "PNG")
    return file.getvalue(), done


def _still_large(box: tuple[int, int, int, int], sample: Sample, framing: Framing) -> bool:
    """Whether what is left need not be enlarged, or no more than the whole."""

    def factor(width: int, height: int) -> float:
        return plain_fits(width, height, framing)[0].scale_from(width, height)

    width, height = box[2] - box[0], box[3] - box[1]
    return min(width, height) > 0 and factor(width, height) <= max(1.0, factor(sample.width, sample.height))


def right_ending(sample: Sample, codes: set[str]) -> str:
    if "wrong_ending" not in codes:
        return sample.path.suffix
    try:
        return ENDINGS_OF_FORMAT[header_of(sample.path, sample.span).format][0]
    except (BrokenImageError, KeyError):
        return sample.path.suffix


@dataclass(frozen=True)
class CaptionFile:
    """The caption file of an image in the copy: `data` are its bytes, unchanged unless `done` says what was fixed."""

    ending: str
    data: bytes
    done: tuple[str, ...]


def caption_file(sample: Sample, request: SourceRequest, codes: set[str]) -> CaptionFile | None:
    """The text that a sample's caption was read from, fixed where `codes` say so; None where it came from elsewhere, as
    from JSON, which may hold more than a caption."""
    if not sample.caption_file or ending_of(sample.caption_file) == JSON_ENDING:
        return None
    place = sample.path.with_name(sample.caption_file)
    ending = ending_of(sample.caption_file)
    if "unreadable_caption" in codes:
        text = in_old_letters(place)
        return CaptionFile(ending, text.encode("utf-8"), ("caption written as UTF-8",)) if text.strip() else None
    try:
        data = read_bounded(place, MOST_CAPTION_BYTES)
        text = decode(data)
    except TextError:
        return None
    if tidy(text, keep_lines=request.captions.wildcards) != sample.caption:  # a table had the last word
        return None
    if "garbled_caption" in codes and fix_garbled(text) != text:
        return CaptionFile(ending, fix_garbled(text).encode("utf-8"), ("garbled letters of the caption fixed",))
    return CaptionFile(ending, data, ())


def in_old_letters(place: Path) -> str:
    """A text file that is no UTF-8, read as Windows-1252; empty where it is no such text."""
    try:
        data = read_bounded(place, MOST_CAPTION_BYTES)
        return "" if b"\0" in data else data.decode("cp1252")
    except (TextError, UnicodeDecodeError):
        return ""
