"""WebDataset tars: images and captions as members of one key, read in place and never unpacked."""

from __future__ import annotations

import posixpath
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from lora_trainer.core.bounded import TextError
from lora_trainer.data.images.spans import open_bytes
from lora_trainer.data.sample import Span
from lora_trainer.data.sources.beside import TextFile, TextFiles, read_beside, sort_texts
from lora_trainer.data.sources.folder import count_unread
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.layout import without_side_folders
from lora_trainer.data.sources.names import CONDITION_LABEL, MASK_LABEL, NamedImages, is_image, masks_beside
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES

COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
COMPRESSED_ENDINGS = (".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
BLOCK = tarfile.BLOCKSIZE
MOST_HEADER_BYTES = 1 << 24


@dataclass
class _Key:
    """The images of one WebDataset key, of which the first is used. `shared` is the shorter key whose texts are theirs where
    they have none of their own: that in front of the first dot."""

    images: list[tuple[str, Span]] = field(default_factory=list)
    shared: str = ""


def read_tar(path: Path, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """The images of one tar in the order of its members. Members before a damaged place are used."""
    try:
        with open_bytes(path, None) as file:
            listing = list_tar(file, path.stat().st_size, path)

            def read(span: Span) -> bytes:
                file.seek(span.offset)
                return file.read(span.size)

            return images_of(listing, path, read, request, reading)
    except OSError as error:
        reading.problem(f"{path} cannot be read ({(error.strerror or str(error)).lower()}).", "Make it readable.")
        return []


@dataclass
class TarListing:
    """The regular members of a tar: cleaned name and span. `damage` says where it ends too early, empty if it does not."""

    members: list[tuple[str, Span]] = field(default_factory=list)
    damage: str = ""
    links: int = 0  # and other members that are no plain files
    texts: dict[int, bytes] = field(default_factory=dict)  # by their places
    compressed: str = ""  # the kind, of one that cannot be read in place


def list_tar(file: BinaryIO, size: int, place: Path, texts: Collection[str] = ()) -> TarListing:
    """The members of a tar of `size` bytes, from its headers; their spans are of the file `place`. Raises OSError.

    Short ones whose ending is in `texts` are read too, while the file is at their place.
    """
    start = file.read(8)
    kind = next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), "")
    if kind:
        return TarListing(compressed=kind)
    file.seek(0)
    listing, members = TarListing(), _Members(file, size)
    for name, offset, length in members:
        listing.members.append((name, Span(place, offset, length)))
        if posixpath.splitext(name)[1].lower() in texts and length <= MOST_CAPTION_BYTES:
            file.seek(offset)
            listing.texts[offset] = file.read(length)
    listing.links, listing.damage = members.links, members.reason
    if not listing.damage:
        file.seek(members.end)
        if size == 0 or any(file.read(BLOCK)):  # it ends well at the file's end, or at a block of zeros
            listing.damage = f"no header of a member at byte {members.end}"
    return listing


def images_of(
    listing: TarListing,
    path: Path,
    read: Callable[[Span], bytes],
    request: SourceRequest,
    reading: SourceReading,
) -> list[FoundImage]:
    """The images of a tar called `path`, with the texts of their keys, which `read` returns."""
    if listing.compressed:
        fix = "Unpack it (gunzip, or tar -xf) and name the plain tar or the folder: images are read in place."
        reading.problem(f"{path} is compressed ({listing.compressed}).", fix)
        return []
    if listing.damage:
        count = len(listing.members)
        message = f"is damaged ({listing.damage.splitlines()[0]}); only the {count} members before that are used."
        reading.find("damaged_tar", "warning", message, "Make or download it again.", path)
    if listing.links:
        reading.note(f"{path}: {listing.links} links and other members that are no plain files are skipped.")
    spans = dict(listing.members)  # of several of one name the last: it was added over the others
    keys = _keys_of(spans)
    texts = _texts_of(spans, keys, request)
    main: list[str] = []
    others: list[str] = []
    for stem, key in keys.items():
        # `1.mask.png` beside `1.jpg` is a second image of its key, unless it has a text of its own.
        is_other = key.shared in keys and stem not in texts.of
        (others if is_other else main).append(stem)
    # Masks and control images of the whole tar are no samples either.
    names = {keys[stem].images[0][0]: stem for stem in main}
    beside = [masks_beside(names, label) for label in (MASK_LABEL, CONDITION_LABEL)]
    labeled = {name for by_image in beside for several in by_image.values() for name in several}
    if labeled:
        reading.note(f"{path}: {len(labeled)} masks and control images beside images are not used.")
    members = [posixpath.split(name) for name in names if name not in labeled]
    captioned = {
        member
        for member in members
        if any(each.is_caption for each in texts.of.get(names[posixpath.join(*member)], ()))
    }
    members = without_side_folders(path, members, captioned, request, reading)
    main = [names[posixpath.join(*member)] for member in members]
    if others:
        first = keys[others[0]].images[0][0]
        reading.note(f"{path}: {len(others)} images beside another of their key are skipped (first: {first}).")
    for name in texts.orphans:
        message = "is a caption without an image."
        reading.find("orphan_caption", "note", message, "Add the image or remove it.", path / name)
    count_unread(path, texts.unread, filter(is_image, spans), reading)

    # `1.input.jpg` and `1.output.jpg` share `1.txt`, and so does a mask `1.mask.png`.
    sharing = [stem for stem in main if stem not in texts.of and keys[stem].shared in texts.of]
    counts = Counter(keys[stem].shared for stem in sharing)
    for stem in sharing:
        if (count := counts[keys[stem].shared]) > 1:
            name = posixpath.basename(texts.of[keys[stem].shared][0].name)
            message = f"is one of {count} images with the caption {name}."
            fix = "If it is not meant for all, give each its own, and take out what is no sample: a mask, an input."
            reading.find("shared_caption", "warning", message, fix, path / keys[stem].images[0][0])

    def read_text(name: str) -> bytes:
        if spans[name].size > MOST_CAPTION_BYTES:
            raise TextError(f"is larger than {MOST_CAPTION_BYTES >> 20} MiB")
        return read(spans[name])

    return [
        _found_of(path, keys[stem], _files_of(stem, keys[stem], texts), read_text, request, reading) for stem in main
    ]


