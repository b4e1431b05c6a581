"""How long the texts of a dataset may be, and how they are tidied."""

from __future__ import annotations

import re
import unicodedata

MOST_CAPTION_BYTES = 1 << 20
MOST_TABLE_BYTES = 1 << 30
# Characters that show nothing: control codes, soft hyphens, marks of zero width, marks of direction, byte order marks and
# fillers. Not those of U+0080 to U+009F: they are letters that were read in a wrong encoding, which the check names.
HIDDEN = re.compile(
    "[\0-\x08\x0e-\x1b\x7f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
JOINERS = "\u200c\u200d"
ZERO_WIDTH_SPACE = "\u200b"
DIRECTION_MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u2066\u2067\u2068\u2069"
BLACK_FLAG = "\U0001f3f4"  # the flags of England, Scotland and Wales are this one and hidden letters
FLAG_LETTERS = "".join(map(chr, range(0xE0020, 0xE0080)))
# Thai, Lao, Burmese and Khmer have no spaces between words: a space of zero width shows where they end.
WITHOUT_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")


def tidy(text: str, *, keep_lines: bool) -> str:
    """A caption with single spaces and without hidden characters. Lines are kept apart where one of them is to be chosen,
    else joined."""
    if not text.isascii():  # halves of surrogate pairs, from names or from JSON, cannot be encoded
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    text = without_hidden(text)
    if not keep_lines:
        return " ".join(text.split())
    return "\n".join(line for line in (" ".join(line.split()) for line in text.splitlines()) if line)


def without_hidden(text: str) -> str:
    """The text without characters that show nothing, except where its script or an emoji needs them."""
    if HIDDEN.search(text) is None:
        return text
    needed = _needed_anywhere(text)
    return HIDDEN.sub(lambda match: match[0] if _is_needed(text, match.start(), needed) else "", text)


def hidden_characters(text: str) -> list[str]:
    """The code points that `without_hidden` removes, each once: `U+200B`."""
    places = [match.start() for match in HIDDEN.finditer(text)]
    needed = _needed_anywhere(text) if places else ""
    return [
        f"U+{ord(each):04X}" for each in {text[place]: 0 for place in places if not _is_needed(text, place, needed)}
    ]


def _needed_anywhere(text: str) -> str:
    """Marks of direction in a text with Hebrew or Arabic letters, and the hidden letters of flags."""
    runs_both_ways = any(unicodedata.bidirectional(each) in ("R", "AL") for each in text if each > "\u0590")
    return (DIRECTION_MARKS if runs_both_ways else "") + (FLAG_LETTERS if BLACK_FLAG in text else "")


def _is_needed(text: str, place: int, needed: str) -> bool:
    """Whether a character that shows nothing changes what is around it."""
    character, before = text[place], text[max(0, place - 1) : place]
    if character in JOINERS:
        # Of emoji, and of letters in Persian, Arabic and the scripts of India; not of Latin, Greek or Cyrillic.
        return before >= "\u0590" and not HIDDEN.match(before)
    if character == ZERO_WIDTH_SPACE:
        return WITHOUT_SPACES.match(before) is not None
    return character in needed
