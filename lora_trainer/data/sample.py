"""The values that data travels as: a sample and a manifest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    """One picture with its caption.

    `width` and `height` are as the picture is seen, after EXIF rotation.
    `content` is the hex sha256 of the picture file's bytes. `weight` multiplies the sample's loss.
    """

    path: Path
    caption: str
    width: int
    height: int
    content: str
    repeats: int = 1
    weight: float = 1.0

    @property
    def id(self) -> str:
        """Names the sample in random draws: its content, not its place or name."""
        return self.content[:32]


@dataclass(frozen=True)
class Manifest:
    """All samples of a run, in a stable order, with what was noticed while reading."""

    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()

    @property
    def data_hash(self) -> str:
        """Changes when a picture, a caption, a repeat count or a weight changes; names and places do not count."""
        rows = sorted((sample.content, sample.caption, sample.repeats, sample.weight) for sample in self.samples)
        return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode("ascii")).hexdigest()
