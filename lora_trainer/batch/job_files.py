"""The jobs of a batch as files, for machines that share a folder: `OUTPUT/jobs/NAME/`.

A job's state is what its numbered entries say, `0001.json`, `0002.json`, … in order: claimed, ended, lost, cancelled, put
back. Whoever changes it reads all of them and makes the next one, which only one process can (`core.io.create_exclusively`):
the others read again and decide anew. So no lock of a network disk is needed, a killed process leaves a readable job,
and a process that lost its job cannot record anything. The entries of `jobs/.batch/` are the list of the jobs and the
batch's notes, whole in each entry: a batch is submitted with one entry or not at all.

A claim is lost when `progress-NNNN.json`, which its holder rewrites or touches, is too old. Its age is the difference of
two times of files on the shared disk, that of a file made now and its own. Clocks of machines are not compared.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lora_trainer.batch.job_store import (
    CANCELLED,
    MOST_DEATHS,
    RETRIES,
    Claim,
    Ending,
    NewJob,
    QueuedJob,
    Status,
    is_dead,
    retry_wait,
    this_process,
    unless_refused,
)
from lora_trainer.core.disk import refusal, write_with_retry
from lora_trainer.core.errors import TRAINING_FAILED, Problem, UsageError
from lora_trainer.core.io import create_exclusively, finite, json_document, read_json, rename_over, write_json
from lora_trainer.core.version import __version__

if TYPE_CHECKING:
    from lora_trainer.run_folder.progress import Progress

FOLDER, LIST, JOB = "jobs", ".batch", "job.json"
VERSION = 1
UNREADABLE_TRIES, UNREADABLE_EVERY = 50, 0.1  # a disk may show another machine's new file after a moment, in seconds


@dataclass(frozen=True)
class Entry:
    """One entry of a log: its content, and when it was written by the clock of the disk."""

    document: Mapping[str, Any]
    time: float


class NumberedLog:
    """The files `0001.json`, `0002.json`, … of a folder, each written once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._known, self._lock = folder, list[Entry](), threading.Lock()

    def read(self) -> list[Entry]:
        """All entries. Raises OSError."""
        with self._lock:
            while (entry := self._read(len(self._known) + 1)) is not None:
                self._known.append(entry)
            return list(self._known)

    def append(self, document: Mapping[str, Any], after: int) -> bool:
        """Make the entry after the first `after` ones; False where another process was first. Raises OSError.

        It is not made twice if this is called again after an error, with the same `id`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if create_exclusively(self.folder / f"{after + 1:04d}.json", json_document(document)):
            return True
        for _ in range(UNREADABLE_TRIES):
            if len(entries := self.read()) > after:
                return bool(entries[after].document.get("id") == document["id"])
            time.sleep(UNREADABLE_EVERY)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.folder))

    def _read(self, number: int) -> Entry | None:
        path = self.folder / f"{number:04d}.json"
        try:
            return Entry(read_json(path), path.stat().st_mtime)
        except FileNotFoundError:
            return None
        except ValueError as error:
            fix = "Restore it from a backup, or delete it, if nothing runs."
            raise UsageError(Problem("file_unreadable", f"{path} cannot be read ({error}).", fix)) from error


@dataclass(frozen=True)
class JobState:
    """What the entries of one job say. `ready` is when it may be claimed, by the clock of the disk."""

    job: QueuedJob
    entries: int = 0
    holder: str = ""
    deaths: int = 0
    failures: int = 0
    ready: float | None = None


def state_after(state: JobState, entry: Entry) -> JobState:
    """The state of a job after its next entry."""
    document, job = entry.document, state.job
    state = replace(state, entries=state.entries + 1)
    match document["event"]:
        case "claimed":
            job = replace(job, status="running", attempts=job.attempts + 1, exit_code=None, reason=None)
            job = replace(job, claimed=entry.time, cancelled=0)
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
    job, deaths = state.job, state.deaths + 1
    job = replace(job, seconds=job.seconds + max(0.0, document["alive"] - (job.claimed or now)), claimed=None)
    if job.cancelled:
        return replace(state, job=replace(job, status="cancelled", reason=CANCELLED, cancelled=0))
    if deaths >= MOST_DEATHS:
        reason = f"Its process died {deaths} times without a word."
        return replace(state, job=replace(job, status="failed", exit_code=TRAINING_FAILED, reason=reason))
    ready = now + retry_wait(deaths) if document["retries"] else None
    return replace(state, job=replace(job, status="waiting"), deaths=deaths, ready=ready)


def after_ending(state: JobState, document: Mapping[str, Any], now: float) -> JobState:
    """The state of a job whose attempt ended at `now`."""
    job, failures = state.job, state.failures + 1
    ending = Ending(*(document[key] for key in ("exit_code", "reason", "scores", "outcome")))
    pause = ending.retry_after(failures, document["retries"])
    job = replace(job, seconds=job.seconds + max(0.0, now - (job.claimed or now)), claimed=None, cancelled=0)
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


class JobFiles:
    """A `JobStore` in the folder `OUTPUT/jobs`. Raises UsageError for one of another version, or a disk that cannot hold it."""

    def __init__(self, output: Path) -> None:
        self.output, self.folder = output, output / FOLDER
        self._logs, self._last_progress = dict[str, NumberedLog](), dict[tuple[str, int], Mapping[str, Any]]()
        self._seen = dict[str, JobState]()  # of the last look
        self._list: tuple[int, list[QueuedJob], list[QueuedJob]] = (0, [], [])  # entries; by priority, in their order
        try:
            if not self._log(LIST).read():
                self._log(LIST).append({"id": secrets.token_hex(8), "version": VERSION, "notes": {}, "jobs": []}, 0)
        except OSError as error:
            message = f"{self.folder} cannot hold the jobs of a batch ({(error.strerror or str(error)).lower()})."
            if refusal(error) is None or error.errno == errno.EPERM:
                fix = "It needs a disk with hard links, such as NFS, Lustre, CephFS or a local one. Choose another --output."
            else:
                fix = "Make room there, or choose another --output."
            raise UsageError(Problem("batch_folder_unusable", message, fix)) from error
        if (version := self._batch()["version"]) != VERSION:
            raise UsageError(
                Problem(
                    "batch_of_other_version",
                    f"{self.folder} is of version {version}, not {VERSION}.",
                    "Choose another --output.",
                )
            )

    def write_note(self, key: str, value: Any) -> None:
        self._change_batch(lambda batch: {"notes": {**batch["notes"], key: value}})

    def read_note(self, key: str) -> Any:
        return self._batch()["notes"].get(key)

    def read_document(self, name: str) -> dict[str, Any]:
        """The content of `job.json`. Raises UsageError where it is missing or damaged."""
        path = self.folder / name / JOB
        try:
            return dict(read_json(path))
        except (OSError, ValueError) as error:
            message = f"{path} cannot be read on {socket.gethostname()} ({error})."
            raise UsageError(Problem("file_unreadable", message, "Submit the batch again, with --resume.")) from error

    def enlist(self, jobs: Sequence[NewJob], notes: Mapping[str, Any] | None = None) -> None:
        states = {state.job.name: state.job for state in self._states()}
        running = {name for name, job in states.items() if job.status == "running"}
        if wrong := [job.name for job in jobs if job.name in running and self._is_new(job, "data_hash")]:
            fix = "Wait for it, or stop it with: lora-trainer batch cancel"
            raise UsageError(
                [Problem("job_still_runs", f"{name} runs now, with other settings.", fix) for name in wrong]
            )
        for job in jobs:
            if job.name in running or not self._is_new(job):
                continue  # images that are added while it runs are for a later submission
            path, document = self.folder / job.name / JOB, _whole(job)
            write_with_retry(JOB, self.output, partial(write_json, path, document))
        named = {job.name for job in jobs}
        listed = [{"name": job.name, "data": str(job.data), "priority": job.priority} for job in jobs]
        kept = {name for name, job in states.items() if job.status != "waiting"} - named

        def change(batch: Mapping[str, Any]) -> dict[str, Any]:
            others = [each for each in batch["jobs"] if each["name"] in kept]
            return {"jobs": [*listed, *others], "notes": {**batch["notes"], **(notes or {})}}

        self._change_batch(change)

    def put_back(self, names: Iterable[str]) -> None:
        for job in self._named(names):
            self._append(
                job, lambda state: state.job.status not in ("running", "waiting") or bool(state.ready), "put back"
            )

    def claim(self, name: str | None = None) -> QueuedJob | None:
        """As in `JobStore`. Jobs that had ended are read again only where no other may begin: thousands cost time on a network disk."""
        self._listed()
        listed = [job for job in self._list[1] if name in (None, job.name)]
        now = write_with_retry(FOLDER, self.output, self._now)
        for known in ({"waiting", "running"}, set(get_args(Status))):
            for job in listed:
                if (seen := self._seen.get(job.name)) is not None and seen.job.status not in known:
                    continue
                state: JobState | None = write_with_retry(FOLDER, self.output, partial(self._state, job))
                if state and state.job.status == "running":
                    state = self._after_loss(state, now)
                if state and can_begin(state, now) and (claimed := self._claim(state, now)) is not None:
                    return claimed.job
        return None

    def _claim(self, state: JobState, now: float) -> JobState | None:
        """Claim a job; None where another process was first. Raises UsageError for one of another version."""
        program = self.read_document(state.job.name).get("program")
        if program != __version__:
            message = f"{state.job.name} is a job for lora-trainer {program}, and this is {__version__}."
            fix = f"Install that here: pip install lora-trainer=={program}. Or submit the batch again with --resume."
            raise UsageError(Problem("job_of_other_version", message, fix))
        holder = this_process(shared=True)
        return self._append(state.job, lambda found: can_begin(found, now), "claimed", holder=holder)

    def give_back_lost(self) -> None:
        running = [state for state in self._states() if state.job.status == "running"]
        now = write_with_retry(FOLDER, self.output, self._now) if running else 0.0
        for state in running:
            self._after_loss(state, now)

    def cancel(self, names: Iterable[str]) -> None:
        self.give_back_lost()
        for job in self._named(names):
            self._append(
                job, lambda state: state.job.status in ("waiting", "running") and not state.job.cancelled, "cancelled"
            )

    def finish(self, job: QueuedJob, ending: Ending) -> Status | None:
        retries = self.read_note(RETRIES) or 0
        ended = self._append(job, lambda state: holds(state, job), "ended", **asdict(ending), retries=retries)
        return None if ended is None else ended.job.status

    def report_progress(self, job: QueuedJob, progress: Progress) -> None:
        path = self._progress(job)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        with unless_refused():
            temporary.write_text(json.dumps(finite(asdict(progress))), encoding="utf-8")
            rename_over(temporary, path)

    def sign_of_life(self, job: QueuedJob) -> bool:
        signs = list[Path]()
        with unless_refused():
            self._progress(job).touch()  # the time is the disk's, not this machine's
            signs.append(self._progress(job))
        return bool(signs)

    def read_claim(self, job: QueuedJob) -> Claim:
        found: list[Claim] = []
        with unless_refused():
            state = self._state(job)
            found.append("lost" if not holds(state, job) else "cancelled" if state.job.cancelled else "held")
        return found[0] if found else "held"  # where the disk refuses now

    def read_jobs(self) -> list[QueuedJob]:
        states = self._states()
        now = 0.0
        if any(state.ready is not None for state in states):
            now = write_with_retry(FOLDER, self.output, self._now)
        return [self._shown(state, now) for state in states]

    def _is_new(self, job: NewJob, *ignored: str) -> bool:
        """Whether a job has no file yet, or one with other content, but for `ignored` keys."""
        try:
            before = read_json(self.folder / job.name / JOB)
        except (OSError, ValueError):
            return True
        now = json.loads(json.dumps(_whole(job)))
        return any(before.get(key) != now.get(key) for key in before.keys() | now.keys() if key not in ignored)

    def _log(self, name: str) -> NumberedLog:
        return self._logs.setdefault(name, NumberedLog(self.folder / name))

    def _batch(self) -> Mapping[str, Any]:
        return self._log(LIST).read()[-1].document

    def _change_batch(self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Make the newest list and notes what `change` makes of them; nothing where that is the same."""
        token = secrets.token_hex(8)

        def append() -> None:
            while True:
                entries = self._log(LIST).read()
                batch = {**entries[-1].document, "id": token}
                new = {**batch, **change(batch)}
                if new == batch or self._log(LIST).append(new, len(entries)):
                    return

        write_with_retry(FOLDER, self.output, append)

    def _append(self, job: QueuedJob, may: Callable[[JobState], bool], event: str, **values: Any) -> JobState | None:
        """Make this event the next entry of a job whose state `may` be followed by it; the state then, or None."""
        document = {"id": secrets.token_hex(8), "event": event, **values}

        def append() -> JobState | None:
            while may(state := self._state(job)):
                if self._log(job.name).append(document, state.entries):
                    return self._state(job, state.entries + 1)
            return None

        return write_with_retry(FOLDER, self.output, append)

    def _listed(self) -> list[QueuedJob]:
        if (entries := len(self._log(LIST).read())) != self._list[0]:
            jobs = self._batch()["jobs"]
            found = [QueuedJob(each["name"], Path(each["data"]), priority=each["priority"]) for each in jobs]
            self._list = (entries, sorted(found, key=lambda job: -job.priority), found)
        return self._list[2]

    def _named(self, names: Iterable[str]) -> list[QueuedJob]:
        listed = {job.name: job for job in self._listed()}
        return [listed.get(name, QueuedJob(name, Path(name))) for name in names]

    def _states(self) -> list[JobState]:
        return write_with_retry(FOLDER, self.output, lambda: [self._state(job) for job in self._listed()])

    def _state(self, job: QueuedJob, entries: int | None = None) -> JobState:
        """What the first `entries` of a job's entries say, by default all."""
        begin = JobState(QueuedJob(job.name, job.data, priority=job.priority))
        state = self._seen[job.name] = reduce(state_after, self._log(job.name).read()[:entries], begin)
        return state

    def _after_loss(self, state: JobState, now: float) -> JobState | None:
        """The state of a running job after its claim was found lost; None where its holder lives."""
        alive = state.job.claimed or now
        with suppress(OSError):  # no progress yet
            alive = max(alive, self._progress(state.job).stat().st_mtime)
        if not is_dead(state.holder, now - alive):
            return None
        same, retries = partial(holds, job=state.job), self.read_note(RETRIES) or 0
        self._append(state.job, same, "lost", alive=alive, retries=retries)
        return write_with_retry(FOLDER, self.output, partial(self._state, state.job))

    def _progress(self, job: QueuedJob) -> Path:
        return self.folder / job.name / f"progress-{job.attempts:04d}.json"

    def _now(self) -> float:
        """The time by the clock of the disk. Raises OSError."""
        descriptor, name = tempfile.mkstemp(prefix=".clock.", suffix=".part", dir=self.folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(b"now")
            return Path(name).stat().st_mtime
        finally:
            Path(name).unlink(missing_ok=True)

    def _shown(self, state: JobState, now: float) -> QueuedJob:
        """A job with its progress."""
        job, at = state.job, (state.job.name, state.job.attempts)
        progress = self._last_progress.get(at, {})
        if job.attempts and not progress:
            with suppress(OSError, ValueError):  # none yet, or cut off by a power failure
                progress = read_json(self._progress(job))
            if job.status != "running":
                self._last_progress[at] = progress
        phase = progress.get("phase") if job.status == "running" else None
        retry_in = None if state.ready is None else max(0.0, state.ready - now)
        job = replace(job, step=progress.get("step"), total=progress.get("total"), phase=phase, retry_in=retry_in)
        return replace(job, loss=progress.get("loss"), val_loss=progress.get("val_loss"))


def _whole(job: NewJob) -> dict[str, Any]:
    """What `job.json` holds."""
    return {
        "version": VERSION,
        "program": __version__,
        "name": job.name,
        "data": str(job.data),
        **finite(dict(job.document)),
    }


def can_begin(state: JobState, now: float) -> bool:
    return state.job.status == "waiting" and (state.ready is None or state.ready <= now)
