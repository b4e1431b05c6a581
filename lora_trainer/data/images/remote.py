"""Files on a web server or in a bucket, read by ranges. Each has a pointer on this disk, a small file that samples name.

It says where the file is and which version of it was listed. It is written anew only for another version, so
what is remembered of its images (`images.sqlite`) stays good until the file changes. Nothing of the file itself is kept.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from lora_trainer.core.bounded import TextError, read_json_object
from lora_trainer.core.errors import Problem
from lora_trainer.core.version import __version__

if TYPE_CHECKING:
    from httpx2 import Client, Response

ENDING = ".remote"
URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)  # two letters at least: `C:/` is a drive
WEB = ("http", "https")
MOST_POINTER = 1 << 16  # bytes
CHUNK = 1 << 23  # most bytes of one request
CONNECT_SECONDS, READ_SECONDS = 10.0, 30.0
WAITS = (0.2, 0.5, 1.0, 2.0, 4.0)  # seconds before each repetition
MOST_WAIT = 30.0  # seconds, whatever a server's Retry-After says
BUSY = (408, 425, 429, 500, 502, 503, 504)
KEPT_BYTES = 1 << 25  # of images in memory that are likely to be read again
VERSIONS = ("ETag", "etag", "VersionId", "generation", "md5Hash", "LastModified", "last_modified", "updated", "mtime")
OFFLINE = "HF_HUB_OFFLINE"  # what --offline sets

# What to do about a file that cannot be read.
RUN_AGAIN = "Run again when the server answers; what was read so far is kept."
CHECK_NAME = "Check the address; a pattern such as {000..099} means every number from the first to the last."
GO_ONLINE = "Run without --offline (and without HF_HUB_OFFLINE), or name shards on this disk."
WITH_RANGES = "Download the shards, or serve them from a server with range requests, as nginx, S3 and most have."
WITH_ACCESS = "Use an address that is signed, or one of a bucket whose credentials are set here, such as s3://."

Found = TypeVar("Found")


class RemoteError(OSError):
    """Why a file cannot be read, in words that follow its name, and what to do about it. `passing` ones may be over soon."""

    def __init__(self, why: str, fix: str = RUN_AGAIN, *, passing: bool = False, wait: float = 0.0) -> None:
        super().__init__(None, why)
        self.why, self.fix = why, fix
        self.passing, self.wait = passing, wait  # seconds until it may be over

    def problem_of(self, name: object) -> Problem:
        """The problem of what has this name. Images that cannot be fetched are not damaged, so none is left out."""
        return Problem("data_unreadable", f"{name} cannot be read: {self.why}.", self.fix)


@dataclass(frozen=True)
class RemoteFile:
    """Where a file is, and the version that was listed: its bytes, and what the server says of it, empty where nothing."""

    url: str
    size: int
    etag: str = ""
    modified: str = ""

    @property
    def is_versioned(self) -> bool:
        """Whether a later version can be distinguished from this one."""
        return bool(self.etag or self.modified)

    def differs(self, size: int, etag: str, modified: str) -> bool:
        """Whether these are of another version. Servers behind one name may disagree on one of tag and time."""
        pairs = [(mine, theirs) for mine, theirs in ((self.etag, etag), (self.modified, modified)) if mine and theirs]
        return size != self.size or (bool(pairs) and all(mine != theirs for mine, theirs in pairs))


def is_url(text: str) -> bool:
    return URL.match(text) is not None


def is_pointer(path: Path) -> bool:
    return path.suffix == ENDING


def shown_url(url: str) -> str:
    """A URL without password and signature, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def shown_place(place: Path) -> Path:
    """What a pointer leads to, as a path for names and messages; other places as they are."""
    if not is_pointer(place):
        return place
    try:
        return Path(shown_url(read_pointer(place).url))
    except RemoteError:
        return place


def read_pointer(path: Path) -> RemoteFile:
    """Raises RemoteError."""
    try:
        return RemoteFile(**read_json_object(path, MOST_POINTER))
    except (TextError, TypeError) as error:
        raise RemoteError(f"its pointer {path} cannot be read: {error}") from error


