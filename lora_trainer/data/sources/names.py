"""Which image a file belongs to by its name: one rule for captions, masks, control images, tables and tars.

Two names are the same letter for letter; else in Unicode's composed form, since archives from macOS store é as two letters;
else whatever the case of their letters. A file belongs to the images whose names are nearest to its own.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, TypeVar

from lora_trainer.data.images.images import IMAGE_ENDINGS

SHARDS = (".tar", ".parquet")
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
CLEAN_COPY_RECORD = "fixed.json"  # that `check --clean-copy` writes beside the images
SETTINGS_FILE = "lora.toml"  # of a folder in a batch
OWN_FILES = (CLEAN_COPY_RECORD, SETTINGS_FILE)
EXACT, COMPOSED, FOLDED = range(3)  # how near two names are
MASK_LABEL = "-masklabel"  # what OneTrainer puts behind an image's name for its mask
CONDITION_LABEL = "-condlabel"  # and for its control image
IMAGE_ENDING_SET = frozenset(IMAGE_ENDINGS)

Image = TypeVar("Image")


def stem_of(name: str) -> str:
    """A bare name without its ending; quicker than `os.path.splitext`, which counts at 100,000."""
    dot = name.rfind(".")
    return name[:dot] if dot > 0 else name


def ending_of(name: str) -> str:
    """A name's ending with its dot, in small letters; not one of its folder."""
    start = name.rfind("/") + 1
    dot = name.rfind(".", start)
    return name[dot:].lower() if dot > start else ""


def is_image(name: str) -> bool:
    return ending_of(name) in IMAGE_ENDING_SET


def composed(name: str) -> str:
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def folded(name: str) -> str:
    return composed(name).casefold()


class NamedImages(Generic[Image]):
    """Images by their names, of which several images may have the same."""

    def __init__(self, named: Iterable[tuple[str, Image]] = ()) -> None:
        self._exact: dict[str, list[Image]] = {}
        self._others: tuple[dict[str, list[Image]], dict[str, list[Image]]] | None = None
        for name, image in named:
            self.add(name, image)

    def add(self, name: str, image: Image) -> None:
        self._others = None
        images = self._exact.get(name)
        if images is None:
            self._exact[name] = [image]
        else:
            images.append(image)

    def find(self, name: str) -> tuple[int, Sequence[Image]]:
        """How near the nearest name is, and the images that have it; none where it is nobody's."""
        images = self._exact.get(name)
        if images is not None:
            return EXACT, images
        if self._others is None:
            self._others = self._composed_and_folded()
        by_composed, by_folded = self._others
        images = by_composed.get(composed(name))
        if images is not None:
            return COMPOSED, images
        return FOLDED, by_folded.get(folded(name), ())

    def _composed_and_folded(self) -> tuple[dict[str, list[Image]], dict[str, list[Image]]]:
        """Made once a name is not found as it is: nearly all are."""
        by_composed: dict[str, list[Image]] = {}
        by_folded: dict[str, list[Image]] = {}
        for name, images in self._exact.items():
            by_composed.setdefault(composed(name), []).extend(images)
            by_folded.setdefault(folded(name), []).extend(images)
        return by_composed, by_folded


def without_label(name: str, label: str) -> str | None:
    """The name in front of a label, whatever its case: `cat` of `cat-masklabel`. None where the label is not there."""
    if not label:
        return name
    return name[: -len(label)] if folded(name[-len(label) :]) == folded(label) else None


def masks_beside(names: Collection[str], label: str = MASK_LABEL) -> dict[str, list[str]]:
    """The masks among the files of a folder, `cat-masklabel.png` or `cat.jpg-masklabel.png`, by the image that they lie
    beside, the nearest name first."""
    labeled = [name for name in names if label in name.lower() and is_image(name)]
    if not labeled:
        return {}
    images = NamedImages((each, name) for name in names if is_image(name) for each in (stem_of(name), name))
    found: dict[str, list[tuple[int, str]]] = {}
    for mask in labeled:
        stem = without_label(stem_of(mask), label)
        nearness, owners = (FOLDED, ()) if stem is None else images.find(stem)
        for image in owners:
            found.setdefault(image, []).append((nearness, mask))
    return {image: [mask for _, mask in sorted(masks)] for image, masks in found.items()}
