"""One process at work on a batch: claim a job, run it as `produce` does, record its end."""

from __future__ import annotations

import contextlib
import io
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from lora_trainer.core.errors import DatasetRefused, UserError
from lora_trainer.core.interrupt import remembering, signalled, stop_if_signalled, stoppable, stopping_on_signal
from lora_trainer.core.io import append_text
from lora_trainer.jobs.background import repeating
from lora_trainer.jobs.folders import shared_from_json
from lora_trainer.jobs.job_document import refuse_changed, settings_of
from lora_trainer.jobs.job_state import SHARED, SILENT_SECONDS, TOGETHER, Ending, QueuedJob
from lora_trainer.jobs.joint_jobs import claim_others
from lora_trainer.jobs.summary import write_summary
from lora_trainer.monitor.console import Console
from lora_trainer.run.folder import leave_as_found
from lora_trainer.run.order import make_order
from lora_trainer.run.train import ended_by, train
from lora_trainer.run_folder.record import RECORD, Record

if TYPE_CHECKING:  # it loads torch
    from lora_trainer.jobs.job_store import JobStore
    from lora_trainer.models.family import Family
    from lora_trainer.run_folder.progress import Progress, Watch
    from lora_trainer.training.run_group import Member

SAFE = "What each run saved is safe."
LOG = Path("logs") / "console.txt"
SAY_EVERY_SECONDS = 1.0
BEAT_SECONDS = 20.0
LOOK_SECONDS = 2.0  # between two looks at the claim of the job that runs


def work(
    store: JobStore,
    families: Mapping[str, Family],
    *,
    hand_back: bool = False,
    name: str | None = None,
) -> int | None:
    """Run waiting jobs until none is left, one after the other or several on one base; the exit code of a signal that stopped this.

    With `hand_back` a job that a signal stopped waits again: another worker resumes it. With `name` only that job is run,
    once, alone. A failed job that is repeated later is waited for.
    """
    together = 1 if name is not None else store.read_note(TOGETHER) or 1
    while (job := claim_next(store, name)) is not None:
        jobs = [job, *claim_others(store, job, together - 1)]
        write_summary(store)  # an autoscaler that reads it must not start a worker for these jobs, too
        stopped = list[int]()

        def run(job: QueuedJob, stop: Callable[[], None], member: Member | None, stopped: list[int]) -> None:
            with keeping(store, job, stop) as claim:  # encoding and drawing are silent for long
                ending = attempt(store, job, families, member)
            status = store.finish(job, ending)
            if status == "stopped" and (hand_back or claim.is_over):
                store.put_back([job.name])
            write_summary(store)
            if ending.status == "stopped" and not claim.is_over:
                stopped.append(ending.exit_code)

        if len(jobs) == 1:
            with stoppable() as stop:
                run(job, stop, None, stopped)
        else:
            run_together({each.name: partial(run, each, stopped=stopped) for each in jobs})
        if stopped:
            return stopped[0]
        stop_if_signalled()  # a signal that came when a job was as good as done
        if name is not None:
            return None
    return None


def claim_next(store: JobStore, name: str | None) -> QueuedJob | None:
    """Claim a job, or that of this name; where all that wait failed before, when the first may be repeated."""
    while (job := store.claim(name)) is None:
        pauses = [
            each.retry_in for each in store.read_jobs() if name in (None, each.name) and each.retry_in is not None
        ]
        if not pauses:
            return None
        time.sleep(min(*pauses, LOOK_SECONDS))
    return job


def run_together(runs: Mapping[str, Callable[[Callable[[], None], Member], None]]) -> None:
    """Do these runs on one base; each is called with what stops it and with what it is in their group."""
    from lora_trainer.training.run_group import RunGroup

    def work(run: Callable[[Callable[[], None], Member], None], member: Member) -> None:
        run(partial(member.interrupt.remember, signal.SIGTERM), member)

    with remembering():
        RunGroup(len(runs)).run({name: partial(work, run) for name, run in runs.items()})


