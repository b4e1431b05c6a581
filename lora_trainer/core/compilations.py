"""The folder that keeps what torch compiles between runs. Its code is executed, so only this user may write to it."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from lora_trainer.core.io import user_cache_folder

FOLDER = "compiled"
KEPT_IN = "TORCHINDUCTOR_CACHE_DIR"  # read by torch; Triton's own lies inside
KEPT_DAYS = 30  # since a file was last read or written; what was removed is compiled again


def keep_compilations() -> str | None:
    """Set torch's cache folder before it compiles; a folder that the user set stays.

    Returns None, or a sentence that says why nothing is kept: the folder's code is executed, so one that others own
    or may write to is replaced by a temporary one.
    """
    if os.environ.get(KEPT_IN):
        return None
    folder, reason = user_cache_folder() / FOLDER, None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_private(folder):
            reason = "others may write to it"
        elif not os.access(folder, os.W_OK):
            reason = "it cannot be written to"
    except OSError as error:
        reason = str(error)
    if reason is None:
        os.environ[KEPT_IN] = str(folder)
        return None
    own = os.environ[KEPT_IN] = tempfile.mkdtemp(prefix="lora-trainer-compiled-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return f"compiled code is not kept in {folder}: {reason}"


def is_private(folder: Path) -> bool:
    """Whether it is a real folder that this user owns and nobody else may write to."""
    if os.name != "posix":
        return folder.is_dir()
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def compilations_kept() -> tuple[Path, int]:
    """The folder in the user's cache, and its size in bytes."""
    folder = user_cache_folder() / FOLDER
    return folder, sum(facts.st_size for _, facts in _files(folder))


def prune_compilations() -> tuple[int, int]:
    """Remove files unused for `KEPT_DAYS`; their number and bytes. A folder that is not private stays."""
    folder, oldest = user_cache_folder() / FOLDER, time.time() - KEPT_DAYS * 86400
    files = size = 0
    if not folder.exists() or not is_private(folder):
        return 0, 0
    for path, facts in _files(folder):
        if max(facts.st_atime, facts.st_mtime) < oldest:
            with contextlib.suppress(OSError):
                path.unlink()
                files, size = files + 1, size + facts.st_size
    for place, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            if place != str(folder) and os.stat(place).st_mtime < oldest:
                os.rmdir(place)
    return files, size


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Every file below; links are not followed, and files that vanish meanwhile are skipped."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found.append((Path(place, name), os.lstat(Path(place, name))))
    return found
