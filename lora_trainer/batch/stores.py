"""Which store the jobs of a batch are in: the one that its output folder holds."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.batch import job_files, queue
from lora_trainer.batch.job_files import JobFiles
from lora_trainer.batch.queue import JobQueue
from lora_trainer.core.errors import Problem, UsageError

if TYPE_CHECKING:
    from lora_trainer.batch.job_store import JobStore


def holds_batch(output: Path) -> bool:
    """Whether a batch was submitted to this output folder."""
    return (output / queue.FILE).is_file() or (output / job_files.FOLDER / job_files.LIST).is_dir()


def store_of(output: Path) -> JobStore:
    """The jobs of the batch in an output folder. Raises UsageError where there are none, and as the stores do."""
    if not holds_batch(output):
        message = f"{output} contains no batch (neither {queue.FILE} nor {job_files.FOLDER})."
        fix = f"Start one with: lora-trainer batch ROOT --output {output}. If one was started on another machine, this folder"
        fix = f"{fix} is not shared with this one ({socket.gethostname()})."
        raise UsageError(Problem("not_a_batch", message, fix))
    return JobQueue(output) if (output / queue.FILE).is_file() else JobFiles(output)


def make_store(output: Path, *, shared: bool) -> JobStore:
    """The store of the batch in an output folder, made where there is none.

    With `shared` it is for several machines. Raises UsageError where the folder holds one for one machine.
    """
    if not holds_batch(output):
        return JobFiles(output) if shared else JobQueue(output)
    store = store_of(output)
    if shared and not isinstance(store, JobFiles):
        message = f"{output} holds a batch for one machine ({queue.FILE}), which workers on several cannot share."
        raise UsageError(
            Problem("batch_for_one_machine", message, "Choose another --output, or continue it with --executor local.")
        )
    return store
