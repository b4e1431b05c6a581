"""A process that works on the jobs of a batch while the disk fails: `python -m tests.faults.jobs_at_work FOLDER STRIDE`.

Started with the library of `disk.c`. For each fault at each operation it forks a copy of itself that submits, claims, ends,
cancels and puts back jobs, and then continues with what is on the disk. Prints the problems as a JSON document.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from lora_trainer.jobs.job_state import Ending, NewJob, QueuedJob
from lora_trainer.jobs.job_store import JobStore, holds_batch
from lora_trainer.jobs.summary import write_summary
from lora_trainer.run_folder.progress import Progress
from tests.faults.disk import Mode, Page, loaded_page

MODES = (Mode.KILL, Mode.TORN, Mode.CUT, Mode.FAIL, Mode.FULL, Mode.LOCKED)
KILLS = MODES[:3]
NAMES = ("ash", "birch", "cedar")
JOBS = [NewJob(name, Path("/data", name), document={"config": {"run": {"name": name}}}) for name in NAMES]
UNSCORED = {"dataset": None, "lora": None}
DONE = Ending(0, None, {"dataset": 1.0, "lora": 0.9}, "passed")
AFTER_SUBMISSION, AFTER_FIRST_END, AFTER_CANCEL = 1, 3, 4  # steps of `work`


def work(output: Path) -> Iterator[None]:
    """What a submitter, a worker and a person at the command line do, step by step."""
    store = JobStore(output)
    store.write_note("retries", 0)
    store.enlist(JOBS)
    yield
    first = claimed(store)
    store.report_progress(first, Progress("training", 1, 2, 0.5))
    store.sign_of_life(first)
    yield
    store.finish(first, DONE)
    yield
    store.cancel(["cedar"])
    yield
    store.finish(claimed(store), Ending(5, "Out of memory.", UNSCORED))
    yield
    store.put_back(["birch", "cedar"])
    write_summary(store)
    yield


def claimed(store: JobStore) -> QueuedJob:
    job = store.claim()
    assert job is not None
    return job


def fork(output: Path, page: Page, at: int, mode: Mode) -> int:
    """Work in a child in which the operation numbered `at` fails; its exit code, or minus the number of its signal."""
    page.armed = 0
    number = os.fork()
    if number == 0:
        code = 0
        try:
            page.arm(output, at, mode)
            for _ in work(output):
                page.steps += 1
        except OSError:
            code = 5
        except Exception as error:  # noqa: BLE001  the parent must hear of it
            page.armed = 0
            code = 2 if type(error).__name__ == "UsageError" else 1
            traceback.print_exc()
        finally:
            page.armed = 0
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def problems_after(output: Path, page: Page, code: int, mode: Mode) -> list[str]:
    """What is wrong on the disk, and in what the next process makes of it."""
    found = [] if code in ((-9,) if mode in KILLS else (0, 2, 5)) or not page.fired else [f"the exit code is {code}"]
    steps = page.steps
    if steps and not holds_batch(output):
        return [*found, "the batch is gone"]
    store = JobStore(output)
    before = {job.name: job for job in store.read_jobs()}
    if set(before) not in (set(), set(NAMES)):
        found.append(f"half submitted: {sorted(before)}")
    if steps >= AFTER_SUBMISSION and not before:
        found.append("the jobs are gone")
    found += [f"{name} has another file" for name in before if store.read_document(name).get("name") != name]
    if steps >= AFTER_FIRST_END and before["ash"].status != "done":
        found.append(f"an end is lost: {before['ash'].status}")
    if steps >= AFTER_CANCEL and before["cedar"].status not in ("cancelled", "waiting"):
        found.append(f"a cancellation is lost: {before['cedar'].status}")
    store.write_note("retries", 0)
    store.enlist(JOBS)
    store.put_back(NAMES[1:])
    again = []
    while (job := store.claim()) is not None:
        again.append(job.name)
        store.finish(job, DONE)
    jobs = {job.name: job for job in store.read_jobs()}
    if [job.status for job in jobs.values()] != ["done"] * 3:
        found.append(f"in the end: {[job.status for job in jobs.values()]}")
    if len(again) != len(set(again)) or (steps >= AFTER_FIRST_END and "ash" in again):
        found.append(f"trained twice: {again}")
    return found


def main(folder: Path, stride: int) -> None:
    page, found, tries = loaded_page(), list[str](), 0
    assert fork(folder / "whole", page, -1, Mode.COUNT) == 0
    operations = page.operations()
    for mode in MODES:
        for at in range(MODES.index(mode) % stride, len(operations), stride):
            output = folder / f"{mode.name}-{at}"
            code = fork(output, page, at, mode)
            here = f"{mode.name} at {at} ({operations[at]})"
            try:
                found += [f"{here}: {problem}" for problem in problems_after(output, page, code, mode)]
            except Exception as error:  # noqa: BLE001  the next fault is tried, too
                traceback.print_exc()
                found.append(f"{here}: {error!r}")
            tries += 1
    print(json.dumps({"tries": tries, "operations": len(operations), "problems": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
