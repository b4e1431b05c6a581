"""The dataset's values: a sample and a manifest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# How the colors of an image's file are read, by its header. "": as they are stored. "converted": to sRGB's.
# "damaged": it states colors that cannot be read, so they count as sRGB's.
Colors = Literal["", "converted", "damaged"]


@dataclass(frozen=True)
class Span:
    """Bytes inside of a larger file, such as a member of a tar: `size` bytes from `offset` of `file`."""

    file: Path
    offset: int
    size: int


@dataclass(frozen=True)
class Mask:
    """Where a sample's loss counts: a gray image, or the image's own transparency where `path` is None.

    `content` is the hex sha256 of the mask file's bytes, empty for the image's own. A file that `has_alpha` may mean
    its transparency instead of its gray.
    """

    path: Path | None
    content: str = ""
    span: Span | None = None
    has_alpha: bool = False


@dataclass(frozen=True)
class ControlImage:
    """A control image, which an edit model reads beside the caption: the image before the edit, or a reference.

    `content` is the hex sha256 of its file's bytes. `width` and `height` are as it is seen, in pixels.
    """

    path: Path
    span: Span | None = None
    content: str = ""
    width: int = 0
    height: int = 0
    colors: Colors = ""


@dataclass(frozen=True)
class Sample:
    """One image with its caption.

    `path` names the image; its bytes are that file's, or, inside of a larger file, those of
    `span`. `caption` is as it was written, or, once captions are settled, the canonical text with
    `variants` beside it: what is trained, in turn; `weighted` says that their brackets are weights;
    `written` is the caption as it is in the dataset, once settled; without `own_caption` it is that of its
    source or folder, not written for this image; `caption_file` is the name of the file beside the image that it is in.
    `width` and `height` are as the image is seen, after EXIF rotation. `content` is the hex sha256 of the image file's bytes. `repeats` is
    how often an epoch shows it, 0.5 means every other epoch. `weight` multiplies its loss.
    `source` counts the data's sources from 0. Regularization samples keep the model's own idea
    of a class: they are never used for validation. `colors` and `has_alpha` (transparency, used or not) are as the
    image's header says.
    """

    path: Path
    caption: str
    width: int
    height: int
    content: str
    repeats: float = 1
    weight: float = 1.0
    source: int = 0
    regularization: bool = False
    span: Span | None = None
    mask: Mask | None = None
    variants: tuple[str, ...] = ()
    weighted: bool = False
    written: str | None = None
    own_caption: bool = True
    controls: tuple[ControlImage, ...] = ()
    colors: Colors = ""
    has_alpha: bool = False
    caption_file: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The captions that are trained, in turn."""
        return self.variants or (self.caption,)

    @property
    def facts(self) -> tuple[str | float, ...]:
        """What the sample is, wherever it lies and whatever it is called; as what it is ordered by."""
        mask = "" if self.mask is None else self.mask.content or "alpha"
        own = (self.content, self.caption, float(self.repeats), self.weight, self.regularization, mask)
        # Other pixels than those of the same bytes as they are stored: a program without the conversion trains others.
        converted = [self.content] if self.colors == "converted" else []
        converted += [control.content for control in self.controls if control.colors == "converted"]
        return (*own, *(control.content for control in self.controls), *converted)

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
        """Changes when an image, a caption, a mask, a control image, a repeat count, a weight or the conversion of an image's
        colors changes; names and places do not count."""
        rows = sorted(sample.facts for sample in self.samples)
        return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode("ascii")).hexdigest()
