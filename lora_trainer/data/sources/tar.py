"""WebDataset tars: images and captions as members of one key, read in place and never unpacked."""

from __future__ import annotations

import json
import posixpath
import tarfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lora_trainer.core.bounded import TextError, decode
from lora_trainer.data.images.spans import open_bytes
from lora_trainer.data.sample import Span
from lora_trainer.data.sources.beside import CAPTION_ENDINGS, caption_endings
from lora_trainer.data.sources.folder import is_image
from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest
from lora_trainer.data.sources.rows import text_of
from lora_trainer.data.sources.texts import MOST_CAPTION_BYTES

COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
COMPRESSED_ENDINGS = (".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
BLOCK = tarfile.BLOCKSIZE
MOST_HEADER_BYTES = 1 << 24


@dataclass
class _Group:
    """The members whose names differ in their ending only."""

    images: list[tuple[str, Span]] = field(default_factory=list)
    texts: dict[str, Span] = field(default_factory=dict)  # by ending


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
    groups: dict[str, _Group] = {}
    for name, span in listing.members:
        _sort_in(groups, name, span)
    mains = {stem: _key_of(stem, groups) for stem, group in groups.items() if group.images}
    others = [stem for stem, key in mains.items() if key is None]
    if others:
        first = groups[others[0]].images[0][0]
        reading.note(f"{path}: {len(others)} images beside another of their key are skipped (first: {first}).")
    return [
        _found_of(path, groups[stem], key, read, request, reading) for stem, key in mains.items() if key is not None
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


def _sort_in(groups: dict[str, _Group], name: str, span: Span) -> None:
    stem, ending = posixpath.splitext(name)
    group = groups.setdefault(stem, _Group())
    if is_image(name):
        group.images.append((name, span))
    elif ending:
        group.texts.setdefault(ending.lower(), span)


def _key_of(stem: str, groups: dict[str, _Group]) -> _Group | None:
    """The group of an image's key, which in WebDataset ends at the first dot; None for a second image of a key,
    as `1.mask.png` beside `1.jpg` is unless it has a text of its own."""
    folder, last = posixpath.split(stem)
    key = groups.get(posixpath.join(folder, last.partition(".")[0]), groups[stem])
    return None if key is not groups[stem] and key.images and not groups[stem].texts else key


def _found_of(
    path: Path,
    group: _Group,
    key: _Group,
    read: Callable[[Span], bytes],
    request: SourceRequest,
    reading: SourceReading,
) -> FoundImage:
    """The sample of a group, with the texts of its key where it has none of its own."""
    name, span = group.images[0]
    image = path / name
    if len(group.images) > 1:
        message = f"shares its key with {len(group.images) - 1} more images of {path.name}; only it is used."
        reading.find("two_images", "warning", message, "Give each image a key of its own.", image)
    texts = key.texts | group.texts
    caption, instead = _text_beside(image, texts, read, request, reading)
    weight: object = None
    if ".json" in texts:
        described = _described(image, texts[".json"], read, reading)
        text, weight = text_of(described), described.get("weight")
        if caption is None and isinstance(text, str):
            caption = text
    return FoundImage(image, caption, request.repeats(), weight, span, instead=instead)


def _text_beside(
    image: Path, texts: dict[str, Span], read: Callable[[Span], bytes], request: SourceRequest, reading: SourceReading
) -> tuple[str | None, str]:
    """(caption, what was found instead)."""
    ending = next((ending for ending in caption_endings(request) if ending in texts), None)
    if ending is None:
        other = next((ending for ending in CAPTION_ENDINGS if ending in texts), "")
        return None, f"{image.stem}{other}" if other else ""
    try:
        return decode(_read(read, texts[ending])), ""
    except TextError as error:
        message = f"has a caption that {error} ({image.stem}{ending})."
        reading.find("unreadable_caption", "error", message, "Save it as a short UTF-8 text.", image)
        reading.reported.add(image)
        return None, ""


def _described(image: Path, span: Span, read: Callable[[Span], bytes], reading: SourceReading) -> dict[str, Any]:
    """The JSON beside an image; a finding and nothing when it is none."""
    try:
        value = json.loads(_read(read, span))
    except (TextError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    message = f"has a {image.stem}.json that is no JSON object of at most {MOST_CAPTION_BYTES >> 20} MiB."
    reading.find("bad_metadata", "error", message, "Fix or remove it.", image)
    return {}


def _read(read: Callable[[Span], bytes], span: Span) -> bytes:
    if span.size > MOST_CAPTION_BYTES:
        raise TextError(f"is larger than {MOST_CAPTION_BYTES >> 20} MiB")
    return read(span)
