"""What the names of folders mean: kohya's repeats, masks, regularization images, the parts of a split."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.findings import counted
from lora_trainer.data.sources.names import folded, stem_of

if TYPE_CHECKING:
    from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest

KOHYA_FOLDER = re.compile(r"(0|[1-9]\d*)_(.*)")
NUMBERED_FOLDER = re.compile(r"\d+_")
PADDED_FOLDER = re.compile(r"0\d")
CAMERA_FOLDER = re.compile(r"[1-9]\d\d[A-Z0-9_]{5}")  # of DCIM: `100_PANA`
MOST_REPEATS = 500  # a larger number is a resolution, a year or an id: `512_crops`, `2024_holiday`
FEWEST_COUNTED = 3  # folders numbered 1, 2, 3, … are counted by their numbers
MOST_NAMED = 5

SPLITS = frozenset("train training val valid validation test testing".split())
REG_FOLDERS = frozenset(
    "reg regs reg_images regularization regularisation regularization_images regularisation_images class_images".split()
)
SIDE_FOLDERS = frozenset(
    (
        "mask masks mask_images masklabel depth depths canny openpose normals seg segmentation segmentations control_images conditioning"
        " conditioning_images condlabel"
    ).split()
)
# Words that mean other things as well: an expression, a style, a group of an experiment.
ORDINARY_FOLDERS = frozenset("pose poses edges lineart normal control controls".split())


def kohya_name(name: str) -> tuple[int, str] | None:
    """(repeats, caption) of a folder named `10_name`; None for `001_name`, a camera's `100_PANA` and large numbers."""
    match = KOHYA_FOLDER.fullmatch(name)
    if match is None or CAMERA_FOLDER.fullmatch(name) or int(match[1]) > MOST_REPEATS:
        return None
    return int(match[1]), match[2].strip()


def kohya_folders(
    root: Path, folders: Iterable[str], request: SourceRequest, reading: SourceReading
) -> dict[str, tuple[int, str] | None]:
    """(repeats, caption) of the nearest folder named `10_name` of each folder of images, the source itself included."""
    nearest: dict[str, Path | None] = {}
    taken: dict[Path, tuple[int, str]] = {}
    others: dict[Path, None] = {}
    for folder in folders:
        place = root / folder
        while True:
            if (kohya := kohya_name(place.name)) is not None:
                taken[place] = kohya
                break
            if NUMBERED_FOLDER.match(place.name):
                others[place] = None
            if place == root:
                break
            place = place.parent
        nearest[folder] = place if place in taken else None
    numbers = sorted(repeats for repeats, _ in taken.values())
    if len(numbers) >= FEWEST_COUNTED and numbers == list(range(1, len(numbers) + 1)):
        message = f"{root}: folders numbered from 1 to {len(numbers)} are trained once each, without captions from their names."
        fix = "For kohya's repeats name them by source: data.sources.repeats and data.sources.default_caption."
        reading.find("numbered_folder", "warning", message, fix)
        return dict.fromkeys(nearest)
    if any(PADDED_FOLDER.match(place.name) for place in others):  # `200_wren` beside `001_albatross` counts, too
        others |= dict.fromkeys(taken)
        taken = {}
    if others:
        names = ", ".join(place.name for place in list(others)[:MOST_NAMED])
        message = f"{root}: numbers of folders are taken as parts of their names, not as repeats ({names})."
        fix = f"Repeats are a number from 1 to {MOST_REPEATS} without zeros in front, or data.sources.repeats."
        reading.find("numbered_folder", "note", message, fix)
    if not taken:
        return dict.fromkeys(nearest)
    shown = [
        f'{place.name}: {request.repeats(repeats):g} repeats, caption "{caption}"'
        for place, (repeats, caption) in list(taken.items())[:MOST_NAMED]
    ]
    more = f"; and {len(taken) - MOST_NAMED} more" if len(taken) > MOST_NAMED else ""
    reading.note(
        f"{root}: folder names are taken as kohya's ({'; '.join(shown)}{more}); captions beside images come first."
    )
    plain = [folder or "." for folder, place in nearest.items() if place is None]
    if plain and request.section.repeats is None:
        names = ", ".join(plain[:MOST_NAMED])
        message = f"{root}: folders without a repeat count beside folders with one are taken once ({names})."
        fix = "Name them like 10_name too, or make them a source of their own."
        reading.find("mixed_folders", "warning", message, fix)
    return {folder: None if place is None else taken[place] for folder, place in nearest.items()}


