"""Whether a process of this machine still runs: its number counts only with the time when it started."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

SAME_START = 1.0  # seconds between two readings of when one process started


def process_start(pid: int) -> float | None:
    """When a process started, in seconds; None where none has this number, or it has ended and waits for its parent.

    On Linux these are seconds since the machine started: a time since 1970 would move when the clock is set. Elsewhere they
    are since 1970. Raises psutil.AccessDenied for another user's, where the system hides it.
    """
    try:
        if os.path.exists("/proc/self/stat"):  # Linux
            state, *fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            return None if state == "Z" else int(fields[18]) / os.sysconf("SC_CLK_TCK")
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except (OSError, psutil.NoSuchProcess, ValueError, OverflowError):
        return None


def is_running(pid: int, start: float) -> bool:
    """Whether the process of this number that started then still runs: the system uses numbers again."""
    try:
        now = process_start(pid)
    except psutil.AccessDenied:
        return True
    return now is not None and abs(now - start) <= SAME_START
