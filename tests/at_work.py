"""Runs that train, as their folders tell: the lock is held, and `progress.json` is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_trainer.run_folder.lock import locked
from lora_trainer.run_folder.progress import Progress, ProgressFile

# Of another process: it writes a line once it is at work.
AT_WORK = """
import sys, time
from pathlib import Path
from lora_trainer.run_folder.lock import locked
from lora_trainer.run_folder.progress import Progress, ProgressFile
folder = Path(sys.argv[1])
with locked(folder), ProgressFile(folder):
    print("at work", flush=True)
    time.sleep(60)
"""


@contextmanager
def at_work(folder: Path, progress: Progress | None = None) -> Iterator[ProgressFile]:
    """This process trains in a folder."""
    with locked(folder), ProgressFile(folder) as file:
        write_now(file, progress or Progress("training"))
        yield file


def write_now(file: ProgressFile, progress: Progress) -> None:
    """Write how far a run is without waiting for the thread that does it once a second."""
    file.show(progress)
    file.write()