def without_side_folders(
    root: Path,
    images: list[tuple[str, str]],
    captioned: set[tuple[str, str]],
    request: SourceRequest,
    reading: SourceReading,
) -> list[tuple[str, str]]:
    """The images (folder, name) that are samples: not those of folders of masks, control or regularization images.

    Where all lie in such folders, they are what was named. Masks and control images have no captions: those that have, the
    `captioned`, are samples. `root` is the folder or the tar that holds them.
    """
    aside = _by_part(images, SIDE_FOLDERS | REG_FOLDERS)
    samples = aside.pop("", [])
    if not samples:
        return images
    ordinary = _by_part(samples, ORDINARY_FOLDERS)
    others = ordinary.pop("", [])
    stems = _stems(others) if ordinary else set[str]()
    for folder, several in ordinary.items():
        if _are_named(several, stems):
            _find_trained(root / folder, counted(len(several), "image"), reading)
    if not aside:
        return images
    stems = _stems(samples)
    left_out: set[tuple[str, str]] = set()
    in_tar = not root.is_dir()
    for folder, several in aside.items():
        place = root / folder
        count = counted(len(several), "image")
        if _plain_name(place.name) in REG_FOLDERS:
            if not request.section.is_reg:
                message = f"{place}: {count} not trained: the folder is named as one of regularization images."
                fix = f'Make it a source: path = "{place}", is_reg = true. To train it like the others, rename it.'
                if in_tar:
                    fix = f"Unpack it first; make {folder} a source with is_reg = true. To train it like the others, rename it."
                reading.find("reg_folder", "warning", message, fix)
                left_out.update(several)
        elif captioned.isdisjoint(several) and _are_named(several, stems):
            message = (
                f"{place}: {count} not trained: its name says masks or control images, and each image in it has the name of"
                " another image."
            )
            fix = f'Set masks or control_images of the source to "{place}". To train it like the others, rename it.'
            if in_tar:
                fix = (
                    f"Unpack it first; set masks or control_images to {folder}. To train it like the others, rename it."
                )
            reading.find("side_folder", "warning", message, fix)
            left_out.update(several)
        else:
            _find_trained(place, count, reading)
    return [each for each in images if each not in left_out]


def _plain_name(name: str) -> str:
    """`reg_images` of `Reg Images`, `control` of `control1`: how people write it makes no difference."""
    return re.sub(r"[\s-]+", "_", name.lower()).rstrip("_0123456789")


def _by_part(images: Iterable[tuple[str, str]], words: frozenset[str]) -> dict[str, list[tuple[str, str]]]:
    """The images (folder, name) by the outermost folder around them that is named as one of the words; by "" where none is."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    parts = dict[str, str]()  # of each folder
    for folder, name in images:
        if folder not in parts:
            inner = folder.split("/")
            named = [_plain_name(part) in words for part in inner]
            parts[folder] = "/".join(inner[: named.index(True) + 1]) if any(named) else ""
        found[parts[folder]].append((folder, name))
    return found


def _stems(images: Iterable[tuple[str, str]]) -> set[str]:
    """The names of images, with and without their endings, as they are compared."""
    return {folded(each) for _, name in images for each in (name, stem_of(name))}


def _are_named(images: Iterable[tuple[str, str]], stems: set[str]) -> bool:
    """Whether each of the images has the name of another one."""
    return all(folded(stem_of(name)) in stems for _, name in images)


def _find_trained(place: Path, count: str, reading: SourceReading) -> None:
    message = f"{place}: {count} trained like the others, though its name says masks or control images."
    reading.find("side_folder", "warning", message, "Move it out of the data, or rename it if that is meant.")


def find_splits(root: Path, found: Iterable[FoundImage], reading: SourceReading) -> None:
    """Name the folders and shards below a source that are parts of a split, such as `train` and `test-00000.parquet`."""
    names = dict[str, str]()  # of each part, the first folder or shard
    before = os.path.join(root, "")
    for each in found:
        path = str(each.path)
        name, inside, _ = path[len(before) :].partition(os.sep)
        if not (inside and path.startswith(before)):
            continue
        split = re.split(r"[-_.]", name.lower(), maxsplit=1)[0]
        if split in SPLITS:
            names.setdefault(split, name)
    if len(names) > 1:
        message = f"{root}: {', '.join(names.values())} are trained together."
        first = min(names, key=lambda split: not split.startswith("train"))
        reading.find("split_folders", "warning", message, f"Name one of them alone: --data {root / names[first]}.")
