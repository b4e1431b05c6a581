"""What a run's record says of its preparation and its training."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lora_trainer.config.toml import to_toml
from lora_trainer.core.disk import current, write_with_retry
from lora_trainer.core.hardware import describe_machine
from lora_trainer.core.io import write_text
from lora_trainer.data.sample_counts import FILE as SAMPLE_COUNTS
from lora_trainer.data.sample_counts import write_sample_counts
from lora_trainer.monitor.idle import means_of
from lora_trainer.monitor.memory import gpu_pool, highest_memory_gib
from lora_trainer.monitor.trackers import SYSTEM, read_lines
from lora_trainer.run.changed_data import write_images
from lora_trainer.run.differences import ROUNDING_DIFFERS, other_machine, pinned, repeated_record
from lora_trainer.run.inputs import with_absolute_paths
from lora_trainer.run.messages import model_lines
from lora_trainer.training.control import is_stopped_early, stop_reason

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.run.session import (
        Session,
    )
    from lora_trainer.run_folder.record import Record
    from lora_trainer.training.checkpoints.checkpoint import Checkpoint
    from lora_trainer.training.state import TrainState
    from lora_trainer.training.training_run import Run


TIMED_ATTENTION = "timed_attention"  # in the record's hardware


def with_preparation(record: Record, session: Session, run: Run) -> Record:
    """The record with what is known before the first step."""
    built = run.context.built
    device, world = str(session.choices.device), session.processes.world
    hardware = {**describe_machine(), "device": device, "processes": world}
    if session.config.hardware.attention_backend == "fastest":
        hardware[TIMED_ATTENTION] = built.attention
    earlier = record.hardware
    if not earlier and (repeated := repeated_record(session.order.resolved)) is not None:
        earlier = repeated.hardware
    moved = other_machine(earlier, hardware)
    if moved:
        session.console.print(f"another machine: {', '.join(moved)}; {ROUNDING_DIFFERS}")
    return replace(
        record.with_seconds(cache=session.cache_seconds),
        hardware=hardware,
        changed=(*record.changed, *moved),
        pinned=record.pinned | pinned(record.config, decided_settings(session, built.attention)),
        model={**record.model, "sha256": run.settings["model"]},
        arithmetic=session.steps.to_json(),
        setup=asdict(run.setup),
        choices=(
            *session.order.resolved.notes,
            *model_lines(session.order.resolved, session.inputs),
            *session.choices.lines,
            *built.notes,
            *built.details,
        ),
    )


def with_sample_counts(record: Record, session: Session, run: Run, state: TrainState) -> Record:
    """The record with the sample counts, which are also logged and written to a file.

    On a full disk only that file is missing: the weights are saved already.
    """
    if not state.step:
        return record
    counts = run.feed.sample_counts(state.step)
    line = counts.line + (f"; {state.skipped} of {state.step} steps were skipped" if state.skipped else "")
    session.console.print(f"trained: {line}")
    summary = counts.to_json() | {"skipped_steps": state.skipped, "line": line}
    try:
        file: str | None = write_sample_counts(session.folder, counts)
    except OSError as error:
        session.console.print(f"{SAMPLE_COUNTS} could not be written: {error}")
        file = None
    return replace(record, sample_counts=summary, files={**record.files, "sample_counts": file})


def repeatable_config(session: Session, attention: str) -> Config:
    """The config that repeats this run from any folder: absolute paths, and the settings chosen for the hardware.

    In a file these count as set by the user, so they never fall back.
    """
    config = with_absolute_paths(session.config)
    fixed = {"run": {"name": session.folder.name}, **decided_settings(session, attention)}
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in fixed.items()}
    return config.model_copy(update=sections)


def decided_settings(session: Session, attention: str) -> dict[str, dict[str, Any]]:
    """The values of automatic settings, from the hardware or a measurement, by section and key."""
    found = {"max_micro_batch_size": session.choices.micro} if session.config.train.auto_find_micro_batch_size else {}
    threads = {"threads": torch.get_num_threads()} if session.choices.device.type == "cpu" else {}
    return {
        "memory": {"weight_dtype": session.choices.precision.value},
        "train": found,
        "hardware": {"attention_backend": attention, **threads},
    }


def memory_summary(device: torch.device) -> dict[str, float]:
    """For the record: peak memory, and on a GPU what torch reserved, what of it is unused, and allocation retries."""
    summary = {"peak_gib": round(highest_memory_gib(device), 3)}
    if pool := gpu_pool(device):
        summary |= {"held_gib": round(pool.most_reserved / 2**30, 3), "unused_gib": round(pool.unused / 2**30, 3)}
        summary |= {"retries": pool.retries, "limit_gib": round(pool.limit / 2**30, 3)}
    return summary


def write_preparation(session: Session, run: Run, record: Record) -> None:
    """Write what repeats the run and what it is trained on: a run that fails from here on is described in its folder."""
    folder = session.folder
    text = to_toml(repeatable_config(session, run.context.built.attention))
    file = folder / "config.toml"
    keep = partial(write_text, file, text)
    current().keep(file.name, keep)
    write_with_retry(file.name, folder, keep, len(text))
    write_images(folder, session.inputs.manifest.samples)
    record.write(folder)
    (folder / SAMPLE_COUNTS).unlink(missing_ok=True)  # an earlier session's


def with_training(record: Record, session: Session, run: Run, start: Checkpoint | None, state: TrainState) -> Record:
    """The record with what the training was and how it ended."""
    safeguards = session.config.safeguards
    stopped_early = is_stopped_early(safeguards, state.control)
    earlier_seconds = start.state.seconds if start else 0.0
    training = {key: value for key, value in asdict(state).items() if key != "base_losses"}
    return replace(
        record.with_seconds(train=state.seconds - earlier_seconds),
        steps=state.step,
        training={**training, "stopped_early": stopped_early},
        reason=stop_reason(safeguards, state.control) if stopped_early else None,
        checkpoints=run.writer.summary(run.copier.writes),
        memory=memory_summary(session.choices.device),
        seen=means_of(read_lines(session.folder / SYSTEM)) | run.watches.summary(),
    )
