"""Text on images, read by the optional package rapidocr: dates of a camera, watermarks, memes. `pip install 'lora-trainer[ocr]'`.

Its models come in its wheel, so nothing is downloaded. What was read of an image is kept by its content, as measures are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from lora_trainer.core.findings import Finding
from lora_trainer.data.images.images import BrokenImageError, load_rgb
from lora_trainer.data.images.remembered import Remembered, remembered
from lora_trainer.data.images.workers import Progress, Ticker

if TYPE_CHECKING:
    from lora_trainer.data.sample import Sample

TEXTS = 2002  # kept results of another number are read again
NOT_INSTALLED = "text on images: not read (pip install 'lora-trainer[ocr]')"
LONGEST_SIDE = 1280  # pixels; a larger image is made smaller before
SHORTEST_SIDE = 30  # pixels then; no word is legible in less, and rapidocr would enlarge it
LEAST_SURE, FEWEST_LETTERS = 0.8, 3  # what is less sure or shorter is mostly texture
SHOWN_LETTERS = 60
READ_AT_ONCE = 20  # images whose texts are kept together


def can_read() -> bool:
    """Whether the packages of the extra are installed. They are not imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("rapidocr", "onnxruntime"))


def find_texts(samples: Sequence[Sample], progress: Progress | None = None) -> list[Finding]:
    """A note for each image with text on it. About 2 s an image on one CPU core; what was read before takes no time.

    Texts that another version of rapidocr read are read again.
    """
    first = {sample.content: sample for sample in reversed(samples)}
    ticker = Ticker(progress, len(first))
    texts: dict[str, str] = {}
    with remembered() as store:
        for content, kept in store.measures(list(first), TEXTS).items():
            text, reader = json.loads(kept)
            if reader == version("rapidocr"):
                texts[content] = str(text)
        ticker.step(len(texts))
        _read_others([sample for content, sample in first.items() if content not in texts], texts, store, ticker)
    return [
        Finding(
            "text_on_image",
            "note",
            f"shows text ({texts[sample.content][:SHOWN_LETTERS]!r}).",
            "Retouch or cut off a date or a watermark; leave text that belongs to the image, and name it in the caption.",
            path=sample.path,
        )
        for sample in samples
        if texts.get(sample.content)
    ]


def _read_others(samples: Sequence[Sample], texts: dict[str, str], store: Remembered, ticker: Ticker) -> None:
    """Read each image and keep what was read, some images at a time."""
    if not samples:
        return
    from rapidocr import RapidOCR

    # By default the shorter side is enlarged to 736 pixels, with which a narrow image takes gigabytes.
    limits = {"Det.limit_type": "max", "Det.limit_side_len": LONGEST_SIDE}
    reader = RapidOCR(params={"Global.log_level": "critical", **limits})
    with store.keeping(TEXTS, READ_AT_ONCE) as keep:
        for sample in samples:
            with contextlib.suppress(BrokenImageError):  # named by the check of what can be read
                image = load_rgb(sample.path, sample.span)
                image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
                lines: Iterable[tuple[str, float]] = ()
                if min(image.size) >= SHORTEST_SIDE:
                    found = reader(np.ascontiguousarray(np.asarray(image)[:, :, ::-1]))  # BGR
                    lines = zip(found.txts or (), found.scores or (), strict=True)
                sure = [
                    text
                    for text, score in lines
                    if score >= LEAST_SURE and sum(map(str.isalnum, text)) >= FEWEST_LETTERS
                ]
                texts[sample.content] = " ".join(sure)
                keep(sample.content, json.dumps([texts[sample.content], version("rapidocr")]))
            ticker.step()
