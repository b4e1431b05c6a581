"""Files that belong to an image by its name: masks and control images in a folder of their own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.core.findings import counted
from lora_trainer.data.sources.found import FoundImage, SourceReading
from lora_trainer.data.sources.listing import list_folder
from lora_trainer.data.sources.names import NamedImages, is_image, without_label

MOST_NAMED = 5
WORDS = {"mask": "mask", "control": "control image"}  # in findings

Ranked = tuple[tuple[int, ...], Path]  # a partner, the better the lower


@dataclass(frozen=True)
class PartnerFiles:
    """The images of a folder of masks or control images: each path, and that below the folder without its ending."""

    folder: Path
    files: Sequence[tuple[Path, str]]

    def pair(
        self, found: Sequence[FoundImage], root: Path, labels: Sequence[str], kind: str, reading: SourceReading
    ) -> dict[Path, Path]:
        """The partner of each image of a source below `root`: by its path below the source, else by its name alone where
        only one image of the source has it. `cat.png` and `cat.jpg.png` are partners of `cat.jpg`. `labels` are what may
        follow the name, the first found wins.
        """
        ranked = self._ranked({each.path: path_below(each.path, root) for each in found}, labels)
        _find_doubtful(ranked, kind, reading)
        reading.partners[kind, self.folder] = [file for file, _ in self.files]
        reading.paired.update(file for partners in ranked.values() for _, file in partners)
        return {image: min(partners)[1] for image, partners in ranked.items()}

    def _ranked(self, places: Mapping[Path, str], labels: Sequence[str]) -> dict[Path, list[Ranked]]:
        # By the place without its ending, and with it.
        names = [(name, path) for path, place in places.items() for name in (place, f"{place}{path.suffix}")]
        images = NamedImages(names)
        alone = NamedImages((name.rpartition("/")[2], name) for name in dict.fromkeys(name for name, _ in names))
        ranked: dict[Path, list[Ranked]] = {}
        for file, place in self.files:
            for number, label in enumerate(labels):
                name = without_label(place, label)
                if name is None or (not label and file in places):  # an image of the source is no other's partner
                    continue
                nearness, owners = images.find(name)
                is_alone = not owners
                if is_alone and "/" not in name:
                    nearness, several = alone.find(name)
                    owners = images.find(several[0])[1] if len(several) == 1 else ()
                for owner in owners:
                    ranked.setdefault(owner, []).append(((is_alone, nearness, number), file))
        return ranked


def _find_doubtful(ranked: Mapping[Path, list[Ranked]], kind: str, reading: SourceReading) -> None:
    """Name what could be meant otherwise: partners that suit an image equally, and one of several images."""
    word = WORDS[kind]
    used = {image: min(partners) for image, partners in ranked.items()}
    counts = Counter(file for _, file in used.values())
    for image, (rank, file) in used.items():
        others = [other for each, other in ranked[image] if each == rank and other != file]
        if others:
            message = f"has two {word}s; {file.name} is used and {others[0].name} is not."
            reading.find(f"two_{kind}s", "warning", message, "Remove one of them.", image)
        if counts[file] > 1:
            message = f"is one of {counts[file]} images with the {word} {file.name}."
            fix = "If it is not meant for all of them, rename the others, with files of theirs."
            reading.find(f"shared_{kind}", "warning", message, fix, image)


def find_partners(folder: Path) -> PartnerFiles:
    """The images of `folder`, to be paired with those of a source."""
    listing = list_folder(folder, SourceReading())
    paths = (listing.path(inner, name) for inner, names in listing.names.items() for name in filter(is_image, names))
    return PartnerFiles(folder, [(path, path_below(path, folder)) for path in paths])


def find_unpaired(found: Sequence[FoundImage], reading: SourceReading) -> None:
    """Name the files that belong to no image of all sources. Beside the images of a source these may be other images."""
    for (kind, folder), files in reading.partners.items():
        unpaired = [file for file in files if file not in reading.paired]
        if unpaired and not any(each.path.is_relative_to(folder) for each in found):
            names = ", ".join(file.name for file in unpaired[:MOST_NAMED])
            message = f"{folder}: {counted(len(unpaired), WORDS[kind])} without an image of that name ({names})."
            reading.find(f"orphan_{kind}", "note", message, "Name each as its image is named, or remove it.")


def path_below(path: Path, root: Path) -> str:
    """An image's path below the source or from where its file lies, its whole path elsewhere, without its ending."""
    for base in (root, root.parent):
        if path != base and path.is_relative_to(base):
            path = path.relative_to(base)
            break
    return os.path.splitext(path.as_posix())[0]
