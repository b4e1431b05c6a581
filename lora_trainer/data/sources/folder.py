"""Plain folders, kohya's `10_name` folders and Hugging Face image folders: images below one folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.findings import counted
from lora_trainer.data.images.images import IMAGE_ENDINGS
from lora_trainer.data.sources.beside import TextFiles, read_beside, reader_of, texts_beside
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.layout import kohya_folders, without_side_folders
from lora_trainer.data.sources.metadata import METADATA_NAMES, FilesBelow, controls_in, key_of, read_metadata
from lora_trainer.data.sources.names import (
    CONDITION_LABEL,
    MASK_LABEL,
    OWN_FILES,
    SHARDS,
    NamedImages,
    ending_of,
    folded,
    is_image,
    masks_beside,
    stem_of,
)
from lora_trainer.data.sources.rows import SourceRow

if TYPE_CHECKING:
    from lora_trainer.data.sources.listing import Listing

# Images that other programs write and that are not read here: rare formats, and those whose decoders are attacked most.
FOREIGN_IMAGES = frozenset(
    (".heic .heif .hif .jxl .jp2 .j2k .jpf .jpx .tga .dds .exr .hdr .ico .psd .psb .xcf .kra .svg"
     " .raw .dng .cr2 .cr3 .nef .arw .orf .rw2 .raf").split()
)  # fmt: skip


def read_folder(listing: Listing, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """All images of a listing in the order of their paths, with captions, repeats and weights."""
    root = listing.root
    if listing.in_icloud:
        count, first = counted(len(listing.in_icloud), "file"), listing.in_icloud[0]
        message = f"{root}: {count} in iCloud, not downloaded to this disk (first: {first})."
        reading.find("not_downloaded", "warning", message, "Download them in the Finder, and run again.")
    texts = {folder: texts_beside(names, request) for folder, names in listing.names.items()}
    images = _images_of(listing, request, reading)
    rows = _rows_of(listing, images, texts, request, reading)
    captioned = {
        (folder, name) for folder, name in images if any(each.is_caption for each in texts[folder].of.get(name, ()))
    }
    if rows:
        keys = {key for key, row in rows.items() if row.text is not None}
        captioned.update(each for each in images if key_of(str(listing.path(*each))) in keys)
    images = without_side_folders(root, images, captioned, request, reading)
    folders = kohya_folders(root, sorted({folder for folder, _ in images}), request, reading)
    bases = {folder: root / folder for folder in texts}
    readers = {folder: reader_of(base) for folder, base in bases.items()}
    files, found = FilesBelow(root), list[FoundImage]()
    for key, row in rows.items():
        if row.controls:
            files.compare(Path(key).parent, row.controls)
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
        unread = [name for name in texts[folder].unread if name.lower() not in read_elsewhere]
        count_unread(base, unread, filter(is_image, listing.names[folder]), reading)
    return found


def count_unread(place: Path, names: Iterable[str], images: Iterable[str], reading: SourceReading) -> None:
    """Count files of a folder or a tar that are not read, and name the images among them, but for those that lie beside
    one of the same name that is read: `IMG_1.CR2` beside `IMG_1.JPG`."""
    names = list(names)
    foreign = [name for name in names if ending_of(name) in FOREIGN_IMAGES]
    stems = {folded(stem_of(name)) for name in images} if foreign else set[str]()
    for name in names:
        ending = ending_of(name)
        if ending in FOREIGN_IMAGES and folded(stem_of(name)) not in stems:
            message = f"is not read: {ending} is not among {' '.join(IMAGE_ENDINGS)}."
            reading.find("foreign_format", "warning", message, "Convert it to PNG or JPEG.", place / name)
        if ending not in SHARDS:
            reading.unread[ending or "without an ending"] += 1


def _images_of(listing: Listing, request: SourceRequest, reading: SourceReading) -> list[tuple[str, str]]:
    """(folder, name) of each image by its whole path; masks and control images beside images are none."""
    found: list[tuple[str, str, str]] = []
    labeled: dict[str, list[str]] = {MASK_LABEL: [], CONDITION_LABEL: []}
    for folder, names in listing.names.items():
        images = [name for name in names if is_image(name)]
        beside = set[str]()
        for label, labels in labeled.items():
            those = {file for several in masks_beside(images, label).values() for file in several}
            labels.extend(sorted(those))
            beside |= those
        found.extend((f"{folder}/{name}" if folder else name, folder, name) for name in images if name not in beside)
    masks, controls = labeled.values()
    if masks and request.section.masks is None:
        reading.note(
            f"{listing.root}: {len(masks)} masks beside images are not used (first: {masks[0]});"
            f" masks = the folder's own path uses them."
        )
    if controls and not request.section.control_images:
        reading.note(
            f"{listing.root}: {len(controls)} control images beside images are not used (first: {controls[0]});"
            f' control_images = ["FOLDER/*{CONDITION_LABEL}"] uses them.'
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


def no_images(listing: Listing, reading: SourceReading) -> None:
    """Add a problem that lists what was found in place of images."""
    endings = Counter(ending_of(name) or "no ending" for names in listing.names.values() for name in names)
    if listing.in_icloud:
        endings["that are in iCloud, not downloaded"] = len(listing.in_icloud)
    listed = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(5))
    looked = f"{' '.join(IMAGE_ENDINGS)} .tar .parquet"
    message = f"{listing.root} holds no image; looked for {looked} and found {listed or 'no file'}."
    fix = "Download what is in iCloud in the Finder." if listing.in_icloud else "Name the folder that holds the images."
    reading.problem(message, fix)
