"""The jobs of the folder of runs, and the workers that were started for them, as one document."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lora_trainer.jobs.job_state import ROOT, TOGETHER, QueuedJob
from lora_trainer.jobs.job_store import FIRST, FOLDER, LIST, JobStore, holds_batch
from lora_trainer.jobs.summary import summary
from lora_trainer.web.run_list import Stamp, id_of, stamp_of

if TYPE_CHECKING:
    from pathlib import Path

    from lora_trainer.web.children import Child, Children


class RunQueue:
    """The jobs in a folder of runs. Any thread may call its methods."""

    def __init__(self, output: Path, children: Children) -> None:
        self.output, self.children = output, children
        self._store: JobStore | None = None  # kept with what it has read
        self._batch: Stamp = None  # of its first entry

    def document(self) -> dict[str, Any]:
        """The document of `batch status --json`, each job with its progress and priority; and the workers."""
        workers = [
            {
                "name": each.name.lstrip("~"),
                "pid": each.pid,
                "gpu": each.about.get("gpu"),
                "started": each.started,
                "is_live": True,
            }
            for each in self.workers()
        ]
        if (store := self._opened()) is None:
            return {"jobs": [], "workers": workers, "together": 1}
        jobs = store.read_jobs()
        document = summary(jobs, self.output, store.read_note(ROOT))
        own = {job.name: {**asdict(job), "data": str(job.data), "id": self._id_of(job)} for job in jobs}
        document["jobs"] = [{**own[each["name"]], **each} for each in document["jobs"]]
        return {**document, "workers": workers, "together": store.read_note(TOGETHER) or 1}

    def jobs(self) -> list[QueuedJob]:
        store = self._opened()
        return [] if store is None else store.read_jobs()

    def workers(self) -> list[Child]:
        """The workers that run."""
        return [child for child in self.children.all() if child.command == "work" and child.is_alive]

    def _opened(self) -> JobStore | None:
        """The jobs; None where none was ever added, or the folder was deleted."""
        if not holds_batch(self.output):
            self._store = None
            return None
        batch = stamp_of(self.output / FOLDER / LIST / FIRST)
        if self._store is None or batch != self._batch:  # another batch in the place of a deleted one
            self._store, self._batch = JobStore(self.output), batch
        return self._store

    def _id_of(self, job: QueuedJob) -> str:
        return id_of(self.output / job.name, self.output)
