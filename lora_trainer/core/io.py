"""Write files that are always whole or absent: temporary file, flush, rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TAIL = 2**16  # bytes read at once to find a file's last line break
HALF_WRITTEN = re.compile(
    r"\..+\.part|\.tmp\w{6}"
)  # names of half-written files and folders; the latter are safetensors'
REPLACE_TRIES, REPLACE_EVERY = (40 if os.name == "nt" else 1), 0.05  # seconds
SHOWN_OF_NAME = 32  # characters of a target's name in its temporary one, which must not be too long


@contextlib.contextmanager
def atomic_path(target: Path, *, flush: bool = True) -> Iterator[Path]:
    """A temporary path beside `target` that becomes `target` when the block succeeds.

    Without `flush` the block has flushed the file itself, and a power cut soon after may undo the rename.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:SHOWN_OF_NAME]}.", suffix=".part", dir=target.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        if flush:
            flush_file(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        rename_over(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if flush:
        flush_folder(target.parent)


def create_exclusively(target: Path, text: str) -> bool:
    """Write UTF-8 text to a new file; False where the file exists. Of several processes, on any machines, one makes it.

    It is a hard link of a finished file, which needs no lock: network disks make a name once. A lost answer does not count,
    since the number of links shows whether it was made. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:SHOWN_OF_NAME]}.", suffix=".part", dir=target.parent)
    temporary = Path(name)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        try:
            os.link(temporary, target)
        except FileExistsError:
            if temporary.stat().st_nlink != 2:
                return False
        with contextlib.suppress(OSError):  # the file is there
            flush_folder(target.parent)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def rename_over(source: Path, target: Path) -> None:
    """Rename a file or folder over `target`. Raises OSError.

    Windows refuses it while another program, such as a virus scanner, has one of them open, which is soon over.
    """
    for tries in reversed(range(REPLACE_TRIES)):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if tries == 0:
                raise
            time.sleep(REPLACE_EVERY)


def remove_unfinished(folder: Path) -> None:
    """Remove half-written files and folders that killed processes left below a folder that nobody else writes to now."""
    _remove(path for path in [*folder.rglob(".*")] if HALF_WRITTEN.fullmatch(path.name))


def remove_abandoned(folder: Path, seconds: float) -> None:
    """Remove those that lie right in a folder and did not change for so long. What is being written there stays."""
    now, old = time.time(), list[Path]()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in (each for each in entries if HALF_WRITTEN.fullmatch(each.name)):
            with contextlib.suppress(OSError):
                if now - entry.stat(follow_symlinks=False).st_mtime > seconds:
                    old.append(Path(entry.path))
    _remove(old)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def flush_file(path: Path) -> None:
    """Force a file's content to the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Force a folder's entries to the disk, where the system can (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(target: Path, text: str) -> None:
    """Write UTF-8 text atomically; bytes of names that are not UTF-8 are escaped as `\\udce9`, as in JSON."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(target: Path, value: Any) -> None:
    """Write a JSON document atomically; NaN and infinity become null."""
    write_text(target, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def append_text(target: Path, text: str) -> None:
    """Append whole lines of UTF-8 text, all or none; an unfinished last line is cut off first."""
    data = text.encode("utf-8")
    with open(target, "ab+", buffering=0) as file:
        size = _whole_lines(file)
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _whole_lines(file: io.FileIO) -> int:
    """Cut off what follows the last line break, and return the file's size."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - TAIL)
        file.seek(start)
        tail = file.read(end - start)
        if (found := tail.rfind(b"\n")) >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        file.truncate(end)
    return end


def json_document(document: Mapping[str, Any]) -> str:
    """A JSON object as text, each item of its lists on a line of its own; NaN and infinity become null.

    For a document of 100,000 files this is five times as fast as `indent=2`.
    """
    entries = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            text = "[\n    " + ",\n    ".join(map(_one_line, value)) + "\n  ]"
        else:
            text = _one_line(value)
        entries.append(f"  {json.dumps(key, ensure_ascii=False)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _one_line(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """The same value with every NaN and infinity replaced by None, as JSON needs."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_json(path: Path) -> Any:
    """Read a JSON document. Raises OSError, also for a pipe or a device, and ValueError if it is not JSON or nested too deeply."""
    if path.exists() and not path.is_file():  # opening a pipe would wait forever
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def user_cache_folder() -> Path:
    """The default folder of caches: the platform's cache folder.

    A user without a home, such as a container's with an ID that has no name, gets a temporary one.
    """
    if override := os.environ.get("LORA_TRAINER_CACHE"):
        return Path(override)
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        home = Path(os.path.expanduser("~"))  # Path.home() raises where this stays "~"
        if not home.is_absolute():
            home = Path(tempfile.gettempdir(), f"home-{os.getuid()}")
        base = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return Path(base) / "lora-trainer"
