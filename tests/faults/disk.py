"""Counts disk operations below a folder and makes one fail, through the compiled `disk.c`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("disk.c")
PATH, NAMES, NAME = 320, 8192, 96  # as in disk.c
HALF = -1  # as in disk.c: of what is written to progress.json, half is there, and nothing says so


class Mode(IntEnum):
    """The fault at the k-th operation."""

    COUNT = 0
    FAIL = 1  # an error of the disk (EIO), once
    FULL = 2  # half of a write is done, then the disk is full (ENOSPC) for good
    SHORT = 3  # a short write, which the system may do at any time
    KILL = 4  # SIGKILL before it
    TORN = 5  # SIGKILL after half of it
    CUT = 6  # SIGKILL before it, and unflushed data is lost, as in a power failure
    SIGNAL = 7  # a signal before it, which does not kill by itself
    LOCKED = 8  # from it on the disk is read-only (EROFS)


class Page(ctypes.Structure):
    """`struct page` of disk.c."""

    _fields_ = (
        *(
            (name, ctypes.c_long)
            for name in ("armed", "at", "mode", "number", "progress", "count", "fired", "steps", "full", "happened")
        ),
        ("root", ctypes.c_char * PATH),
        ("names", ctypes.c_char * NAME * NAMES),
    )

    def arm(self, root: Path, at: int, mode: Mode, number: int = 0, progress: int = 0) -> None:
        """Begin to count below `root`; the operation numbered `at` (from 0) fails as `mode` says.

        `progress` is the error number with which progress.json cannot be written, or HALF; 0 lets it be written.
        """
        self.root, self.at, self.mode, self.number = os.fsencode(root), at, int(mode), number
        self.progress = progress
        self.count = self.fired = self.steps = self.full = self.happened = 0
        self.armed = 1

    def operations(self) -> list[str]:
        """`write /runs/a/run.json` for each operation so far."""
        return [os.fsdecode(bytes(self.names[index].value)) for index in range(min(self.count, NAMES))]

    def last(self) -> str:
        """The newest operation, empty before the first."""
        count = min(self.count, NAMES)
        return os.fsdecode(bytes(self.names[count - 1].value)) if count else ""


def unavailable() -> str | None:
    """Why this machine cannot do it; None where it can."""
    if sys.platform != "linux":
        return "needs Linux: LD_PRELOAD and fork"
    if compiler() is None:
        return "needs a C compiler, for tests/faults/disk.c"
    return None


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def compiled() -> Path:
    """The shared library, built once per version of its source."""
    name = f"faults-disk-{os.getuid()}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        temporary = library.with_suffix(f".{os.getpid()}")
        command = [
            compiler() or "cc",
            "-O1",
            "-shared",
            "-fPIC",
            "-o",
            str(temporary),
            str(SOURCE),
            "-ldl",
            "-lpthread",
        ]
        subprocess.run(command, check=True)
        os.replace(temporary, library)
    return library


def loaded_page() -> Page:
    """The numbers of this process, which was started with the library before all others."""
    library = ctypes.CDLL(None)
    library.disk_page.restype = ctypes.POINTER(Page)
    page: Page = library.disk_page().contents
    return page
