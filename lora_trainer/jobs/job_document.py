"""What `job.json` holds: all that a worker on another machine needs to train the job as it was submitted.

On one machine a job's settings are read when it begins, so its folder's may be corrected until then. Its file has what
the page set for this job, if anything.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.layers import Resolved
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import Problem, UsageError, gathering
from lora_trainer.core.version import __version__
from lora_trainer.jobs.folders import Shared, job_settings, shared_from_json
from lora_trainer.jobs.job_state import SEVERAL_MACHINES, SHARED, NewJob, QueuedJob
from lora_trainer.run.inputs import list_data, read_model, with_absolute_paths

if TYPE_CHECKING:
    from lora_trainer.jobs.job_store import JobStore


def make_job(shared: Shared, name: str, data: Path) -> NewJob:
    """A job to enlist, with its settings, or with what is wrong in them: such a job fails when it begins."""
    try:
        resolved = job_settings(shared, name, data)
    except UsageError as error:
        problems = [[problem.code, problem.message, problem.fix] for problem in error.problems]
        return NewJob(name, data, document={"problems": problems})
    config = with_absolute_paths(resolved.config).model_dump(mode="json")  # workers begin in other folders
    del config["run"]["output"]  # each machine has its own path of it
    document = {
        "config": config,
        "origins": dict(resolved.origin),
        "evidence": dict(resolved.evidence),
        "notes": list(resolved.notes),
        "program": __version__,
    }
    return NewJob(name, data, resolved.config.run.priority, document)


def with_hashes(jobs: list[NewJob]) -> list[NewJob]:
    """The jobs with what identifies their data and their caches. Loads torch."""
    identified, known = [], dict[str, Mapping[str, str]]()
    for job in jobs:
        hashes = {} if "problems" in job.document else hashes_of(job.document, known)
        identified.append(replace(job, document={**job.document, **hashes}))
    return identified


def hashes_of(document: Mapping[str, Any], known: dict[str, Mapping[str, str]]) -> dict[str, Any]:
    """The `data_hash` of the images and captions, as in `run.json`, and the `cache_keys`: of the VAE and the text encoders, which
    each entry of the caches depends on beside its image or caption. `known` are those of base models read before.

    Where data or model cannot be read there is no hash: the job fails with the reason when it begins.
    """
    from lora_trainer.run.choices import ENCODER_DTYPE

    config, found, ignored = Config.model_validate(document["config"]), dict[str, Any](), list[Problem]()
    with gathering(ignored):
        found["data_hash"] = list_data(config)[0].data_hash
    base = config.model.model_dump_json() + config.text_encoder.model_dump_json()
    with gathering(ignored):
        if base not in known:
            family, facts = read_model(config)
            known[base] = dict(zip(("images", "texts"), family.encoder_keys(facts.path, ENCODER_DTYPE), strict=True))
        found["cache_keys"] = known[base]
    return found


def settings_of(store: JobStore, job: QueuedJob) -> Resolved:
    """The settings of one job: those of its file, or those of the batch and its folder now. Raises UsageError."""
    document = store.read_document(job.name)
    if not store.read_note(SEVERAL_MACHINES):
        shared = document.get(SHARED) or store.read_note(SHARED)
        resolved = job_settings(shared_from_json(shared), job.name, job.data)
        if Path(resolved.config.run.output).expanduser().resolve() == store.output.resolve():
            return resolved
    else:
        resolved = read_settings(document)
    # Where this machine sees the batch, or where its folder was moved or copied to.
    run = resolved.config.run.model_copy(update={"output": str(store.output.absolute())})
    return replace(resolved, config=resolved.config.model_copy(update={"run": run}))


def read_settings(document: Mapping[str, Any]) -> Resolved:
    """The settings that `make_job` put into a document. Raises UsageError with what was wrong in them."""
    if problems := document.get("problems"):
        raise UsageError([Problem(*problem) for problem in problems])
    config = Config.model_validate(document["config"])
    return Resolved(config, document["origins"], tuple(document.get("notes", ())), document["evidence"])


def refuse_changed(store: JobStore, name: str) -> None:
    """Raise UsageError where this machine's data or base model are not those of the job's file."""
    document = store.read_document(name)
    changed = {
        "data_hash": "images or captions",
        "cache_keys": "base model's VAE or text encoders",
    }
    now = hashes_of(document, {}) if changed.keys() & document.keys() else {}
    wrong = [what for key, what in changed.items() if key in now and key in document and now[key] != document[key]]
    if wrong:
        message = (
            f"The {' and the '.join(wrong)} of {name} on {socket.gethostname()} are not those that were submitted."
        )
        fix = "Make the paths of its job.json the same on all machines, or submit the batch again, with --resume."
        raise UsageError(Problem("submitted_files_changed", message, fix))
