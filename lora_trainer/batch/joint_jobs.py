"""Jobs of a queue that train on one base in one process (`batch --together`): which can, and which of them are claimed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lora_trainer.batch import queue
from lora_trainer.batch.folders import Shared, job_settings
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import UsageError

TOGETHER = "together"  # the queue's note with how many jobs train on one base
OF_THE_BASE = ("model", "memory", "hardware", "compile")  # sections of the settings that these jobs must share


def settings_against(config: Config) -> str:
    """The settings for which a job trains on a base of its own, as `name=value`; empty where there are none."""
    found = {
        "text_encoder.learning_rates": config.trains_text,
        "model.training_adapter": config.model.training_adapter is not None,
        "lora.dropout": config.lora.has_dropout,
        "loss.guidance_target": config.loss.guidance_target is not None,
        "train.auto_find_micro_batch_size": config.train.auto_find_micro_batch_size,
        "train.deterministic": config.train.deterministic,
        "memory.offload_activations": config.memory.offload_activations,
        "compile.enabled": config.compile.enabled is True,
        "profile.enabled": config.profile.enabled,
    }
    return ", ".join(name for name, is_set in found.items() if is_set)


def claim_others(path: Path, shared: Shared, first: queue.QueuedJob, most: int) -> Iterator[queue.QueuedJob]:
    """Claim waiting jobs that can train on the base of `first`, at most `most`, in the order of the queue."""
    config = config_of(shared, first) if most > 0 else None
    if config is None or settings_against(config):
        return
    for job in queue.read_jobs(path):
        own = config_of(shared, job) if most > 0 and job.status == "waiting" else None
        if own is None or settings_against(own):
            continue
        if any(getattr(own, section) != getattr(config, section) for section in OF_THE_BASE):
            continue
        if (claimed := queue.claim(path, name=job.name)) is not None:
            most -= 1
            yield claimed


def config_of(shared: Shared, job: queue.QueuedJob) -> Config | None:
    """A job's settings; None where they are wrong, which is reported when the job runs."""
    try:
        return job_settings(shared, job.name, job.data).config
    except UsageError:
        return None
