"""The work of a child process in tests, in its own module so that it loads nothing."""

from __future__ import annotations

import time
from pathlib import Path


def end_at_once(path: str) -> None:
    raise SystemExit(9)


def sleep(path: str) -> None:
    time.sleep(60)


def take_all(output: str, taken: str) -> None:
    """Claim and end the jobs of a batch until none waits, and write their names, one a line."""
    from lora_trainer.batch.job_store import Ending
    from lora_trainer.batch.stores import store_of

    store = store_of(Path(output))
    with open(taken, "w", encoding="utf-8") as file:
        while (job := store.claim()) is not None:
            file.write(f"{job.name} {job.attempts}\n")
            store.finish(job, Ending(0, None, {"dataset": 1.0, "lora": 1.0}))


def claim_and_hang(output: str) -> None:
    from lora_trainer.batch.stores import store_of

    store_of(Path(output)).claim()
    time.sleep(60)
