"""A job of a batch, how far it is, and what its log of events makes of it. Nothing here reads a disk.

A job is claimed by one process at a time, which gives signs of life until it records the end. The number of attempts is the
claim's own: a process that was silent for so long that another one took its job changes nothing any more. A job that ended
in a failure of training, or whose process died, waits before its next attempt if the batch repeats failures (`--retries`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lora_trainer.core.errors import DATASET_REFUSED, DONE, LORA_REFUSED, SIGNALED, TRAINING_FAILED
from lora_trainer.core.hardware import this_machine
from lora_trainer.run_folder.process_life import is_running, process_start

SILENT_SECONDS = 120.0  # without a sign of life a process of another machine counts as dead
MOST_DEATHS = 3  # processes that one job may take with it
FIRST_RETRY, LONGEST_RETRY = 60.0, 3600.0  # seconds before the next attempt; twice as long after each
CANCELLED = "cancelled by batch cancel"
# Notes of a batch: what all jobs have in common, with how many of them one process trains at once, what runs them.
ROOT, SHARED, TOGETHER, EXECUTOR = "root", "shared", "together", "executor"
SEVERAL_MACHINES = "several_machines"  # whether workers on several machines may take its jobs
WAIT_MINUTES, RETRIES = "wait_minutes", "retries"  # how long it waits for room, and how often a failed job is repeated

Status = Literal["waiting", "running", "done", "refused", "unresolved", "failed", "stopped", "cancelled"]
COUNTED: tuple[Status, ...] = (  # in order
    *("done", "refused", "unresolved", "failed", "stopped", "cancelled", "running", "waiting"),
)
Claim = Literal["held", "cancelled", "lost"]
UNSCORED: Mapping[str, float | None] = {"dataset": None, "lora": None}


@dataclass(frozen=True)
class NewJob:
    """A job to enlist. `data` is its dataset folder or its config file; `document` is for its `job.json`."""

    name: str
    data: Path
    priority: int = 0
    document: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class QueuedJob:
    """One job of a batch and how far it is. `seconds` is over all finished attempts."""

    name: str
    data: Path
    status: Status = "waiting"
    attempts: int = 0
    exit_code: int | None = None
    reason: str | None = None
    scores: Mapping[str, float | None] = field(default_factory=lambda: dict(UNSCORED))
    outcome: str | None = None  # of the LoRA's verdict
    seconds: float = 0.0
    claimed: float | None = None  # seconds since 1970, while it runs
    phase: str | None = None
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    cancelled: int = 0  # 1 while it runs and is to stop
    priority: int = 0  # higher ones first
    retry_in: float | None = None  # seconds until it may be claimed, where it waits after a failure


@dataclass(frozen=True)
class Ending:
    """How one attempt at a job ended. `outcome` is that of the LoRA's verdict, None where it was not measured."""

    exit_code: int
    reason: str | None
    scores: Mapping[str, float | None]
    outcome: str | None = None

    @property
    def status(self) -> Status:
        if self.exit_code >= SIGNALED:
            return "stopped"
        if self.exit_code == DONE:
            return "done"
        if self.exit_code == LORA_REFUSED and self.outcome == "unresolved":
            return "unresolved"
        return "refused" if self.exit_code in (DATASET_REFUSED, LORA_REFUSED) else "failed"


@dataclass(frozen=True)
class Entry:
    """One entry of a log: its content, and when it was written by the clock of the disk."""

    document: Mapping[str, Any]
    time: float


@dataclass(frozen=True)
class JobState:
    """What the entries of one job say. `ready` is when it may be claimed, by the clock of the disk."""

    job: QueuedJob
    holder: str = ""
    deaths: int = 0
    failures: int = 0
    ready: float | None = None


