"""The data of a job as one archive in pieces, and its copy on another machine.

The archive is a plain tar in which names, contents and nothing else count, so the same files give the same archive, and its
SHA-256 names the copy: `SCRATCH/SHA256/`. Files lie there below their whole paths (`data/moved.py`). A copy is unpacked
beside its place and renamed when it is whole. One that no living process uses is removed after a day, when another is made.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.disk import refusal
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.data.caches.sharing import in_use, oldest_user, one_at_a_time
from lora_trainer.data.images.remote import is_url
from lora_trainer.data.sources.found import SourceReading
from lora_trainer.data.sources.listing import list_folder
from lora_trainer.data.sources.places import named_places

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config, SourceSection

PIECE_BYTES = 32 * 2**20
KEPT_SECONDS = 24 * 3600.0  # a copy that nobody uses
READ_BYTES = 2**20
LOCK = "copies.lock"  # of who makes or removes copies
COPY = re.compile(r"[0-9a-f]{64}")
PART = re.compile(r"\.[0-9a-f]{16}\.[^.]+\.part")
WHOLE_FILES = (".tar", ".parquet")  # sources that need no other file
GIB = 2**30


@dataclass(frozen=True)
class DataFiles:
    """What a job reads of its sources: each file by its whole path with its size, and the folders that sources name."""

    sizes: Mapping[Path, int]
    folders: tuple[Path, ...]

    @property
    def gib(self) -> float:
        return sum(self.sizes.values()) / GIB


@dataclass(frozen=True)
class DataPack:
    """An archive: its SHA-256, its bytes, the folders that exist even if empty, and what `keep` returned for each piece."""

    key: str
    size: int
    files: int
    folders: tuple[str, ...]
    pieces: tuple[Any, ...]


def files_of(config: Config) -> DataFiles:
    """The files of a job's sources. Raises OSError, with the reason, for sources that cannot be copied."""
    sizes, folders = dict[Path, int](), list[Path]()
    if not config.data.sources:
        raise OSError("it is the built-in dataset, which all nodes have")
    for source in config.data.sources:
        for place in _places_of(source):
            if not place.is_dir():
                sizes[place] = _size_of(place)
                continue
            folders.append(place)
            reading = SourceReading()
            listing = list_folder(place, reading)
            if reading.findings:
                first = reading.findings[0]
                raise OSError(f"{first.path} {first.message.rstrip('.')}")
            for folder, names in listing.names.items():
                sizes |= {path: _size_of(path) for path in (listing.path(folder, name) for name in names)}
    return DataFiles(sizes, tuple(folders))


def _places_of(source: SourceSection) -> list[Path]:
    """The folders and files of one source. Raises OSError."""
    if is_url(source.path):
        raise OSError(f"{source.path} is on a server")
    places = named_places(source)
    images = [place for place in places if place != Path(source.captions_file or "")]
    for place in images:
        if not place.exists():
            raise FileNotFoundError(f"{place} is not there")
        if place.is_file() and place.suffix.lower() not in WHOLE_FILES:
            raise OSError(f"{place} is no folder, tar or Parquet file")
    return places


def _size_of(path: Path) -> int:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is a pipe or a device")
    return found.st_size


class _Pieces(io.RawIOBase):
    """A file to write to that hands on its content in pieces, and hashes it."""

    def __init__(self, keep: Callable[[bytes], Any]) -> None:
        super().__init__()
        self.keep, self.kept = keep, list[Any]()
        self.digest, self.size, self._waiting = hashlib.sha256(), 0, bytearray()

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        self.size += len(data)
        self._waiting += data
        while len(self._waiting) >= PIECE_BYTES:
            self.kept.append(self.keep(bytes(self._waiting[:PIECE_BYTES])))
            del self._waiting[:PIECE_BYTES]
        return len(data)

    def finish(self) -> None:
        if self._waiting:
            self.kept.append(self.keep(bytes(self._waiting)))


