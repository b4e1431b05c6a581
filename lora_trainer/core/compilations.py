"""Where what torch compiles is kept between runs: code that this user's own processes made, for nobody else to write."""

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
KEPT_DAYS = 30  # since a file was last read or written; what lacks is compiled again


def keep_compilations() -> str | None:
    """Name the folder to torch, before it compiles; a folder that the user named stays. A sentence where it is not kept.

    What lies there is run: so a folder that others own or may write to is not used, and a new one, for this process
    alone, takes its place.
    """
    if os.environ.get(KEPT_IN):
        return None
    folder = user_cache_folder() / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        reason = None if is_private(folder) else "others may write to it"
    except OSError as error:
        reason = str(error)
    if reason is None:
        os.environ[KEPT_IN] = str(folder)
        return None
    own = os.environ[KEPT_IN] = tempfile.mkdtemp(prefix="lora-trainer-compiled-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return f"what is compiled is not kept in {folder}: {reason}"


def is_private(folder: Path) -> bool:
    """Whether it is a real folder that this user owns and nobody else may write to."""
    if os.name != "posix":
        return folder.is_dir()
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def compilations_kept() -> tuple[Path, int]:
    """The folder in the user's cache, and its bytes."""
    folder = user_cache_folder() / FOLDER
    return folder, sum(facts.st_size for _, facts in _files(folder))


def prune_compilations() -> tuple[int, int]:
    """Remove what nothing has used for `KEPT_DAYS`: how many files, and their bytes. A folder that is not ours stays."""
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
    """Every file below, links unfollowed; those that vanish meanwhile are passed over."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found.append((Path(place, name), os.lstat(Path(place, name))))
    return found