def look_up(url: str) -> RemoteFile:
    """The size and version of a file, from its first byte. Raises RemoteError."""
    refuse_offline(url)
    if not _is_web(url):
        return _persistent(partial(_bucket_facts, url))
    _, total, reply = _persistent(partial(_request, url, 0, 1))
    return RemoteFile(url, total, reply.headers.get("ETag", ""), reply.headers.get("Last-Modified", ""))


def read_range(file: RemoteFile, offset: int, size: int) -> bytes:
    """`size` bytes from `offset`. Raises RemoteError, also where they are of another version than the listed one."""
    parts = []
    for start in range(offset, offset + size, CHUNK):
        end = min(start + CHUNK, offset + size)
        parts.append(_persistent(partial(_read_once, file, start, end)))
    return b"".join(parts)


def _read_once(file: RemoteFile, start: int, end: int) -> bytes:
    if _is_web(file.url):
        return _web_range(file, start, end)
    system, path = _bucket(file.url)
    data: bytes = _from_bucket(lambda: system.cat_file(path, start=start, end=end))
    if len(data) != end - start:
        raise RemoteError(f"it has changed since it was listed: it ends before byte {end:,}")
    return data


def refuse_offline(url: str) -> None:
    """Raise RemoteError where no network may be used, and the file is not on a mounted disk."""
    if urlsplit(url).scheme.lower() not in ("file", "local") and os.environ.get(OFFLINE, "").upper() in (
        "1",
        "ON",
        "YES",
        "TRUE",
    ):
        raise RemoteError("it is on the network, and offline nothing is fetched", GO_ONLINE)


def _persistent(attempt: Callable[[], Found]) -> Found:
    for wait in WAITS:
        try:
            return attempt()
        except RemoteError as error:
            if not error.passing:
                raise
            time.sleep(max(wait, min(error.wait, MOST_WAIT)))
    return attempt()


def _is_web(url: str) -> bool:
    return urlsplit(url).scheme.lower() in WEB


_clients: dict[int, Client] = {}
_lock = threading.Lock()


def _client() -> Client:
    """The client of this process, which keeps connections open."""
    import httpx2

    with _lock:
        if os.getpid() not in _clients:
            _clients.clear()  # those of the process that this one was forked from
            _clients[os.getpid()] = httpx2.Client(
                follow_redirects=True,
                max_redirects=5,
                timeout=httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
                headers={"Accept-Encoding": "identity", "User-Agent": f"lora-trainer/{__version__}"},
            )
        return _clients[os.getpid()]


def _web_range(file: RemoteFile, start: int, end: int) -> bytes:
    data, total, reply = _request(file.url, start, end)
    if file.differs(total, reply.headers.get("ETag", ""), reply.headers.get("Last-Modified", "")):
        sizes = f" ({file.size:,} bytes before, {total:,} now)" if total != file.size else ""
        raise RemoteError(f"it has changed since it was listed{sizes}")
    if len(data) != end - start:
        raise RemoteError(f"it ended after {len(data):,} of {end - start:,} bytes", passing=True)
    return data


def _request(url: str, start: int, end: int) -> tuple[bytes, int, Response]:
    """The bytes from `start` to `end`, the size of the whole file, and the reply. Raises RemoteError."""
    import httpx2

    try:
        with _client().stream("GET", url, headers={"Range": f"bytes={start}-{end - 1}"}) as reply:
            if reply.status_code == 416:
                raise RemoteError("it is empty" if start == 0 else f"it ends before byte {start:,}")
            total = _total_of(reply, start)
            data = bytearray()
            for part in reply.iter_raw():
                data += part
                if len(data) >= end - start:  # whatever else the server sends
                    break
            return bytes(data[: end - start]), total, reply
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        passing = not isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol | httpx2.TooManyRedirects)
        kind = "no answer in time" if isinstance(error, httpx2.TimeoutException) else str(error) or type(error).__name__
        raise RemoteError(f"the connection failed: {kind}", passing=passing) from error


