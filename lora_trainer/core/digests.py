"""Cached hashes of large files, so that a model's weights are not read in full at each start."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from lora_trainer.core.io import read_json, sha256_file, user_cache_folder, write_json

LEAST_REMEMBERED = 2**20  # bytes; smaller files are hashed faster than looked up
STILL_WARM = 2.0  # seconds; a file written this recently may change again without a new time


def remembered_sha256(path: Path) -> str:
    """Hex digest of a file's bytes, from the user's cache while path, size, times and inode are the same."""
    return remembered_digest(path, "", sha256_file)


def remembered_digest(path: Path, part: str, read: Callable[[Path], str]) -> str:
    """The same for what `read` returns for a `part` of a file; the empty part is the whole file."""
    found = path.stat()
    if found.st_size < LEAST_REMEMBERED:
        return read(path)
    known = [os.path.abspath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    named = hashlib.sha256(f"{known[0]}{part}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
    note = user_cache_folder() / "digests" / f"{named}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = read_json(note)
        if document["file"] == known:
            return str(document["sha256"])
    digest = read(path)
    if time.time() - max(found.st_mtime, found.st_ctime) > STILL_WARM:
        with contextlib.suppress(OSError):  # an unwritable cache folder only costs time
            write_json(note, {"file": known, "sha256": digest})
    return digest
