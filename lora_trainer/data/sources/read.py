"""One source of any format: its places, and what images they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lora_trainer.data.images.images import IMAGE_ENDINGS
from lora_trainer.data.images.remote import ENDING
from lora_trainer.data.sources.beside import read_beside, reader_of, texts_beside
from lora_trainer.data.sources.controls import with_controls
from lora_trainer.data.sources.folder import no_images, read_folder
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.layout import find_splits
from lora_trainer.data.sources.listing import Listing, list_folder, names_in
from lora_trainer.data.sources.masks import masks_folder, with_masks
from lora_trainer.data.sources.metadata import METADATA_NAMES, mixed_columns, with_captions_file
from lora_trainer.data.sources.names import OWN_FILES, SHARDS, TABLES, ending_of, folded, is_image, stem_of
from lora_trainer.data.sources.places import common_root, control_place
from lora_trainer.data.sources.remote import read_remote
from lora_trainer.data.sources.table import read_table_source
from lora_trainer.data.sources.tar import COMPRESSED_ENDINGS, read_tar


def read_source(places: Sequence[Path], request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """The images of one source, with captions of its `captions_file`, its masks and its control images."""
    before = len(reading.problems)
    reading.unread.clear()
    reading.without_caption.clear()
    reading.filled.clear()
    reading.first_filled.clear()
    found = [each for place in places for each in _read_place(place, request, reading)]
    if not found:
        if places and len(reading.problems) == before:
            reading.problem(f"{request.shown_path} holds no image that can be used.", _last_reason(reading))
        return []
    _note_unread(request, reading)
    root = common_root(places)
    if request.section.captions_file is not None:
        found = with_captions_file(found, root, request, reading)
    _find_damage(found, request, reading)
    return with_controls(with_masks(found, root, request, reading), root, request, reading)


def _find_damage(found: Sequence[FoundImage], request: SourceRequest, reading: SourceReading) -> None:
    """Name the damaged files that may be captions. A JSON is one of another program where its image has a caption elsewhere,
    and no setting says that it holds captions."""
    for each in found:
        if each.damage is None:
            continue
        default = request.section.default_caption
        has_other = bool(each.folder_caption if default is None else default)
        if each.damage.code == "bad_metadata" and has_other and request.ending is None:
            reading.findings.append(replace(each.damage, severity="note"))
            continue
        reading.findings.append(each.damage)
        if each.damage.severity == "error":
            reading.reported.add(each.path)


def _note_unread(request: SourceRequest, reading: SourceReading) -> None:
    """Count what was not read, by its kind: one line whatever there is of it."""
    if reading.unread:
        kinds = ", ".join(f"{count} {ending}" for ending, count in sorted(reading.unread.items()))
        total = reading.unread.total()
        are = "file is" if total == 1 else "files are"
        reading.note(f"{request.shown_path}: {total} {are} not read: {kinds}.")
    if uses := mixed_columns(reading.filled):
        message = f"is one of the images with captions in several keys of their JSON: {uses}."
        fix = "To use one key of them alone, name it with captions.column."
        reading.find("mixed_columns", "note", message, fix, next(iter(reading.first_filled.values())))
    if reading.without_caption:
        count, first = len(reading.without_caption), reading.without_caption[0]
        columns = ", ".join(request.columns.captions)
        message = f"{count} JSON beside images without {columns} (first: {first}); captions.column names another key."
        reading.note(f"{request.shown_path}: {message}")


def _last_reason(reading: SourceReading) -> str:
    """Of what was found, or noted, the last: it was about the place that holds nothing."""
    if reading.findings:
        last = reading.findings[-1]
        return f"{last.path or ''} {last.message} {last.fix}".strip()
    return list(reading.notes)[-1] if reading.notes else "Name one that does."


def _read_place(place: Path, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    if place.is_dir():
        return _read_folder(place, request, reading)
    if not place.is_file():
        reading.problem(f"{place} is a pipe or a device.", "Name a folder or a file.")
        return []
    if place.name.lower().endswith(COMPRESSED_ENDINGS):
        fix = "Unpack it, and name the plain tar or the folder: images are read in place."
        reading.problem(f"{place} is a compressed tar.", fix)
        return []
    if is_image(place.name):
        return [_one_image(place, request, reading)]
    reader = FILES.get(ending_of(place.name))
    if reader is not None:
        return reader(place, request, reading)
    endings = " ".join((*IMAGE_ENDINGS, *FILES))
    reading.problem(
        f"{place} is neither a folder nor a file of images.", f"Name a folder, or a file that ends in {endings}."
    )
    return []


def _one_image(place: Path, request: SourceRequest, reading: SourceReading) -> FoundImage:
    files = texts_beside(names_in(place.parent), request).of.get(place.name, ())
    beside = read_beside(place, files, reader_of(place.parent), request, reading)
    return FoundImage(
        place,
        beside.caption,
        request.repeats(),
        beside.weight,
        instead=beside.instead,
        hint=beside.hint,
        caption_file=beside.file,
        damage=beside.damage,
    )


def _read_folder(place: Path, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """The images of a folder, then those in the tars and Parquet files below it."""
    beside = (masks_folder(request), *(control_place(each)[0] for each in request.section.control_images))
    listing = list_folder(place, reading, without=[each for each in beside if each not in (None, place)])
    found = _with_table(read_folder(listing, request, reading), listing)
    for path in _shards_of(listing):
        if path.suffix.lower() == ".tar" or _holds_images(path):
            found.extend(FILES[path.suffix.lower()](path, request, reading))
        else:
            reading.unread[".parquet"] += 1
    has_images = any(is_image(name) or ending_of(name) == ".tar" for names in listing.names.values() for name in names)
    if not found and not has_images:
        no_images(listing, reading)
    find_splits(place, found, reading)
    return found


def _with_table(found: list[FoundImage], listing: Listing) -> list[FoundImage]:
    """Images without a caption, with a table beside them that is only read when it is named."""
    if all(each.caption is not None for each in found):
        return found
    stems = {folded(each.path.stem) for each in found}
    tables = [
        listing.path(folder, name)
        for folder, names in listing.names.items()
        for name in names
        if ending_of(name) in TABLES
        and name.lower() not in (*METADATA_NAMES, *OWN_FILES)
        and folded(stem_of(name)) not in stems
    ]
    if len(tables) != 1 or (tables[0].suffix.lower() == ".parquet" and _holds_images(tables[0])):
        return found
    hint = f"{tables[0].name} is here: name it as captions_file of the source, or as --data."
    return [each if each.caption is not None or each.hint else replace(each, hint=hint) for each in found]


def _shards_of(listing: Listing) -> list[Path]:
    names = [
        (f"{folder}/{name}", folder, name)
        for folder, listed in listing.names.items()
        for name in listed
        if ending_of(name) in SHARDS and name.lower() not in METADATA_NAMES
    ]
    return [listing.path(folder, name) for _, folder, name in sorted(names)]


def _holds_images(path: Path) -> bool:
    """Whether a Parquet file has images; one that cannot be read may have had."""
    from pyarrow import ArrowException

    from lora_trainer.data.sources.parquet import image_column

    try:
        return image_column(path) is not None
    except (OSError, ValueError, ArrowException):
        return True


def _read_parquet(path: Path, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """Images in the file itself, or a table that names them."""
    from pyarrow import ArrowException

    from lora_trainer.data.sources.parquet import image_column, read_parquet

    try:
        column = image_column(path)
        if column is None:
            return read_table_source(path, request, reading)
        return read_parquet(path, column, request, reading)
    except (OSError, ValueError, ArrowException) as error:
        message = f"cannot be read as Parquet ({str(error).splitlines()[0] if str(error) else 'no reason given'})."
        reading.find("unreadable", "error", message, "Make or download it again.", path)
        return []


def _read_dataset_toml(path: Path, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    del request
    reading.problem(f"{path} is a list of sources, not a source.", "Use it alone, with --data or lora-trainer import.")
    return []


FILES: dict[str, Callable[[Path, SourceRequest, SourceReading], list[FoundImage]]] = {
    ".tar": read_tar,
    ".parquet": _read_parquet,
    ENDING: read_remote,
    **dict.fromkeys((".jsonl", ".json", ".csv", ".tsv"), read_table_source),
    ".toml": _read_dataset_toml,
}