def _total_of(reply: Response, start: int) -> int:
    """The size of the whole file, of a reply that holds a part of it. Raises RemoteError for any other reply."""
    status = reply.status_code
    if status in BUSY:
        after = reply.headers.get("Retry-After", "")
        wait = float(after) if after.isdigit() else 0.0
        raise RemoteError(f"the server is busy (HTTP {status})", passing=True, wait=wait)
    if status in (401, 403):
        raise RemoteError(f"the server refuses access (HTTP {status})", WITH_ACCESS)
    if status in (404, 410):
        raise RemoteError(f"it is not there (HTTP {status})", CHECK_NAME)
    if status == 200:
        raise RemoteError("the server sends whole files alone, and no parts of them (ranges)", WITH_RANGES)
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", reply.headers.get("Content-Range", ""))
    if status != 206 or found is None or int(found[1]) != start:
        raise RemoteError(f"the server answers with HTTP {status} in place of a part of it")
    return int(found[2])


def _bucket(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it. Raises RemoteError."""
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url)
    except ImportError as error:
        raise RemoteError(
            f"it needs a library: pip install 'lora-trainer[remote]' ({str(error).rstrip('.')})"
        ) from error
    except ValueError as error:
        raise RemoteError(str(error)) from error
    return system, str(path)


def _bucket_facts(url: str) -> RemoteFile:
    system, path = _bucket(url)
    facts = _from_bucket(lambda: system.info(path))
    size = facts.get("size")
    if not isinstance(size, int) or facts.get("type") == "directory":
        raise RemoteError("it is no file of a known size")
    versions = [f"{name}={facts[name]}" for name in VERSIONS if facts.get(name)]
    return RemoteFile(url, size, " ".join(versions))


def _from_bucket(call: Callable[[], Any]) -> Any:
    """What a library of fsspec returns; their errors are of many kinds."""
    try:
        return call()
    except FileNotFoundError as error:
        raise RemoteError("it is not there", CHECK_NAME) from error
    except PermissionError as error:
        raise RemoteError("the bucket refuses access", WITH_ACCESS) from error
    except Exception as error:
        why = str(error).split("\n")[0] or type(error).__name__
        raise RemoteError(f"the connection failed: {why}", passing=True) from error


class RemoteReader(io.RawIOBase):
    """A remote file from `start` to `end`, read ahead in blocks that grow while there are no large gaps."""

    def __init__(self, file: RemoteFile, start: int, end: int, ahead: int, most_ahead: int = CHUNK) -> None:
        super().__init__()
        self._file, self._start, self._end = file, start, end
        self._ahead, self._least, self._most = ahead, ahead, most_ahead
        self._place, self._block_at, self._block = 0, 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._end - self._start}[whence]
        if base + offset < 0:
            raise ValueError(f"negative place {base + offset}")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view, done = memoryview(buffer), 0
        wanted = max(0, min(len(view), self._end - self._start - self._place))
        while done < wanted:
            at = self._start + self._place
            if not self._block_at <= at < self._block_at + len(self._block):
                self._fetch(at, wanted - done)
            inner = at - self._block_at
            data = self._block[inner : inner + wanted - done]
            view[done : done + len(data)] = data
            self._place, done = self._place + len(data), done + len(data)
        return done

    def _fetch(self, at: int, wanted: int) -> None:
        gap = at - (self._block_at + len(self._block))
        near = bool(self._block) and 0 <= gap <= 2 * self._ahead
        self._ahead = min(self._most, 2 * self._ahead) if near else self._least
        self._block = read_range(self._file, at, min(max(wanted, self._ahead), self._end - at))
        self._block_at = at


_kept: OrderedDict[tuple[RemoteFile, int, int], bytes] = OrderedDict()


def open_remote(pointer: Path, offset: int, size: int, most_kept: int) -> io.BufferedReader:
    """A part of a remote file, to read; one of at most `most_kept` bytes is read at once. Raises RemoteError.

    It stays in memory for a while: an image's bytes are read for its pixels, then for its hash.
    """
    file = read_pointer(pointer)
    if size > most_kept:
        return io.BufferedReader(RemoteReader(file, offset, offset + size, CHUNK // 2), CHUNK // 2)
    key = (file, offset, size)
    with _lock:
        data = _kept.get(key)
    if data is None:
        data = read_range(file, offset, size)
    with _lock:
        _kept[key] = data
        _kept.move_to_end(key)
        while sum(map(len, _kept.values())) > KEPT_BYTES:
            _kept.popitem(last=False)
    return io.BufferedReader(io.BytesIO(data))
