"""Files that belong to an image by its name: masks and control images in a folder of their own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.data.sources.folder import is_image
from lora_trainer.data.sources.found import FoundImage, SourceReading
from lora_trainer.data.sources.listing import list_folder


@dataclass(frozen=True)
class Partners:
    """The images of one folder by their paths below it, without endings; and how many images of the source share a name."""

    images: dict[str, Path]
    names: Counter[str]
    root: Path

    def of(self, image: Path, labels: Sequence[str] = ("",)) -> Path | None:
        """The partner of a source's image, never itself: by its path below the source, else by its name alone where only
        one image of the source has it. `labels` are what may stand behind the name, the first found wins."""
        below = path_below(image, self.root)
        stem = below.rpartition("/")[2]
        candidates = (below, stem) if self.names[stem] == 1 else (below,)
        found = (self.images.get(name + label) for name in candidates for label in labels)
        return next((path for path in found if path is not None and path != image), None)


def find_partners(folder: Path, found: Sequence[FoundImage], root: Path) -> Partners:
    """The images of `folder`, to be paired with those of a source below `root`."""
    listing = list_folder(folder, SourceReading())
    images = {
        path_below(listing.path(inner, name), folder): listing.path(inner, name)
        for inner, names in listing.names.items()
        for name in filter(is_image, names)
    }
    places = {path_below(each.path, root) for each in found}
    return Partners(images, Counter(place.rpartition("/")[2] for place in places), root)


def path_below(path: Path, root: Path) -> str:
    """An image's path below the source or from where its file lies, its whole path elsewhere, without its ending."""
    for base in (root, root.parent):
        if path != base and path.is_relative_to(base):
            path = path.relative_to(base)
            break
    return os.path.splitext(path.as_posix())[0]
