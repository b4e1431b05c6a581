"""The jobs of a batch, as files in `OUTPUT/jobs/NAME/`: on one machine, or on several that share the folder.

A job's state is what its numbered entries say, `0001.json`, `0002.json`, … in order: claimed, ended, lost, cancelled, put
back. Whoever changes it reads all of them and makes the next one, which only one process can (`create_entry`): the others
read again and decide anew. So no lock of a network disk is needed, a killed process leaves a readable job, and a process
that lost its job cannot record anything. The entries of `jobs/.batch/` make the list of the jobs and the batch's notes: a
batch is submitted with one entry or not at all.

A claim is lost when `progress-NNNN.json`, which its holder rewrites or touches, is too old. Its age is the difference of
two times of files on the shared disk, that of a file made now and its own. Clocks of machines are not compared.

Where the disk refuses, changes of a job's state wait as the batch is set (`core.disk`); progress and signs of life do not.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from lora_trainer.core.disk import refusal, time_on_disk, write_with_retry
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.io import (
    create_exclusively,
    finite,
    flush_folder,
    json_document,
    read_json,
    rename_over,
    write_json,
    write_text,
)
from lora_trainer.core.version import __version__
from lora_trainer.jobs.job_state import (
    RETRIES,
    SEVERAL_MACHINES,
    Claim,
    Ending,
    Entry,
    JobState,
    NewJob,
    QueuedJob,
    Status,
    can_begin,
    holds,
    is_dead,
    state_after,
    this_process,
)
from lora_trainer.run_folder.record import RECORD

if TYPE_CHECKING:
    from lora_trainer.run_folder.progress import Progress

FOLDER, LIST, JOB = "jobs", ".batch", "job.json"
FIRST = "0001.json"  # entry of the list, as of each job
WRITTEN = "the list of jobs"  # as a message about a full disk has it
VERSION = 1
UNREADABLE_TRIES, UNREADABLE_EVERY = 50, 0.1  # a disk may show another machine's new file after a moment, in seconds
ENTRY = "entry.json"  # in an entry that is a folder
NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}  # EINVAL is that of Windows

State = TypeVar("State")


def holds_batch(output: Path) -> bool:
    """Whether jobs were submitted to this output folder."""
    return (output / FOLDER / LIST).is_dir()


def open_batch(output: Path) -> JobStore:
    """The jobs of the batch in an output folder. Raises UsageError where there are none, and as `JobStore` does."""
    if not holds_batch(output):
        message = f"{output} contains no batch (no folder {FOLDER})."
        fix = f"Start one with: lora-trainer batch ROOT --output {output}. If one was started on another machine, this folder"
        fix = f"{fix} is not shared with this one ({socket.gethostname()})."
        raise UsageError(Problem("not_a_batch", message, fix))
    return JobStore(output)


@contextmanager
def unless_refused() -> Iterator[None]:
    """Leave the block where the disk refuses."""
    try:
        yield
    except Exception as error:
        if refusal(error) is None:
            raise


def create_entry(path: Path, text: str) -> bool:
    """Make an entry of a log, whole; False where it exists. Of several processes, on any machines, one makes it. Raises OSError.

    It is a file, or on a disk without hard links, such as exFAT, a folder with that file: a folder that is renamed replaces
    no other one that holds something. A file that is created by its name alone (`O_EXCL`) would stay empty for good where
    its process is killed before it writes.
    """
    try:
        return create_exclusively(path, text)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}.", suffix=".part", dir=path.parent, ignore_cleanup_errors=True
    ) as outside:
        folder = Path(outside, path.name)
        write_text(folder / ENTRY, text)
        try:
            os.rename(folder, path)
        except OSError:
            if not path.exists():
                raise
            return False
    with suppress(OSError):  # the entry is there
        flush_folder(path.parent)
    return True


class EventLog(Generic[State]):
    """The entries `0001.json`, `0002.json`, … of a folder, each written once, and what `fold` makes of them, one after the other."""

    def __init__(self, folder: Path, begin: State, fold: Callable[[State, Entry], State]) -> None:
        self.folder, self._fold, self._lock = folder, fold, threading.Lock()
        self._entries = 0
        self.known = begin  # what the entries say that were read so far
        self.newest: Mapping[str, Any] = {}  # the content of the last of them

    def read(self) -> tuple[int, State]:
        """How many entries there are, and what they say. Raises OSError."""
        with self._lock:
            while (entry := self._read(self._entries + 1)) is not None:
                self.known, self.newest = self._fold(self.known, entry), entry.document
                self._entries += 1
            return self._entries, self.known

    def append(self, document: Mapping[str, Any], after: int) -> Entry | None:
        """Make the entry after the first `after` ones; None where another process was first. Raises OSError.

        It is not made twice if this is called again after an error, with the same `id`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        create_entry(self.folder / f"{after + 1:04d}.json", json_document(document))
        for _ in range(UNREADABLE_TRIES):
            if (entry := self._read(after + 1)) is not None:
                return entry if entry.document.get("id") == document["id"] else None
            time.sleep(UNREADABLE_EVERY)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.folder))

    def _read(self, number: int) -> Entry | None:
        path = self.folder / f"{number:04d}.json"
        try:
            if stat.S_ISDIR(path.stat().st_mode):
                path /= ENTRY
            return Entry(read_json(path), path.stat().st_mtime)
        except FileNotFoundError:
            return None
        except ValueError as error:
            fix = "Restore it from a backup, or delete it, if nothing runs."
            raise UsageError(Problem("file_unreadable", f"{path} cannot be read ({error}).", fix)) from error


