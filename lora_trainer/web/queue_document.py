"""The jobs of the folder of runs, and the workers that were started for them, as one document."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lora_trainer.batch import queue
from lora_trainer.batch.job_store import ROOT, TOGETHER
from lora_trainer.batch.stores import holds_batch, store_of
from lora_trainer.batch.summary import summary
from lora_trainer.web.children import Child, Children
from lora_trainer.web.run_list import Stamp, id_of, stamp_of


def queue_document(output: Path, children: Children) -> dict[str, Any]:
    """The document of `batch status --json`, each job with its progress and priority; and the workers."""
    workers = [
        {"name": each.name.lstrip("~"), "pid": each.pid, "gpu": each.gpu, "started": each.started, "is_live": True}
        for each in workers_of(children)
    ]
    if not holds_batch(output):
        return {"jobs": [], "workers": workers, "together": 1}
    store = store_of(output)
    jobs = store.read_jobs()
    document = summary(jobs, output, store.read_note(ROOT))
    found = {job.name: {**asdict(job), "data": str(job.data), "id": id_of(output / job.name, output)} for job in jobs}
    document["jobs"] = [{**found[each["name"]], **each} for each in document["jobs"]]
    return {**document, "workers": workers, "together": store.read_note(TOGETHER) or 1}


def workers_of(children: Children) -> list[Child]:
    """The workers that run."""
    return [child for child in children.all() if child.command == "work" and child.is_alive]


def stamp_of_queue(output: Path, children: Children) -> tuple[Stamp, ...]:
    """What changes when the document does."""
    return (stamp_of(output / queue.FILE), *((child.pid, 0, 0) for child in workers_of(children)))
