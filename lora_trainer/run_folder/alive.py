"""Whether a process trains in a run's folder now, by its `progress.json`. It takes no lock.

The answer is for whoever looks: `doctor`, `request`, the page, `metrics`. It is never authority to take a run over, since a
process that is slow, or of a machine that cannot be reached, may still write. Who starts a run takes the lock (`lock.py`).
"""

from __future__ import annotations

from pathlib import Path

import psutil

from lora_trainer.core.disk import disk_time
from lora_trainer.run_folder.progress import WrittenProgress, read_progress

SILENT_SECONDS = 60.0  # without a beat a process of another machine counts as dead
SAME_START = 1.0  # seconds between two readings of when one process started


def is_alive(folder: Path) -> bool:
    """Whether a process trains in this folder now: on this machine by its number and start, elsewhere by its beat.

    Who may not write into the folder compares that beat with its own clock: where the clocks are more than a minute apart,
    a run may then seem dead, or alive for as much longer.
    """
    return live_progress(folder) is not None


def live_progress(folder: Path) -> WrittenProgress | None:
    """What the process that trains in a folder wrote last; None where none does."""
    written = read_progress(folder)
    if written is None:
        return None
    if written.is_of_this_machine:
        return written if is_running(written.pid, written.start) else None
    return written if disk_time(folder) - written.modified <= SILENT_SECONDS else None


def process_start(pid: int) -> float | None:
    """When a process started, in seconds since 1970; None where none has this number, or it has ended and waits for its parent."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def is_running(pid: int, start: float) -> bool:
    """Whether the process of this number that started then still runs: the system uses numbers again."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # it has ended, and waits for its parent
            return False
        return abs(float(process.create_time()) - start) <= SAME_START
    except psutil.AccessDenied:  # another user's
        return True
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