def batch_after(batch: Mapping[str, Any], entry: Entry) -> Mapping[str, Any]:
    """The list of the jobs and the notes after their next entry: `jobs` are all, `more` are behind those that were there."""
    document = entry.document
    more = document.get("more", [])
    named = {job["name"] for job in more}
    jobs = [job for job in document.get("jobs", batch["jobs"]) if job["name"] not in named]
    notes = {**batch["notes"], **document.get("notes", {})}
    return {"version": document.get("version", batch.get("version")), "notes": notes, "jobs": [*jobs, *more]}


class JobStore:
    """The jobs of the batch in the folder `output`, which is made where there is none.

    Any thread and any process may call its methods; every change is one or none. Raises UsageError for a batch of another
    version, and where the disk cannot hold one.
    """

    def __init__(self, output: Path) -> None:
        self.output, self.folder = output, output / FOLDER
        self._batch = EventLog[Mapping[str, Any]](self.folder / LIST, {"notes": {}, "jobs": []}, batch_after)
        self._logs, self._last_progress = dict[str, EventLog[JobState]](), dict[tuple[str, int], Mapping[str, Any]]()
        self._list: tuple[int, list[QueuedJob], list[QueuedJob]] = (0, [], [])  # entries; by priority, in their order
        if (self.folder / RECORD).is_file():
            fix = "Rename or move that run, or choose another --output."
            raise UsageError(Problem("batch_folder_unusable", f"{self.folder} is the folder of a run.", fix))
        try:
            if self._batch.read()[0] == 0:
                self._batch.append({"id": secrets.token_hex(8), "version": VERSION}, 0)
            version = self._batch.read()[1]["version"]
        except OSError as error:
            message = f"{self.folder} cannot hold the jobs of a batch ({(error.strerror or str(error)).lower()})."
            raise UsageError(
                Problem("batch_folder_unusable", message, "Make room there, or choose another --output.")
            ) from error
        if version != VERSION:
            message = f"{self.folder} is of version {version}, not {VERSION}."
            raise UsageError(Problem("batch_of_other_version", message, "Choose another --output."))

    def write_note(self, key: str, value: Any) -> None:
        """Keep a JSON value with the batch, such as how often failures are repeated."""
        self._change_batch(lambda batch: {"notes": {key: value}})

    def read_note(self, key: str) -> Any:
        """A value kept by `write_note` or `enlist`, or None."""
        return self._batch.read()[1]["notes"].get(key)

    def read_document(self, name: str) -> dict[str, Any]:
        """The content of `job.json`, which jobs of one machine may lack. Raises UsageError where it is missing or damaged."""
        path = self.folder / name / JOB
        try:
            return dict(read_json(path))
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not self.read_note(SEVERAL_MACHINES):
                return {}
            message = f"{path} cannot be read on {socket.gethostname()} ({error})."
            raise UsageError(Problem("file_unreadable", message, "Submit the batch again, with --resume.")) from error

    def enlist(
        self, jobs: Sequence[NewJob], notes: Mapping[str, Any] | None = None, *, keep_others: bool = False
    ) -> None:
        """Hold these jobs in this order, and these notes, all or nothing.

        Known jobs keep their state. Of jobs that are not named, only those that began are kept, behind these, or with
        `keep_others` all, before these. Raises UsageError for a job that runs and has other settings now.
        """
        states = {state.job.name: state.job for state in self._states()}
        running = {name for name, job in states.items() if job.status == "running"}
        fix = "Wait for it, or stop it with: lora-trainer batch cancel"
        problems = [
            Problem("job_still_runs", f"{job.name} runs now, with other settings.", fix)
            for job in jobs
            if job.name in running and self._is_new(job, "data_hash")
        ]
        if problems:
            raise UsageError(problems)
        for job in jobs:
            if job.name in running or not self._is_new(job):
                continue  # images that are added while it runs are for a later submission
            path, document = self.folder / job.name / JOB, _whole(job)
            write_with_retry(JOB, self.output, partial(write_json, path, document))
        named = {job.name for job in jobs}
        listed = [{"name": job.name, "data": str(job.data), "priority": job.priority} for job in jobs]
        kept = {name for name, job in states.items() if job.status != "waiting"} - named

        def change(batch: Mapping[str, Any]) -> dict[str, Any]:
            if keep_others:
                return {"notes": notes or {}, "more": listed}
            others = [each for each in batch["jobs"] if each["name"] in kept]
            return {"notes": notes or {}, "jobs": [*listed, *others]}

        self._change_batch(change)

    def set_priority(self, name: str, priority: int) -> None:
        """Let a job begin before or after others."""

        def change(batch: Mapping[str, Any]) -> dict[str, Any]:
            by_name = {job["name"]: job for job in batch["jobs"]}
            if name in by_name:
                by_name[name] = {**by_name[name], "priority": priority}
            return {"jobs": list(by_name.values())}

        self._change_batch(change)

    def put_back(self, names: Iterable[str]) -> None:
        """Let jobs that ended wait again, without a pause; their failures count no more."""
        for job in self._named(names):
            self._append(
                job, lambda state: state.job.status not in ("running", "waiting") or bool(state.ready), "put back"
            )

    def claim(self, name: str | None = None) -> QueuedJob | None:
        """Take the first waiting job for this process, of the highest priority, or that of this name.

        None where none may begin now. Claims of dead processes are given back. Raises UsageError for a job of another
        version of this program, which stays as it is. Jobs that had ended are read again only where no other may begin:
        thousands cost time on a network disk.
        """
        self._listed()
        listed = [job for job in self._list[1] if name in (None, job.name)]
        now = write_with_retry(WRITTEN, self.output, self._now)
        for known in ({"waiting", "running"}, set(get_args(Status))):
            for job in listed:
                if self._log(job).known.job.status not in known:
                    continue
                state: JobState | None = write_with_retry(WRITTEN, self.output, partial(self._state, job))
                if state and state.job.status == "running":
                    state = self._after_loss(state, now)
                if state and can_begin(state, now) and (claimed := self._claim(job, now)) is not None:
                    return claimed
        return None

    def _claim(self, job: QueuedJob, now: float) -> QueuedJob | None:
        """Claim a job; None where another process was first. Raises UsageError for one of another version."""
        program = self.read_document(job.name).get("program", __version__)
        if program != __version__:
            message = f"{job.name} is a job for lora-trainer {program}, and this is {__version__}."
            fix = f"Install that here: pip install lora-trainer=={program}. Or submit the batch again with --resume."
            raise UsageError(Problem("job_of_other_version", message, fix))
        state = self._append(job, lambda found: can_begin(found, now), "claimed", holder=this_process())
        return None if state is None else replace(state.job, data=job.data, priority=job.priority)

    def give_back_lost(self) -> None:
        """Let the jobs of processes that died wait again."""
        running = [state for state in self._states() if state.job.status == "running"]
        now = write_with_retry(WRITTEN, self.output, self._now) if running else 0.0
        for state in running:
            self._after_loss(state, now)

    def cancel(self, names: Iterable[str]) -> None:
        """Take waiting jobs off, and make the processes of running ones stop. Jobs that ended stay as they are."""
        self.give_back_lost()
        for job in self._named(names):
            self._append(
                job, lambda state: state.job.status in ("waiting", "running") and not state.job.cancelled, "cancelled"
            )

    def finish(self, job: QueuedJob, ending: Ending) -> Status | None:
        """Record how a claimed job ended; its status, or None where the claim was lost and nothing is recorded."""
        retries = self.read_note(RETRIES) or 0
        ended = self._append(job, lambda state: holds(state, job), "ended", **asdict(ending), retries=retries)
        return None if ended is None else ended.job.status

    def report_progress(self, job: QueuedJob, progress: Progress) -> None:
        """Write how far a running job is."""
        path = self._progress(job)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        with unless_refused():
            temporary.write_text(json.dumps(finite(asdict(progress))), encoding="utf-8")
            rename_over(temporary, path)

    def sign_of_life(self, job: QueuedJob) -> bool:
        """Show other machines that the process that holds a job is alive; False where the disk refuses, so that they see none."""
        try:
            self._progress(job).touch()  # the time is the disk's, not this machine's
        except OSError as error:
            if refusal(error) is None:
                raise
            return not self._batch.known["notes"].get(SEVERAL_MACHINES)
        return True

    def read_claim(self, job: QueuedJob) -> Claim:
        """Whether the process that claimed a job still holds it, and whether the job was cancelled meanwhile.

        Where the disk refuses now, it is held.
        """
        try:
            state = self._state(job)
        except OSError as error:
            if refusal(error) is None:
                raise
            return "held"
        if not holds(state, job):
            return "lost"
        return "cancelled" if state.job.cancelled else "held"

    def read_jobs(self) -> list[QueuedJob]:
        """All jobs in their order, with their progress."""
        states = self._states()
        now = 0.0
        if any(state.ready is not None for state in states):
            now = write_with_retry(WRITTEN, self.output, self._now)
        return [self._shown(state, now) for state in states]

    def _is_new(self, job: NewJob, *ignored: str) -> bool:
        """Whether a job has no file yet, or one with other content, but for `ignored` keys."""
        try:
            before = read_json(self.folder / job.name / JOB)
        except FileNotFoundError:
            return bool(job.document)
        except (OSError, ValueError):
            return True
        now = json.loads(json.dumps(_whole(job)))
        return any(before.get(key) != now.get(key) for key in before.keys() | now.keys() if key not in ignored)

    def _log(self, job: QueuedJob) -> EventLog[JobState]:
        if job.name not in self._logs:
            begin = JobState(QueuedJob(job.name, job.data))
            self._logs.setdefault(job.name, EventLog(self.folder / job.name, begin, state_after))
        return self._logs[job.name]

    def _change_batch(self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Make the entry of the list that `change` makes of its newest state; none where that changes nothing."""
        token = secrets.token_hex(8)

        def append() -> None:
            while True:
                entries, batch = self._batch.read()
                document = json.loads(json.dumps({"id": token, **change(batch)}))
                is_same = batch_after(batch, Entry(document, 0.0)) == batch
                if is_same or self._batch.append(document, entries) is not None:
                    return

        write_with_retry(WRITTEN, self.output, append)

    def _append(self, job: QueuedJob, may: Callable[[JobState], bool], event: str, **values: Any) -> JobState | None:
        """Make this event the next entry of a job whose state `may` be followed by it; the state then, or None."""
        document = {"id": secrets.token_hex(8), "event": event, **values}

        def append() -> JobState | None:
            while True:
                entries, state = self._log(job).read()
                if self._log(job).newest.get("id") == document["id"]:
                    return state  # it is there, although its making met an error
                if not may(state):
                    return None
                if (entry := self._log(job).append(document, entries)) is not None:
                    return state_after(state, entry)

        return write_with_retry(WRITTEN, self.output, append)

    def _listed(self) -> list[QueuedJob]:
        entries, batch = self._batch.read()
        if entries != self._list[0]:
            found = [QueuedJob(each["name"], Path(each["data"]), priority=each["priority"]) for each in batch["jobs"]]
            self._list = (entries, sorted(found, key=lambda job: -job.priority), found)
        return self._list[2]

    def _named(self, names: Iterable[str]) -> list[QueuedJob]:
        listed = {job.name: job for job in self._listed()}
        return [listed.get(name, QueuedJob(name, Path(name))) for name in names]

    def _states(self) -> list[JobState]:
        return write_with_retry(WRITTEN, self.output, lambda: [self._state(job) for job in self._listed()])

    def _state(self, job: QueuedJob) -> JobState:
        """What the entries of a listed job say; its data and priority are those of the list."""
        state = self._log(job).read()[1]
        return replace(state, job=replace(state.job, data=job.data, priority=job.priority))

    def _after_loss(self, state: JobState, now: float) -> JobState | None:
        """The state of a running job after its claim was found lost; None where its holder lives."""
        alive = state.job.claimed or now
        with suppress(OSError):  # no progress yet
            alive = max(alive, self._progress(state.job).stat().st_mtime)
        if not is_dead(state.holder, now - alive, on_one_machine=not self.read_note(SEVERAL_MACHINES)):
            return None
        same, retries = partial(holds, job=state.job), self.read_note(RETRIES) or 0
        self._append(state.job, same, "lost", alive=alive, retries=retries)
        return write_with_retry(WRITTEN, self.output, partial(self._state, state.job))

    def _progress(self, job: QueuedJob) -> Path:
        return self.folder / job.name / f"progress-{job.attempts:04d}.json"

    def _now(self) -> float:
        """The time by the clock of the disk. Raises OSError."""
        return time_on_disk(self.folder)

    def _shown(self, state: JobState, now: float) -> QueuedJob:
        """A job with its progress."""
        job, attempt = state.job, (state.job.name, state.job.attempts)
        progress = self._last_progress.get(attempt, {})
        if job.attempts and not progress:
            with suppress(OSError, ValueError):  # none yet, or cut off by a power failure
                progress = read_json(self._progress(job))
            if job.status != "running":
                self._last_progress[attempt] = progress
        return replace(
            job,
            phase=progress.get("phase") if job.status == "running" else None,
            retry_in=None if state.ready is None else max(0.0, state.ready - now),
            step=progress.get("step"),
            total=progress.get("total"),
            loss=progress.get("loss"),
            val_loss=progress.get("val_loss"),
        )


def _whole(job: NewJob) -> dict[str, Any]:
    """What `job.json` holds."""
    return {"version": VERSION, "name": job.name, "data": str(job.data), **finite(dict(job.document))}