def state_after(state: JobState, entry: Entry) -> JobState:
    """The state of a job after its next entry."""
    document, job = entry.document, state.job
    match document["event"]:
        case "claimed":
            job = replace(job, status="running", attempts=job.attempts + 1, claimed=entry.time)
            job = replace(job, exit_code=None, reason=None, cancelled=0)
            return replace(state, job=job, holder=document["holder"], ready=None)
        case "cancelled" if job.status == "running":
            return replace(state, job=replace(job, cancelled=1))
        case "cancelled":
            return replace(state, job=replace(job, status="cancelled", reason=CANCELLED), ready=None)
        case "put back":
            job = replace(job, status="waiting", exit_code=None, reason=None)
            return replace(state, job=job, deaths=0, failures=0, ready=None)
        case "lost":
            return after_death(state, document, entry.time)
    return after_ending(state, document, entry.time)


def after_death(state: JobState, document: Mapping[str, Any], now: float) -> JobState:
    """The state of a job whose process died, which was seen at `now`."""
    deaths, seconds = state.deaths + 1, document["alive"] - (state.job.claimed or now)
    job = replace(state.job, seconds=state.job.seconds + max(0.0, seconds), claimed=None)
    if job.cancelled:
        return replace(state, job=replace(job, status="cancelled", reason=CANCELLED, cancelled=0))
    if deaths >= MOST_DEATHS:
        reason = f"Its process died {deaths} times without a word."
        return replace(state, job=replace(job, status="failed", exit_code=TRAINING_FAILED, reason=reason))
    ready = now + retry_wait(deaths) if document["retries"] else None
    return replace(state, job=replace(job, status="waiting"), deaths=deaths, ready=ready)


def after_ending(state: JobState, document: Mapping[str, Any], now: float) -> JobState:
    """The state of a job whose attempt ended at `now`."""
    failures, seconds = state.failures + 1, now - (state.job.claimed or now)
    ending = Ending(*(document[key] for key in ("exit_code", "reason", "scores", "outcome")))
    is_repeated = ending.exit_code == TRAINING_FAILED and failures <= document["retries"]
    pause = retry_wait(failures) if is_repeated else None
    job = replace(state.job, seconds=state.job.seconds + max(0.0, seconds), claimed=None, cancelled=0)
    job = replace(job, scores=ending.scores, outcome=ending.outcome)
    if state.job.cancelled and (ending.status == "stopped" or pause is not None):
        return replace(state, job=replace(job, status="cancelled", exit_code=None, reason=CANCELLED))
    job = replace(job, status=ending.status, exit_code=ending.exit_code, reason=ending.reason)
    if pause is None:
        return replace(state, job=job)
    return replace(state, job=replace(job, status="waiting"), failures=failures, ready=now + pause)


def holds(state: JobState, job: QueuedJob) -> bool:
    """Whether a claimed job is still that of its claim."""
    return state.job.status == "running" and state.job.attempts == job.attempts


def can_begin(state: JobState, now: float) -> bool:
    return state.job.status == "waiting" and (state.ready is None or state.ready <= now)


def retry_wait(failures: int) -> float:
    """Seconds before the next attempt after so many failures: 60, 120, 240, …, at most an hour."""
    return min(FIRST_RETRY * 2.0 ** (failures - 1), LONGEST_RETRY)


def this_process() -> str:
    """A name that no other process bears: a number is used again, a number with its start is not.

    It also names the machine until it restarts, and its container: several may have one host name.
    """
    start = process_start(os.getpid())
    return json.dumps([socket.gethostname(), os.getpid(), start, this_machine()])


def is_dead(holder: str, silence: float, *, on_one_machine: bool = True) -> bool:
    """Whether a holder, as `this_process` names it, has ended; its last sign of life is `silence` seconds ago.

    With `on_one_machine` no other machine has this one's host name: it restarted, and the process ended with it.
    """
    host, number, started, machine = json.loads(holder)
    is_same_host = host == socket.gethostname()
    if is_same_host and machine == this_machine():
        return not is_running(number, started)
    has_restarted = machine.rpartition("-")[0] != this_machine().rpartition("-")[0]  # else it is in another container
    if is_same_host and on_one_machine and has_restarted:
        return True
    return silence > SILENT_SECONDS
