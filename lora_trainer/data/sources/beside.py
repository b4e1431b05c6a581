"""Captions in text files beside their images."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from lora_trainer.core.bounded import TextError, read_text
from lora_trainer.data.sources.found import SourceReading, SourceRequest
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES

CAPTION_ENDINGS = (".txt", ".caption")


def caption_endings(request: SourceRequest) -> tuple[str, ...]:
    return CAPTION_ENDINGS if request.ending is None else (request.ending,)


def caption_beside(
    image: Path, names: Container[str], request: SourceRequest, reading: SourceReading
) -> tuple[str | None, str]:
    """(caption, what was found instead). `names` are the files of the image's folder.

    The caption of `cat.png` is `cat.txt`, `cat.TXT` or `cat.png.txt`.
    """
    beside = names_beside(image.name, names, caption_endings(request))
    if len(beside) > 1:
        message = f"has two captions; {beside[0]} is used and {beside[1]} is not."
        reading.find("two_captions", "note", message, "Remove one of them.", image)
    if not beside:
        others = () if request.ending is None else names_beside(image.name, names, CAPTION_ENDINGS)
        return None, others[0] if others else ""
    try:
        # Not by joining paths, which takes as long as reading the caption.
        return read_text(str(image)[: -len(image.name)] + beside[0], MOST_CAPTION_BYTES), ""
    except TextError as error:
        message = f"has a caption file that {error} ({beside[0]})."
        reading.find("unreadable_caption", "error", message, "Save it as a short UTF-8 text.", image)
        reading.reported.add(image)
        return None, ""


def names_beside(name: str, names: Container[str], endings: tuple[str, ...]) -> list[str]:
    stem = os.path.splitext(name)[0]
    found: list[str] = []
    for ending in endings:
        for candidate in (stem + ending, stem + ending.upper(), name + ending):
            if candidate in names:
                found.append(candidate)
                break
    return found
