"""A contact sheet that people can read at a glance: strengths side by side, prompts and seeds below each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from lora_trainer.core.io import atomic_path

SMALLEST, LARGEST = 256, 640  # sides of shown pictures, in pixels
WIDEST, MOST_PIXELS = 4096, 40_000_000  # of a sheet: browsers of phones refuse far larger ones
LEAST_TEXT, LETTERS = 18, 46  # so many letters go into a line: as wide as a phone, a sheet is still read
INK, FAINT, PAPER, GAP = (20, 20, 20), (96, 96, 96), (255, 255, 255), (232, 232, 232)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class Row:
    """Pictures beside each other, as files, and a few words above them. A file that is not there leaves a gap."""

    label: str
    pictures: Sequence[Path]


@dataclass(frozen=True)
class Group:
    """Rows under one heading: a prompt, all its seeds."""

    heading: str
    rows: Sequence[Row]


def contact_sheet(title: str, details: str, headings: Sequence[str], groups: Sequence[Group]) -> Image.Image:
    """All groups under a title and one heading for each column, repeated above every group."""
    cell = cell_size(groups, len(headings))
    margin = max(8, cell[0] // 24)
    width = margin + len(headings) * (cell[0] + margin)
    size = max(LEAST_TEXT, width // LETTERS)
    large, usual = ImageFont.load_default(size=size), ImageFont.load_default(size=max(LEAST_TEXT, round(size * 0.8)))
    writer = Writer(width, margin)
    writer.text(title, large, INK)
    writer.text(details, usual, FAINT)
    for group in groups:
        writer.space(margin)
        writer.text(group.heading, large, INK)
        writer.columns(headings, usual, cell[0])
        for row in group.rows:
            writer.text(row.label, usual, FAINT)
            writer.pictures(row.pictures, cell)
    return writer.sheet()


class Writer:
    """What goes onto a sheet, noted from top to bottom and drawn once its height is known."""

    def __init__(self, width: int, margin: int) -> None:
        self.width, self.margin, self.top = width, margin, margin
        self.words: list[tuple[tuple[int, int], str, Font, tuple[int, int, int]]] = []
        self.places: list[tuple[tuple[int, int], Path, tuple[int, int]]] = []

    def space(self, pixels: int) -> None:
        self.top += pixels

    def text(self, text: str, font: Font, ink: tuple[int, int, int]) -> None:
        for line in wrapped(text, font, self.width - 2 * self.margin):
            self.words.append(((self.margin, self.top), line, font, ink))
            self.top += height_of(font)

    def columns(self, headings: Sequence[str], font: Font, cell: int) -> None:
        lines = [wrapped(heading, font, cell) for heading in headings]
        for column, heading in enumerate(lines):
            for index, line in enumerate(heading):
                place = (self.margin + column * (cell + self.margin), self.top + index * height_of(font))
                self.words.append((place, line, font, INK))
        self.top += max(map(len, lines)) * height_of(font)

    def pictures(self, paths: Sequence[Path], cell: tuple[int, int]) -> None:
        for column, path in enumerate(paths):
            self.places.append(((self.margin + column * (cell[0] + self.margin), self.top), path, cell))
        self.top += cell[1] + self.margin

    def sheet(self) -> Image.Image:
        """One picture after the other is opened: a sheet of many takes no more memory than itself."""
        sheet = Image.new("RGB", (self.width, self.top), PAPER)
        pen = ImageDraw.Draw(sheet)
        for place, line, font, ink in self.words:
            pen.text(place, line, fill=ink, font=font)
        for place, path, cell in self.places:
            if not path.is_file():
                pen.rectangle((*place, place[0] + cell[0] - 1, place[1] + cell[1] - 1), fill=GAP)
                continue
            with Image.open(path) as picture:
                sheet.paste(fitted(picture.convert("RGB"), cell), place)
        return sheet


def cell_size(groups: Sequence[Group], columns: int) -> tuple[int, int]:
    """Width and height of every picture on the sheet: small ones enlarged, and less where there are very many."""
    rows = sum(len(group.rows) for group in groups)
    width, height = 1, 1
    for path in (path for group in groups for row in group.rows for path in row.pictures):
        if path.is_file():
            with Image.open(path) as picture:
                width, height = picture.size
            break
    side = min(max(width, height, SMALLEST), LARGEST, WIDEST // columns)
    shape = (width / max(width, height), height / max(width, height))
    most = (MOST_PIXELS / (rows * columns * shape[0] * shape[1])) ** 0.5
    side = min(side, int(most))
    return max(1, round(side * shape[0])), max(1, round(side * shape[1]))


def fitted(picture: Image.Image, cell: tuple[int, int]) -> Image.Image:
    return picture if picture.size == cell else picture.resize(cell, Image.Resampling.LANCZOS)


def height_of(font: Font) -> int:
    """Of a line of text, with the space below it, in pixels."""
    size = font.size if isinstance(font, ImageFont.FreeTypeFont) else LEAST_TEXT
    return round(size * 1.35)


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


def save_picture(path: Path, picture: Image.Image, text: PngInfo | None = None) -> None:
    """Write a PNG atomically, with text beside its pixels."""
    with atomic_path(path) as temporary:
        picture.save(temporary, format="PNG", pnginfo=text)
