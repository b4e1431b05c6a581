"""Whether a process trains in a run's folder now, by its `progress.json`. It takes no lock.

The answer is for whoever looks: `doctor`, `request`, the page, `metrics`. It is never authority to take a run over, since a
process that is slow, or of a machine that cannot be reached, may still write. Who starts a run takes the lock (`lock.py`).
"""

from __future__ import annotations

from pathlib import Path

from lora_trainer.core.disk import time_on_disk_or_here
from lora_trainer.run_folder.process_life import is_running
from lora_trainer.run_folder.progress import WrittenProgress, read_progress

SILENT_SECONDS = 60.0  # without a beat a process of another machine counts as dead


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
    return written if time_on_disk_or_here(folder) - written.modified <= SILENT_SECONDS else None
