"""Jobs of a batch that train on one base in one process (`batch --together`): which can, and which of them are claimed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lora_trainer.core.errors import UsageError
from lora_trainer.jobs.job_document import settings_of

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.jobs.job_state import QueuedJob
    from lora_trainer.jobs.job_store import JobStore

OF_THE_BASE = ("model", "memory", "hardware", "compile")  # sections of the settings that these jobs must share


def settings_against(config: Config) -> str:
    """The settings for which a job trains on a base of its own, as `name=value`; empty where there are none."""
    settings = {
        "text_encoder.learning_rates": config.trains_text,
        "model.training_adapter": config.model.training_adapter is not None,
        "lora.dropout": config.lora.has_dropout,
        "loss.guidance_target": config.loss.guidance_target is not None,
        "loss.output_preservation_weight": config.loss.output_preservation_weight > 0,
        "train.auto_find_micro_batch_size": config.train.auto_find_micro_batch_size,
        "train.deterministic": config.train.deterministic,
        "memory.offload_activations": config.memory.offload_activations,
        "compile.enabled": config.compile.enabled is True,
        "profile.enabled": config.profile.enabled,
    }
    return ", ".join(name for name, is_set in settings.items() if is_set)


def base_of(config: Config) -> tuple[object, ...] | None:
    """What is equal of runs that can train on one base; None for a run that trains on its own."""
    return None if settings_against(config) else tuple(getattr(config, section) for section in OF_THE_BASE)


def claim_others(store: JobStore, first: QueuedJob, most: int) -> Iterator[QueuedJob]:
    """Claim waiting jobs that can train on the base of `first`, at most `most`, in the order of the store."""
    base = base_of_job(store, first) if most > 0 else None
    if base is None:
        return
    for job in store.read_jobs():
        if most > 0 and job.status == "waiting" and base_of_job(store, job) == base:
            claimed = store.claim(job.name)
            if claimed is not None:
                most -= 1
                yield claimed


def base_of_job(store: JobStore, job: QueuedJob) -> tuple[object, ...] | None:
    """The same of a listed job; None also where its settings are wrong, which is reported when it runs."""
    try:
        return base_of(settings_of(store, job).config)
    except UsageError:
        return None
