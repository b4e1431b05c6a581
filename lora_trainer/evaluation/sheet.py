"""Contact sheets: strengths side by side, prompts and seeds below each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont, ImageOps

from lora_trainer.core.io import atomic_path
from lora_trainer.evaluation.lettering import Font, fonts_for, legible

if TYPE_CHECKING:
    from PIL.PngImagePlugin import PngInfo

SMALLEST, LARGEST = 256, 640  # sides of shown images, in pixels
WIDEST, MOST_PIXELS = 4096, 40_000_000  # of a sheet: browsers of phones refuse far larger ones
MOST_COLUMNS = 12  # side by side; further ones are put below
LEAST_TEXT, LETTERS = 18, 46  # letters in a line: readable at a phone's width
MOST_LINES = 16  # of a prompt, more than CLIP reads; the recipe has all of it
INK, FAINT, PAPER, GAP = (20, 20, 20), (96, 96, 96), (255, 255, 255), (232, 232, 232)


@dataclass(frozen=True)
class SheetRow:
    """Image files side by side with a label above them. A missing file leaves a gap."""

    label: str
    images: Sequence[Path]


@dataclass(frozen=True)
class SheetGroup:
    """Rows under one heading: a prompt, all its seeds."""

    heading: str
    rows: Sequence[SheetRow]


def contact_sheet(title: str, details: str, headings: Sequence[str], groups: Sequence[SheetGroup]) -> Image.Image:
    """All groups under a title and one heading for each column, repeated above every group; prompts between lines."""
    together = min(len(headings), MOST_COLUMNS)
    cell = cell_size(groups, together)
    margin = max(8, cell[0] // 24)
    width = margin + together * (cell[0] + margin)
    size = max(LEAST_TEXT, width // LETTERS)
    written = "".join([title, details, *headings, *(group.heading for group in groups)])
    large, usual = fonts_for(written, size, max(LEAST_TEXT, round(size * 0.8)))
    writer = SheetWriter(width, margin)
    writer.text(title, large, INK)
    writer.text(details, usual, FAINT)
    for group in groups:
        writer.rule()
        writer.text(group.heading, large, INK)
        for start in range(0, len(headings), together):
            part = slice(start, start + together)
            writer.columns(headings[part], usual, cell[0])
            for row in group.rows:
                writer.text(row.label, usual, FAINT)
                writer.images(row.images[part], cell)
    return writer.sheet()


class SheetWriter:
    """Collects a sheet's text and images from top to bottom; they are drawn once its height is known."""

    def __init__(self, width: int, margin: int) -> None:
        self.width, self.margin, self.top = width, margin, margin
        self.words: list[tuple[tuple[int, int], str, Font, tuple[int, int, int]]] = []
        self.places: list[tuple[tuple[int, int], Path, tuple[int, int]]] = []
        self.rules: list[int] = []

    def rule(self) -> None:
        """A line from side to side, with space around it."""
        self.rules.append(self.top + self.margin // 2)
        self.top += 2 * self.margin

    def text(self, text: str, font: Font, ink: tuple[int, int, int]) -> None:
        for line in shortened(wrapped(legible(text, font), font, self.width - 2 * self.margin)):
            self.words.append(((self.margin, self.top), line, font, ink))
            self.top += height_of(font)

    def columns(self, headings: Sequence[str], font: Font, cell: int) -> None:
        lines = [wrapped(heading, font, cell) for heading in headings]
        for column, heading in enumerate(lines):
            for index, line in enumerate(heading):
                place = (self.margin + column * (cell + self.margin), self.top + index * height_of(font))
                self.words.append((place, line, font, INK))
        self.top += max(map(len, lines)) * height_of(font)

    def images(self, paths: Sequence[Path], cell: tuple[int, int]) -> None:
        for column, path in enumerate(paths):
            self.places.append(((self.margin + column * (cell[0] + self.margin), self.top), path, cell))
        self.top += cell[1] + self.margin

    def sheet(self) -> Image.Image:
        """One image after the other is opened: a sheet of many takes no more memory than itself."""
        sheet = Image.new("RGB", (self.width, self.top), PAPER)
        pen = ImageDraw.Draw(sheet)
        for top in self.rules:
            pen.line((self.margin, top, self.width - self.margin - 1, top), fill=GAP, width=max(2, self.margin // 8))
        for place, line, font, ink in self.words:
            pen.text(place, line, fill=ink, font=font)
        for place, path, cell in self.places:
            if not path.is_file():
                pen.rectangle((*place, place[0] + cell[0] - 1, place[1] + cell[1] - 1), fill=GAP)
                continue
            with Image.open(path) as image:
                sheet.paste(fitted(ImageOps.exif_transpose(image).convert("RGB"), cell), place)
        return sheet


def cell_size(groups: Sequence[SheetGroup], columns: int) -> tuple[int, int]:
    """Width and height of every image on the sheet: small ones enlarged, and less where there are very many."""
    rows = sum(-(-len(row.images) // columns) for group in groups for row in group.rows)
    width, height = 1, 1
    # The generated image, which is the last, gives the shape: control images may have others.
    for path in (path for group in groups for row in group.rows for path in reversed(row.images)):
        if path.is_file():
            with Image.open(path) as image:
                width, height = image.size
            break
    side = min(max(width, height, SMALLEST), LARGEST, WIDEST // columns)
    shape = (width / max(width, height), height / max(width, height))
    most = (MOST_PIXELS / (rows * columns * shape[0] * shape[1])) ** 0.5
    side = min(side, int(most))
    return max(1, round(side * shape[0])), max(1, round(side * shape[1]))


def fitted(image: Image.Image, cell: tuple[int, int]) -> Image.Image:
    """The middle of the image in the cell's shape and size."""
    return image if image.size == cell else ImageOps.fit(image, cell, Image.Resampling.LANCZOS)


def height_of(font: Font) -> int:
    """Of a line of text, with the space below it, in pixels."""
    size = font.size if isinstance(font, ImageFont.FreeTypeFont) else LEAST_TEXT
    return round(size * 1.35)


def wrapped(text: str, font: Font, width: int) -> list[str]:
    """The text in lines of at most `width` pixels; longer words are split."""
    lines: list[str] = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return lines


def shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"{lines[MOST_LINES - 1][:-3]}..."]


def save_image(path: Path, image: Image.Image, text: PngInfo | None = None) -> None:
    """Write a PNG atomically, with text beside its pixels."""
    with atomic_path(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=text)
