"""How long the texts of a dataset may be, and how they are tidied."""

from __future__ import annotations

MOST_CAPTION_BYTES = 1 << 20
MOST_TABLE_BYTES = 1 << 30


def tidy(text: str, *, keep_lines: bool) -> str:
    """A caption with single spaces. Lines are kept apart where one of them is to be chosen, else joined."""
    if not text.isascii():  # halves of surrogate pairs, from names or from JSON, cannot be encoded
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if not keep_lines:
        return " ".join(text.split())
    return "\n".join(line for line in (" ".join(line.split()) for line in text.splitlines()) if line)
