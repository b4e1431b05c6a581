"""A contact sheet that people can read: pictures side by side, what was asked for below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lora_trainer.core.io import atomic_path

SMALLEST, LARGEST = 256, 768  # sides of shown pictures, in pixels
MARGIN, TEXT_SIZE = 12, 18
INK, PAPER = (20, 20, 20), (255, 255, 255)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class Row:
    """Pictures beside each other, and the line below them."""

    label: str
    pictures: Sequence[Image.Image]


def contact_sheet(headings: Sequence[str], rows: Sequence[Row]) -> Image.Image:
    """All rows under one line of headings. Pictures are scaled so that a side is at least 256 pixels."""
    font = ImageFont.load_default(size=TEXT_SIZE)
    line = TEXT_SIZE + 6
    scaled = [[shown(picture) for picture in row.pictures] for row in rows]
    cell = max(picture.width for row in scaled for picture in row)
    width = MARGIN + len(headings) * (cell + MARGIN)
    labels = [wrapped(row.label, font, width - 2 * MARGIN) for row in rows]
    heights = [
        max(p.height for p in row) + len(label) * line + 2 * MARGIN for row, label in zip(scaled, labels, strict=True)
    ]
    sheet = Image.new("RGB", (width, MARGIN + line + sum(heights)), PAPER)
    pen = ImageDraw.Draw(sheet)
    for column, heading in enumerate(headings):
        pen.text((MARGIN + column * (cell + MARGIN), MARGIN), heading, fill=INK, font=font)
    top = MARGIN + line
    for pictures, label, height in zip(scaled, labels, heights, strict=True):
        for column, picture in enumerate(pictures):
            sheet.paste(picture, (MARGIN + column * (cell + MARGIN), top))
        below = top + max(picture.height for picture in pictures) + 4
        for index, text in enumerate(label):
            pen.text((MARGIN, below + index * line), text, fill=INK, font=font)
        top += height
    return sheet


def shown(picture: Image.Image) -> Image.Image:
    """The picture at a size that people can see: small ones enlarged, very large ones reduced."""
    factor = max(1.0, SMALLEST / min(picture.size))
    if max(picture.size) * factor > LARGEST:
        factor = LARGEST / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    rgb = picture.convert("RGB")
    return rgb if size == picture.size else rgb.resize(size, Image.Resampling.LANCZOS)


def wrapped(text: str, font: Font, width: int) -> list[str]:
    """The text in lines of at most `width` pixels; a longer word stands alone."""
    lines: list[str] = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def save_picture(path: Path, picture: Image.Image) -> None:
    """Write a PNG atomically."""
    with atomic_path(path) as temporary:
        picture.save(temporary, format="PNG")