def attempt(
    store: JobStore,
    job: QueuedJob,
    families: Mapping[str, Family],
    member: Member | None = None,
) -> Ending:
    """Train one folder with both gates, alone or as a member of a group. No error leaves this function."""
    folder = store.output / job.name
    with RunLog(folder) as log:
        console = Console(file=cast("IO[str]", log), highlight=False, markup=False, emoji=False, soft_wrap=True)
        try:
            with stopping_on_signal():
                refuse_changed(store, job.name)
                resumes = shared_from_json(store.read_note(SHARED)).resume or job.attempts > 1
                order = make_order(
                    settings_of(store, job),
                    resume=resumes,
                    enforce_gates=True,
                    console=console,
                    watch=telling(store, job),
                )
                result = train(replace(order, families=families, member=member))
            record = result.record or Record(job.name)
            return Ending(result.exit_code, record.reason, record.scores, record.outcome)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001  the other jobs must continue
            ended = ended_by(error, Record(job.name))
            log.write(last_words(error))
            record = Record.read(folder) or Record(job.name)
            if isinstance(error, DatasetRefused) and error.report is not None:
                record = Record(job.name, scores={"dataset": round(error.report.score, 4), "lora": None})
            return Ending(ended.exit_code or 0, ended.reason, record.scores, record.outcome)


@dataclass
class KeptClaim:
    """`is_over`: the job was cancelled, another process took it or may do so, and so it was stopped here."""

    is_over: bool = False


@contextlib.contextmanager
def keeping(store: JobStore, job: QueuedJob, stop: Callable[[], None]) -> Iterator[KeptClaim]:
    """Give signs of life for a job while the block runs, and stop it where it is not this process's any more."""
    kept, tried, seen = KeptClaim(), time.monotonic(), time.monotonic()

    def look() -> None:
        nonlocal tried, seen
        is_lost, now = store.read_claim(job) != "held" and not signalled(), time.monotonic()
        if now - tried >= BEAT_SECONDS:
            tried = now
            if store.sign_of_life(job):
                seen = now
            is_lost = is_lost or now - seen > SILENT_SECONDS  # others may take it
        if is_lost and not kept.is_over:
            kept.is_over = True
            stop()

    with repeating(look, LOOK_SECONDS):
        yield kept


def last_words(error: BaseException) -> str:
    """What a job's log says of the error that ended it; a traceback for nothing but bugs."""
    if isinstance(error, UserError):
        return f"error: {error}\n"
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped by a signal; to continue: lora-trainer batch … --resume\n"
    return traceback.format_exc()


def telling(store: JobStore, job: QueuedJob) -> Watch:
    """A watcher that writes how far the job is: at each new phase, and about once a second."""
    last: tuple[str, float] = ("", 0.0)

    def watch(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if progress.phase != last[0] or now - last[1] >= SAY_EVERY_SECONDS or progress.step == progress.total:
            last = (progress.phase, now)
            store.report_progress(job, progress)

    return watch


class RunLog(io.TextIOBase):
    """What a run says, in its own folder, from the moment when that folder holds a run.

    Until then it is kept in memory: a folder with files that is no run would be refused, and a
    refused dataset leaves no folder. Likewise while the disk refuses: no job waits for its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._waiting, self._begun = folder, "", False

    def write(self, text: str, /) -> int:
        self._waiting += text
        if text.endswith("\n"):
            self._put()
        return len(text)

    def _put(self) -> None:
        """Write what waits, all or nothing."""
        if not self._waiting or not (self._begun or (self._folder / RECORD).is_file()):
            return
        path = self._folder / LOG
        with contextlib.suppress(OSError):  # said where the run says it; tried again with the next line
            path.parent.mkdir(exist_ok=True)
            append_text(path, self._waiting)
            self._waiting, self._begun = "", True

    def close(self) -> None:
        if not self.closed:
            self._put()
            if self._begun and not (self._folder / RECORD).is_file():  # taken back by a wrong setting: leave nothing
                (self._folder / LOG).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    (self._folder / LOG.parent).rmdir()
                leave_as_found(self._folder, None)
        super().close()
