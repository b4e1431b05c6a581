"""What `job.json` holds: all that a worker on another machine needs to train the job as it was submitted. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_trainer.batch.folders import PATHS, Shared, job_settings, shared_from_json
from lora_trainer.batch.job_store import SHARED, JobStore, NewJob, QueuedJob
from lora_trainer.config.layers import Resolved
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import Problem, UsageError


def make_job(shared: Shared, name: str, data: Path) -> NewJob:
    """A job to enlist, with its settings, or with what is wrong in them: such a job fails when it begins."""
    try:
        resolved = job_settings(shared, name, data)
    except UsageError as error:
        problems = [[problem.message, problem.fix] for problem in error.problems]
        return NewJob(name, data, document={"problems": problems})
    config = resolved.config.model_dump(mode="json")
    for section, key in PATHS:  # workers may begin in another folder
        value = config[section][key]
        if isinstance(value, str) and Path(value).expanduser().exists():
            config[section][key] = str(Path(value).expanduser().absolute())
    document = {"config": config, "origins": dict(resolved.origin), "evidence": dict(resolved.evidence)}
    return NewJob(name, data, resolved.config.run.priority, document)


def settings_of(store: JobStore, job: QueuedJob) -> Resolved:
    """The settings of one job: those of its file, or those of the batch and its folder now. Raises UsageError."""
    document = store.read_document(job.name)
    if document is None:
        return job_settings(shared_from_json(store.read_note(SHARED)), job.name, job.data)
    resolved = read_settings(document)
    run = resolved.config.run.model_copy(update={"output": str(store.output.absolute())})  # as this machine sees it
    return replace(resolved, config=resolved.config.model_copy(update={"run": run}))


def read_settings(document: Mapping[str, Any]) -> Resolved:
    """The settings that `make_job` put into a document. Raises UsageError with what was wrong in them."""
    if problems := document.get("problems"):
        raise UsageError([Problem(*problem) for problem in problems])
    config = Config.model_validate(document["config"])
    return Resolved(config, document["origins"], evidence=document["evidence"])
