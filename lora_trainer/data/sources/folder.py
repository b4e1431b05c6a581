"""Plain folders, kohya's `10_name` folders and Hugging Face image folders: images below one folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from lora_trainer.data.images.images import IMAGE_ENDINGS
from lora_trainer.data.sources.beside import TextFiles, read_beside, reader_of, texts_beside
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.listing import Listing
from lora_trainer.data.sources.metadata import METADATA_NAMES, FilesBelow, controls_in, key_of, read_metadata
from lora_trainer.data.sources.names import OWN_FILES, SHARDS, NamedImages, ending_of, is_image, masks_beside
from lora_trainer.data.sources.rows import SourceRow

# Images that other programs write and that are not read here: rare formats, and those whose decoders are attacked most.
FOREIGN_IMAGES = frozenset(
    (".heic .heif .hif .jxl .jp2 .j2k .jpf .jpx .tga .dds .exr .hdr .ico .psd .psb .xcf .kra .svg"
     " .raw .dng .cr2 .cr3 .nef .arw .orf .rw2 .raf").split()
)  # fmt: skip
KOHYA_FOLDER = re.compile(r"(\d+)_(.*)")
MOST_REPEATS = 1000  # a larger number is a year or an id: `2024_holiday`


def read_folder(listing: Listing, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """All images of a listing in the order of their paths, with captions, repeats and weights."""
    root = listing.root
    texts = {folder: texts_beside(names, request) for folder, names in listing.names.items()}
    images = _images_of(listing, request, reading)
    rows = _rows_of(listing, images, texts, request, reading)
    folders = {folder: _kohya_of(root, folder, reading) for folder in sorted({folder for folder, _ in images})}
    plain = [folder or "." for folder, named in folders.items() if named is None]
    if len(plain) not in (0, len(folders)) and request.section.repeats is None:
        reading.note(f"{root}: folders without a repeat count are taken once ({', '.join(plain[:3])}).")
    bases = {folder: root / folder for folder in texts}
    readers = {folder: reader_of(base) for folder, base in bases.items()}
    files, found = FilesBelow(root), list[FoundImage]()
    for folder, name in images:
        kohya = folders[folder]
        repeats = request.repeats(kohya[0] if kohya else 1)
        base = bases[folder]
        if repeats == 0:
            reading.note(f"{base}: 0 repeats, skipped.")
            continue
        path = base / name
        row = rows.get(key_of(str(path)), SourceRow(name)) if rows else SourceRow(name)
        beside = read_beside(path, texts[folder].of.get(name, ()), readers[folder], request, reading, row.text)
        found.append(
            FoundImage(
                path,
                beside.caption,
                repeats,
                row.weight if beside.weight is None else beside.weight,
                instead=beside.instead,
                hint=beside.hint or row.hint,
                folder_caption=kohya[1] if kohya else None,
                controls=controls_in(base, row.controls, files),
                caption_file=beside.file,
                damage=beside.damage,
            )
        )
    for folder, base in bases.items():
        for name in texts[folder].orphans:
            message = "is a caption without an image."
            reading.find("orphan_caption", "note", message, "Add the image or remove it.", base / name)
        read_elsewhere = (*METADATA_NAMES, *OWN_FILES)
        count_unread(base, [name for name in texts[folder].unread if name.lower() not in read_elsewhere], reading)
    return found


def count_unread(place: Path, names: Iterable[str], reading: SourceReading) -> None:
    """Count files of a folder or a tar that are not read, and name the images among them."""
    for name in names:
        ending = ending_of(name)
        if ending in FOREIGN_IMAGES:
            message = f"is not read: {ending} is not among {' '.join(IMAGE_ENDINGS)}."
            reading.find("foreign_format", "warning", message, "Convert it to PNG or JPEG.", place / name)
        if ending not in SHARDS:
            reading.unread[ending or "without an ending"] += 1


def _images_of(listing: Listing, request: SourceRequest, reading: SourceReading) -> list[tuple[str, str]]:
    """(folder, name) of each image by its whole path; masks beside images are none."""
    found: list[tuple[str, str, str]] = []
    labels: list[str] = []
    for folder, names in listing.names.items():
        images = [name for name in names if is_image(name)]
        masks = {mask for several in masks_beside(images).values() for mask in several}
        labels.extend(sorted(masks))
        found.extend((f"{folder}/{name}" if folder else name, folder, name) for name in images if name not in masks)
    if labels and request.section.masks is None:
        reading.note(
            f"{listing.root}: {len(labels)} masks beside images are not used (first: {labels[0]});"
            f" masks = the folder's own path uses them."
        )
    return [(folder, name) for _, folder, name in sorted(found)]


def _rows_of(
    listing: Listing,
    images: list[tuple[str, str]],
    texts: Mapping[str, TextFiles],
    request: SourceRequest,
    reading: SourceReading,
) -> Mapping[str, SourceRow]:
    """The rows of the image folders' tables, by the image's key."""
    tables = [
        (folder, METADATA_NAMES.index(name.lower()), name)
        for folder, files in texts.items()
        for name in files.unread
        if name.lower() in METADATA_NAMES
    ]
    if not tables:
        return {}
    keys = NamedImages((key, key) for key in (key_of(str(listing.path(folder, name))) for folder, name in images))
    rows: dict[str, SourceRow] = {}
    for folder, _, name in sorted(tables):
        rows.update(read_metadata(listing.path(folder, name), keys, reading, request.columns))
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