class _Heads:
    """A tar's file for reading headers alone: one that says it is larger than any real one is not read into memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._file.read(size)


class _Members:
    """(cleaned name, offset, size) of each regular member; then `end`, `links`, and in `reason` what is damaged."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.end, self.links, self.reason = 0, 0, ""

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        try:
            with tarfile.open(fileobj=_Heads(self._file), mode="r:", errorlevel=0) as tar:  # type: ignore[call-overload]
                while (member := tar.next()) is not None:
                    tar.members = []  # a million of them need not stay
                    if member.size < 0 or tar.offset <= self.end:  # it would be read forever
                        self.reason = f"a size of {member.size} bytes"
                        break
                    self.end = tar.offset
                    if member.isdir():
                        continue
                    if not member.isreg() or member.issparse():
                        self.links += 1
                        continue
                    if member.offset_data + member.size > self._size:
                        self.reason = f"ends inside of {member.name!r}"
                        break
                    # A path below the tar, whatever the name was: nothing is ever written by it.
                    parts = [part for part in member.name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
                    if parts and not parts[-1].startswith("."):
                        yield "/".join(parts), member.offset_data, member.size
                self.end = max(self.end, tar.offset)
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
            self.reason = str(error) or "unexpected end"


def _keys_of(spans: Mapping[str, Span]) -> dict[str, _Key]:
    """The images of a tar by their names without endings."""
    keys: dict[str, _Key] = {}
    for name, span in spans.items():
        if is_image(name):
            keys.setdefault(posixpath.splitext(name)[0], _Key()).images.append((name, span))
    for stem, key in keys.items():
        folder, last = posixpath.split(stem)
        first = posixpath.join(folder, last.partition(".")[0])
        key.shared = first if first != stem else ""
    return keys


def _texts_of(spans: Mapping[str, Span], keys: Mapping[str, _Key], request: SourceRequest) -> TextFiles:
    """The texts of each key, those of shared keys too."""
    names = NamedImages[str]()
    for stem, key in keys.items():
        names.add(stem, stem)
        for name, _ in key.images:
            names.add(name, stem)
    for shared in {key.shared for key in keys.values()} - {"", *keys}:
        names.add(shared, shared)
    return sort_texts(spans, names, request)


def _files_of(stem: str, key: _Key, texts: TextFiles) -> list[TextFile]:
    """The texts of a key, and those of the shared key where it has none of its own."""
    files = [*texts.of.get(stem, ())]
    kinds = {each.is_caption for each in files}
    return files + [each for each in texts.of.get(key.shared, ()) if each.is_caption not in kinds]


def _found_of(
    path: Path,
    key: _Key,
    files: Sequence[TextFile],
    read: Callable[[str], bytes],
    request: SourceRequest,
    reading: SourceReading,
) -> FoundImage:
    """The sample of a key, of which `files` are the texts."""
    name, span = key.images[0]
    image = path / name
    if len(key.images) > 1:
        message = f"shares its key with {len(key.images) - 1} more images of {path.name}; only it is used."
        reading.find("two_images", "warning", message, "Give each image a key of its own.", image)
    beside = read_beside(image, files, read, request, reading)
    return FoundImage(
        image,
        beside.caption,
        request.repeats(),
        beside.weight,
        span,
        instead=beside.instead,
        hint=beside.hint,
        damage=beside.damage,
    )
