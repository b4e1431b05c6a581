"""The work of a child process in tests, in its own module so that it loads nothing."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path


def end_at_once(path: str) -> None:
    raise SystemExit(9)


def sleep(path: str) -> None:
    time.sleep(60)


def without_hard_links() -> None:
    """This process sees a disk that has none."""

    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    os.link = link  # type: ignore[assignment]


def take_all(output: str, taken: str, links: str = "") -> None:
    """Claim and end the jobs of a batch until none waits, and write their names, one a line."""
    if links == "no links":
        without_hard_links()
    from lora_trainer.jobs.job_state import Ending
    from lora_trainer.jobs.job_store import open_batch

    store = open_batch(Path(output))
    with open(taken, "w", encoding="utf-8") as file:
        while (job := store.claim()) is not None:
            file.write(f"{job.name} {job.attempts}\n")
            file.flush()
            store.finish(job, Ending(0, None, {"dataset": 1.0, "lora": 1.0}))


def claim_and_hang(output: str) -> None:
    from lora_trainer.jobs.job_store import open_batch

    open_batch(Path(output)).claim()
    time.sleep(60)
