"""Fonts for contact sheets: the one of this machine with most of the letters, and names for those that it lacks."""

from __future__ import annotations

import unicodedata
from itertools import groupby

from PIL import ImageFont

# Pillow's own font knows little beyond ASCII. These are looked for where systems keep fonts, wide ones first.
FONTS = (
    "DejaVuSans.ttf",
    "NotoSansCJK-Regular.ttc",
    "NotoSans-Regular.ttf",
    "LiberationSans-Regular.ttf",
    "Arial Unicode.ttf",
    "msyh.ttc",
    "segoeui.ttf",
    "arial.ttf",
)
NOWHERE = "\U0010fffd"  # which no font draws
UNSEEN = ("Cf", "Mn", "Me")  # categories of characters without a width of their own
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def fonts_for(text: str, large: int, usual: int) -> tuple[Font, Font]:
    """The same font in two sizes, pixels: Pillow's own where it has all letters, else the one that lacks fewest."""
    own: tuple[Font, Font] = (ImageFont.load_default(size=large), ImageFont.load_default(size=usual))
    best, fewest = own, len(lacking(text, own[0]))
    for name in FONTS if fewest else ():
        try:
            found: tuple[Font, Font] = (ImageFont.truetype(name, large), ImageFont.truetype(name, usual))
        except OSError:
            continue
        if (count := len(lacking(text, found[0]))) < fewest:
            best, fewest = found, count
    return best


def lacking(text: str, font: Font) -> set[str]:
    """The letters of a text that the font draws as an empty box."""
    box = bytes(font.getmask(NOWHERE))
    seen = {letter for letter in text if not letter.isspace() and unicodedata.category(letter) not in UNSEEN}
    return {letter for letter in seen if bytes(font.getmask(letter)) == box}


def legible(text: str, font: Font) -> str:
    """The text with words in place of what the font lacks: `[cat face]`, `[7 letters: cjk]`."""
    missing = lacking(text, font)
    if not missing:
        return text
    parts = []
    for absent, letters in groupby(text, missing.__contains__):
        run = "".join(letters)
        parts.append(_in_words(run) if absent else run)
    return "".join(parts)


def _in_words(run: str) -> str:
    names = [unicodedata.name(letter, "unknown sign").lower() for letter in run]
    if all(unicodedata.category(letter).startswith(("S", "C")) for letter in run):
        return "".join(f"[{name}]" for name in names)
    kinds = dict.fromkeys(name.split()[0] for name in names)
    return f"[{len(run)} {'letter' if len(run) == 1 else 'letters'}: {', '.join(kinds)}]"
