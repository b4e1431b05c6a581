"""Tar shards on a web server or in a bucket (WebDataset): listed from their headers, and their images read by ranges.

A shard is listed once for each version: what its headers and captions say is kept in the user's cache folder, and no
image. A bucket is never listed: shards are named by a pattern such as `{000..099}`, or by a small index file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit

from lora_trainer.core.bounded import TextError, decode, read_json_object
from lora_trainer.core.io import user_cache_folder, write_text
from lora_trainer.data.images.remote import (
    CHECK_NAME,
    ENDING,
    RemoteError,
    RemoteFile,
    RemoteReader,
    is_url,
    look_up,
    read_pointer,
    read_range,
    shown_url,
)
from lora_trainer.data.sample import Span
from lora_trainer.data.sources.beside import CAPTION_ENDINGS
from lora_trainer.data.sources.tar import TarListing, images_of, list_tar

if TYPE_CHECKING:
    from lora_trainer.data.sources.found import FoundImage, SourceReading, SourceRequest

FOLDER = "remote"  # in the user's cache folder
LAYOUT = 1  # of the listings
INDEX_ENDINGS = (".txt", ".json")
MOST_INDEX_BYTES = 1 << 24
MOST_LISTING_BYTES = 1 << 30
AT_ONCE = 8  # shards that are listed side by side
AHEAD, MOST_AHEAD = 1 << 15, 1 << 20  # bytes read together for a header, and at most where members are small
AGED = 3600.0  # seconds: what was written this moment could change within the clock's step, which a pointer does not
UNUSED_SECONDS = 30 * 86400.0


def remote_places(urls: Sequence[str], request: SourceRequest, reading: SourceReading) -> tuple[Path, ...]:
    """The pointers of shards at these addresses, all listed. Problems for those that cannot be read."""
    wrong = [url for url in urls if not urlsplit(url).path.lower().endswith(".tar")]
    if wrong:
        reading.problem(
            f"{shown_url(wrong[0])} is no tar.", "Name plain .tar shards; anything else has to be on this disk."
        )
    if wrong or not urls:
        return ()
    endings = sorted({*CAPTION_ENDINGS, ".json", *([request.ending] if request.ending else [])})
    places, failed = [], list[tuple[str, RemoteError]]()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for url, listed in [(url, pool.submit(_listed, url, endings)) for url in urls]:
            try:
                places.append(listed.result())
            except RemoteError as error:
                failed.append((url, error))
    if failed:
        url, first = failed[0]
        some = f" ({len(failed)} of {len(urls)} shards cannot be read)" if len(failed) > 1 else ""
        reading.problem(f"{shown_url(url)} cannot be read: {first.why}{some}.", first.fix)
        return ()
    return tuple(places)


def read_remote(place: Path, request: SourceRequest, reading: SourceReading) -> list[FoundImage]:
    """The images of a shard that `remote_places` has listed."""
    try:
        if place.parent != user_cache_folder() / FOLDER:
            raise ValueError(place)
        url = read_pointer(place).url
        document = read_json_object(_listing_path(place), MOST_LISTING_BYTES)
        texts = {int(offset): text.encode("latin-1") for offset, text in document["texts"].items()}
        members = [(name, Span(place, offset, size)) for name, offset, size in document["members"]]
        listing = TarListing(members, document["damage"], document["links"], compressed=document["compressed"])
    except (RemoteError, TextError, KeyError, TypeError, ValueError, AttributeError):
        reading.problem(f"{place} is no list of a shard.", "Name the address of the shard itself as data.")
        return []
    return images_of(listing, Path(shown_url(url)), lambda span: texts.get(span.offset, b""), request, reading)


def shards_named_by(word: str, reading: SourceReading) -> list[str]:
    """The shards of an index file; any other address is a shard."""
    if posixpath.splitext(urlsplit(word).path.lower())[1] not in INDEX_ENDINGS:
        return [word]
    urls, place = [], urlsplit(word)
    try:
        index = look_up(word)
        if index.size > MOST_INDEX_BYTES:
            raise TextError(f"it has {index.size:,} bytes; the most is {MOST_INDEX_BYTES:,}")
        for name in names_in(decode(read_range(index, 0, index.size))):
            # `urljoin` joins web addresses alone.
            path, mark, query = name.partition("?")
            whole = posixpath.normpath(posixpath.join(posixpath.dirname(place.path) or "/", path))
            urls.append(name if is_url(name) else f"{place.scheme}://{place.netloc}{whole}{mark}{query}")
    except (RemoteError, TextError) as error:
        why = error.why if isinstance(error, RemoteError) else str(error)
        reading.problem(f"The index {shown_url(word)} cannot be read: {why}.", CHECK_NAME)
        return []
    outside = [url for url in urls if urlsplit(url)[:2] != place[:2]]
    if outside or not urls:
        what = f"names {shown_url(outside[0])}, on another server" if outside else "names no shard"
        reading.problem(
            f"The index {shown_url(word)} {what}.", "Name these shards themselves as data, if you trust it."
        )
        return []
    return urls


def names_in(text: str) -> list[str]:
    """The shards that an index names: a line each, a JSON list, or WebDataset's `shardlist`. Raises TextError."""
    if not text.lstrip().startswith(("[", "{")):
        return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise TextError("it is neither a list of names nor JSON") from None
    if isinstance(value, dict):
        value = value.get("shardlist", value.get("shards"))
    rows = value if isinstance(value, list) else []
    names = [row.get("url") if isinstance(row, dict) else row for row in rows]
    if not all(isinstance(name, str) and name for name in names):
        raise TextError("it has entries without a name")
    return [str(name) for name in names]