def pack(data: DataFiles, keep: Callable[[bytes], Any]) -> DataPack:
    """Hand the data to `keep`, piece by piece. Raises OSError for files that cannot be read or change meanwhile."""
    pieces = _Pieces(keep)
    with tarfile.open(
        fileobj=pieces,
        mode="w|",
        format=tarfile.PAX_FORMAT,
        bufsize=READ_BYTES,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        for path in sorted(data.sizes):
            member = tarfile.TarInfo(_name_of(path))
            member.size = data.sizes[path]
            with open(path, "rb") as file:
                archive.addfile(member, file)
                if file.read(1):
                    raise OSError(f"{path} grew while it was read")
    pieces.finish()
    folders = tuple(_name_of(folder) for folder in data.folders)
    return DataPack(pieces.digest.hexdigest(), pieces.size, len(data.sizes), folders, tuple(pieces.kept))


def _name_of(path: Path) -> str:
    return path.relative_to(path.anchor).as_posix()


class _Joined(io.RawIOBase):
    """Pieces as a file to read, hashed as they are read."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        super().__init__()
        self._pieces, self._left, self.digest = iter(pieces), memoryview(b""), hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        while not self._left and (piece := next(self._pieces, None)) is not None:
            self._left = memoryview(piece)
        part = bytes(self._left if size < 0 else self._left[:size])
        self._left = self._left[len(part) :]
        self.digest.update(part)
        return part


@contextmanager
def copied(pack: DataPack, pieces: Iterable[bytes], scratch: Path) -> Iterator[Path]:
    """The folder that holds the data of a pack, which stays there until the end of the block. `pieces` are read if it is
    not there yet; of several processes one unpacks it.

    Raises UsageError for an archive that is damaged or hostile, TrainingFailed where the disk refuses; nothing is left then.
    """
    target = scratch / pack.key
    with ExitStack() as stack:
        try:
            scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
            there = scratch.lstat()
            if hasattr(os, "getuid") and (there.st_uid != os.getuid() or not stat.S_ISDIR(there.st_mode)):
                message = f"{scratch}, where copies of datasets are to be, belongs to another user, or is no folder."
                raise UsageError(
                    Problem("scratch_not_usable", message, "Name another folder with --executor-option scratch=DIR.")
                )
            stack.enter_context(in_use(scratch))
            with one_at_a_time(scratch / LOCK):
                if not target.is_dir():
                    _remove_old(scratch)
                    _unpack(pack, pieces, target)
                os.utime(target)
        except OSError as error:
            if refusal(error) is None:
                raise
            reason = (error.strerror or str(error)).lower()
            message = f"The data ({pack.size / GIB:.2f} GiB) cannot be copied to {scratch}: {reason}."
            fix = "Make room there, name another folder with --executor-option scratch=DIR, or use data=path."
            raise TrainingFailed(Problem("data_not_copied", message, fix)) from error
        yield target


def _unpack(pack: DataPack, pieces: Iterable[bytes], target: Path) -> None:
    """Unpack an archive, all or nothing."""
    part = Path(tempfile.mkdtemp(prefix=f".{pack.key[:16]}.", suffix=".part", dir=target.parent))
    try:
        stream = _Joined(pieces)
        try:
            with tarfile.open(
                fileobj=stream, mode="r|", bufsize=READ_BYTES, encoding="utf-8", errors="surrogateescape"
            ) as archive:
                for member in archive:
                    is_plain = member.isreg() and not member.issparse()
                    content = archive.extractfile(member) if is_plain and is_below(member.name) else None
                    if content is None:
                        raise tarfile.TarError(f"{member.name!r} is no plain file below its folder")
                    place = part / member.name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with open(place, "xb") as file:
                        shutil.copyfileobj(content, file, READ_BYTES)
            while stream.read(READ_BYTES):
                pass
        except (tarfile.TarError, EOFError, FileExistsError, NotADirectoryError, ValueError) as error:
            raise UsageError(
                Problem("packed_data_damaged", f"The packed data is damaged ({error}).", "Submit the batch again.")
            ) from error
        if stream.digest.hexdigest() != pack.key:
            raise UsageError(
                Problem("packed_data_damaged", "The packed data is not what was packed.", "Submit the batch again.")
            )
        for folder in pack.folders:
            if not is_below(folder):
                raise UsageError(
                    Problem(
                        "packed_data_damaged", f"The packed data is damaged ({folder!r}).", "Submit the batch again."
                    )
                )
            (part / folder).mkdir(parents=True, exist_ok=True)
        if not target.is_dir():  # on a disk without locks another process may have been faster
            os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def is_below(name: str) -> bool:
    """Whether a name in an archive is of a file or folder below that into which it is unpacked."""
    is_name = not {"", ".", ".."} & set(name.split("/")) and "\0" not in name
    return is_name and not (os.name == "nt" and re.search(r'[\\<>:"|?*]', name))


def _remove_old(scratch: Path) -> None:
    """Remove copies that were last used a day ago and before the oldest process now at work began, and unfinished ones."""
    now = time.time()
    oldest = min(now - KEPT_SECONDS, oldest_user(scratch) or now)
    for path in scratch.iterdir():
        is_copy = COPY.fullmatch(path.name) is not None
        if not is_copy and not PART.fullmatch(path.name):
            continue
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                unfinished = path.with_name(f".{path.name[:16]}.{os.getpid()}.part") if is_copy else path
                os.rename(path, unfinished)  # a copy is whole or not there
                shutil.rmtree(unfinished, ignore_errors=True)
