"""Ask a run that trains, in another process, to save, to generate images, or to use other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.run_folder.alive import is_alive
from lora_trainer.run_folder.record import Record
from lora_trainer.training.requests import ANSWERED, write_request


def send_request(run: Path, do: str, prompts: Sequence[str] = ()) -> Path:
    """Write a request (`training/requests.py`) to the run in a folder: where its answer will be.

    Raises UsageError for a folder without a run, a run that does not train now, and a request that it would refuse.
    """
    record = Record.read(run)
    if record is None:
        raise UsageError(
            Problem(
                "not_a_run", f"{run} is not a run: it has no run.json.", "Name the folder of a run, such as runs/cat."
            )
        )
    if record.status != "running" or not is_alive(run):
        status = "was killed" if record.status == "running" else f"its status is {record.status}"
        raise UsageError(
            Problem(
                "run_not_training", f"{run} does not train now: {status}.", "Start it, or continue it with --resume."
            )
        )
    if record.training:
        message = f"{run} does not train any more: its LoRA is exported and scored."
        raise UsageError(
            Problem("run_not_training", message, "Wait for its end, and use `lora-trainer sample` with its LoRA.")
        )
    try:
        path = write_request(run, do, prompts)
    except OSError as error:
        message = f"The request cannot be written to {run} ({(error.strerror or str(error)).lower()})."
        raise UsageError(Problem("request_not_written", message, "Check the disk and your rights.")) from error
    return path.parent / ANSWERED / path.name