def _listed(url: str, endings: Sequence[str]) -> Path:
    """The pointer of a shard, whose members are listed anew for another version of it. Raises RemoteError."""
    place = user_cache_folder() / FOLDER / f"{hashlib.sha256(url.encode('utf-8')).hexdigest()[:32]}{ENDING}"
    found = look_up(url)
    try:
        known = read_pointer(place) if place.exists() else None
    except RemoteError:
        known = None
    same = known is not None and found.is_versioned and not known.differs(found.size, found.etag, found.modified)
    if same and known is not None and _is_listed(place, known, endings):
        with contextlib.suppress(OSError):
            os.utime(_listing_path(place))  # its last use
        return place
    file = known if same and known is not None else found
    try:
        write_text(_listing_path(place), json.dumps(_listing_of(file, endings, place)))
        if file is not known:
            write_text(place, json.dumps(asdict(file)))
            place.chmod(0o600)  # an address may hold a password
            before = time.time() - AGED
            os.utime(place, (before, before))
    except OSError as error:
        if isinstance(error, RemoteError):
            raise
        raise RemoteError(f"its list cannot be written to {place.parent} ({error})") from error
    return place


def _is_listed(place: Path, file: RemoteFile, endings: Sequence[str]) -> bool:
    """Whether the members of this version are listed, with the texts that are read now."""
    try:
        document = read_json_object(_listing_path(place), MOST_LISTING_BYTES)
    except TextError:
        return False
    of_file = document.get("layout") == LAYOUT and document.get("file") == asdict(file)
    return of_file and set(endings) <= set(document.get("endings", ()))


def _listing_of(file: RemoteFile, endings: Sequence[str], place: Path) -> dict[str, Any]:
    """What the headers and the texts of a shard say. Raises RemoteError."""
    reader = cast("BinaryIO", RemoteReader(file, 0, file.size, AHEAD, MOST_AHEAD))
    listing = list_tar(reader, file.size, place, endings)
    return {
        "layout": LAYOUT,
        "file": asdict(file),
        "endings": list(endings),
        "members": [[name, span.offset, span.size] for name, span in listing.members],
        "texts": {offset: text.decode("latin-1") for offset, text in listing.texts.items()},
        "damage": listing.damage,
        "links": listing.links,
        "compressed": listing.compressed,
    }


def _listing_path(place: Path) -> Path:
    return place.with_suffix(".json")


def old_listings(cache: Path, before: float) -> list[Path]:
    """Lists of shards in a cache folder that no run has used for a month, nor since the time `before`."""
    found = []
    for path in (cache / FOLDER).glob("*.json"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < min(before, time.time() - UNUSED_SECONDS):
                found.append(path)
    return found
