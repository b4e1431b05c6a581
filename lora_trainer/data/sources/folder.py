"""Plain folders, kohya's `10_name` folders and Hugging Face image folders: images below one folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lora_trainer.data.images.images import IMAGE_ENDINGS
from lora_trainer.data.sources.beside import caption_beside, caption_endings
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.listing import Listing
from lora_trainer.data.sources.metadata import METADATA_NAMES, controls_in, key_of, read_metadata
from lora_trainer.data.sources.rows import SourceRow

FOREIGN_IMAGES = (".heic", ".heif", ".jxl", ".psd", ".svg", ".raw", ".cr2", ".nef", ".dng")
KOHYA_FOLDER = re.compile(r"(\d+)_(.*)")
MOST_REPEATS = 1000  # a larger number is a year or an id: `2024_holiday`
MASK_LABEL = "-masklabel"  # what OneTrainer puts behind an image's name for its mask


def stem_of(name: str) -> str:
    """A bare name without its ending; quicker than `os.path.splitext`, which counts at 100,000."""
    dot = name.rfind(".")
    return name[:dot] if dot > 0 else name


def ending_of(name: str) -> str:
    """A bare name's ending with its dot, in small letters."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot > 0 else ""


def is_image(name: str) -> bool:
    return ending_of(name) in IMAGE_ENDINGS


def read_folder(listing: Listing, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """All images of a listing in the order of their paths, with captions, repeats and weights."""
    root = listing.root
    images = _images_of(listing, request, reading)
    rows = _rows_of(listing, images, request, reading)
    folders = {folder: _kohya_of(root, folder, reading) for folder in sorted({folder for folder, _ in images})}
    plain = [folder or "." for folder, named in folders.items() if named is None]
    if len(plain) not in (0, len(folders)) and request.section.repeats is None:
        reading.note(f"{root}: folders without a repeat count are taken once ({', '.join(plain[:3])}).")
    names = {folder: frozenset(listed) for folder, listed in listing.names.items()}
    bases = {folder: root / folder for folder in names}
    found = []
    for folder, name in images:
        kohya = folders[folder]
        repeats = request.repeats(kohya[0] if kohya else 1)
        if repeats == 0:
            reading.note(f"{bases[folder]}: 0 repeats, skipped.")
            continue
        path = bases[folder] / name
        row = rows.get(key_of(str(path)), SourceRow(name)) if rows else SourceRow(name)
        caption, instead = caption_beside(path, names[folder], request, reading)
        if caption is None:
            caption = row.text
        named = kohya[1] if kohya else None
        controls = controls_in(bases[folder], row.controls)
        found.append(
            FoundImage(path, caption, repeats, row.weight, instead=instead, folder_caption=named, controls=controls)
        )
    _find_unused(listing, request, reading)
    return found


def _images_of(listing: Listing, request: SourceRequest, reading: SourceReading) -> list[tuple[str, str]]:
    """(folder, name) of each image by its whole path; masks beside images are none."""
    found: list[tuple[str, str, str]] = []
    labels: list[str] = []
    for folder, names in listing.names.items():
        images = [name for name in names if is_image(name)]
        masks = {name for name in images if MASK_LABEL in name and stem_of(name).endswith(MASK_LABEL)}
        if masks:
            stems = set(map(stem_of, images))
            masks = {name for name in masks if stem_of(name).removesuffix(MASK_LABEL) in stems}
        labels.extend(sorted(masks))
        found.extend((f"{folder}/{name}" if folder else name, folder, name) for name in images if name not in masks)
    if labels and request.section.masks is None:
        reading.note(
            f"{listing.root}: {len(labels)} masks beside images are not used (first: {labels[0]});"
            f" masks = the folder's own path uses them."
        )
    return [(folder, name) for _, folder, name in sorted(found)]


def _rows_of(
    listing: Listing, images: list[tuple[str, str]], request: SourceRequest, reading: SourceReading
) -> Mapping[str, SourceRow]:
    """The rows of the image folders' tables, by the image's key."""
    tables = [
        listing.path(folder, name)
        for folder, names in sorted(listing.names.items())
        for name in METADATA_NAMES
        if name in names
    ]
    if not tables:
        return {}
    keys = {key_of(str(listing.path(folder, name))) for folder, name in images}
    rows: dict[str, SourceRow] = {}
    for table in tables:
        rows.update(read_metadata(table, keys, reading, request.section.control_columns))
    return rows


def _kohya_of(root: Path, folder: str, reading: SourceReading) -> tuple[int, str] | None:
    """(repeats, caption) of the nearest folder named `10_name`, the source itself included."""
    inner = folder.split("/") if folder else []
    for depth in range(len(inner), -1, -1):
        name = inner[depth - 1] if depth else root.name
        if match := KOHYA_FOLDER.fullmatch(name):
            repeats, caption = int(match[1]), match[2].strip()
            if repeats <= MOST_REPEATS:
                return repeats, caption
            place = root.joinpath(*inner[:depth])
            reading.note(f"{place}: {match[1]} is taken as part of the name, not as repeats (most: {MOST_REPEATS}).")
    return None


def no_images(listing: Listing, reading: SourceReading) -> None:
    """Add a problem that lists what was found in place of images."""
    endings = Counter(ending_of(name) or "no ending" for names in listing.names.values() for name in names)
    listed = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(5))
    looked = f"{' '.join(IMAGE_ENDINGS)} .tar .parquet"
    message = f"{listing.root} holds no image; looked for {looked} and found {listed or 'no file'}."
    reading.problem(message, "Name the folder that holds the images.")


def _find_unused(listing: Listing, request: SourceRequest, reading: SourceReading) -> None:
    endings = {*caption_endings(request)}
    for folder, names in listing.names.items():
        stems: set[str] | None = None
        for name in names:
            ending = ending_of(name)
            if ending in FOREIGN_IMAGES:
                message = f"is not read: {ending} is not among {' '.join(IMAGE_ENDINGS)}."
                reading.find(
                    "foreign_format", "warning", message, "Convert it to PNG or JPEG.", listing.path(folder, name)
                )
            elif ending in endings:
                if stems is None:
                    images = [each for each in names if is_image(each)]
                    stems = set(map(stem_of, images)) | set(images)
                if stem_of(name) not in stems:
                    message = "is a caption without an image."
                    reading.find(
                        "orphan_caption", "note", message, "Add the image or remove it.", listing.path(folder, name)
                    )
