"""The jobs of a batch on a disk that machines share: what no lock and no clock of a machine has a part in."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.core.errors import UsageError
from lora_trainer.core.version import __version__
from lora_trainer.jobs import job_state, job_store, worker
from lora_trainer.jobs.job_state import SEVERAL_MACHINES, Ending, NewJob
from lora_trainer.jobs.job_store import JobStore
from lora_trainer.run_folder.progress import Progress
from tests.jobs.childs_work import claim_and_hang, take_all
from tests.recipes.recipe import contents

ELSEWHERE = json.dumps(["elsewhere", 1, 1.0, "another start"])
DONE = Ending(0, None, {"dataset": 1.0, "lora": 1.0})


def new_job(name: str, **config: object) -> NewJob:
    return NewJob(name, Path("/data", name), document={"config": config, "program": __version__})


def new_batch(output: Path, *names: str) -> JobStore:
    store = JobStore(output)
    store.enlist([new_job(name) for name in names], {SEVERAL_MACHINES: True})
    return store


def start(work: Callable[..., None], *arguments: str) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    return process


def take_with_processes(output: Path, count: int, jobs: int, links: str) -> None:
    """Several processes empty one store: each job once."""
    names = [f"job {number:03d}" for number in range(jobs)]
    store = new_batch(output / "batch", *names)
    lists = [output / f"taken {number}" for number in range(count)]
    processes = [start(take_all, str(output / "batch"), str(taken), links) for taken in lists]
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    taken = sorted(line for path in lists for line in path.read_text("utf-8").splitlines())
    assert taken == [f"{name} 1" for name in names]
    assert {job.status for job in store.read_jobs()} == {"done"}


@pytest.mark.parametrize("links", ["links", "no links"])
def test_processes_never_take_the_same_job(tmp_path: Path, links: str) -> None:
    take_with_processes(tmp_path, 2, 25, links)


@pytest.mark.slow
@pytest.mark.parametrize("links", ["links", "no links"])
def test_many_processes_never_take_the_same_of_many_jobs(tmp_path: Path, links: str) -> None:
    take_with_processes(tmp_path, 6, 200, links)


@pytest.mark.parametrize("links", ["links", "no links"])
def test_nothing_is_lost_whenever_processes_are_killed(tmp_path: Path, links: str) -> None:
    """Each is killed while it claims and ends jobs, and another one continues."""
    names, taken = [f"job {number:02d}" for number in range(20)], tmp_path / "taken"
    store = new_batch(tmp_path / "batch", *names)
    for killed in range(5):
        taken.write_text("", encoding="utf-8")
        process = start(take_all, str(tmp_path / "batch"), str(taken), links)
        # Not before it has ended the job that the one before it lost: three deaths would be too many.
        while process.is_alive() and len(taken.read_text("utf-8").splitlines()) < 2 + killed % 2:
            time.sleep(0.001)
        process.kill()
        process.join()
    last = start(take_all, str(tmp_path / "batch"), str(taken), links)
    last.join(300)
    assert last.exitcode == 0
    assert {job.status for job in store.read_jobs()} == {"done"}
    for name in names:
        events = [event_of(path) for path in sorted((tmp_path / "batch" / "jobs" / name).glob("[0-9]*.json"))]
        assert events == ["claimed", "lost"] * (len(events) // 2 - 1) + ["claimed", "ended"]


def event_of(entry: Path) -> str:
    """What an entry says, which is a file, or a folder with it."""
    path = entry / job_store.ENTRY if entry.is_dir() else entry
    return str(json.loads(path.read_text("utf-8"))["event"])


def test_the_job_of_a_killed_process_is_claimed_by_another(tmp_path: Path) -> None:
    store = new_batch(tmp_path, "one")
    process = start(claim_and_hang, str(tmp_path))
    while store.read_jobs()[0].status != "running":
        time.sleep(0.02)
    assert store.claim() is None, "it lives"
    process.kill()
    process.join()
    job = store.claim()
    assert job is not None
    assert job.attempts == 2


def test_the_age_of_a_claim_is_measured_by_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine's clock is a day ahead, and nothing changes; silence on the disk does."""
    store = new_batch(tmp_path, "one")
    monkeypatch.setattr(job_store, "this_process", lambda: ELSEWHERE)
    job = store.claim()
    assert job is not None
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + 86400)
    store.give_back_lost()
    assert store.read_claim(job) == "held"
    store.report_progress(job, Progress("training", 3, 9, 0.5))
    for silence, claim in ((job_state.SILENT_SECONDS - 20, "held"), (job_state.SILENT_SECONDS + 5, "lost")):
        then = true() - silence
        os.utime(tmp_path / "jobs" / "one" / "0001.json", (then, then))
        os.utime(tmp_path / "jobs" / "one" / "progress-0001.json", (then, then))
        seen_again = JobStore(tmp_path)
        seen_again.give_back_lost()
        assert seen_again.read_claim(job) == claim
    assert JobStore(tmp_path).read_jobs()[0].status == "waiting"


def test_a_machine_with_the_same_name_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may share a host's name: the number of a process says nothing then."""
    store = new_batch(tmp_path, "one")
    host, *_ = json.loads(job_state.this_process())
    monkeypatch.setattr(job_store, "this_process", lambda: json.dumps([host, 1, 1.0, "another start"]))
    job = store.claim()
    assert job is not None
    store.give_back_lost()
    assert store.read_claim(job) == "held"


def test_submitting_the_same_again_changes_nothing(tmp_path: Path) -> None:
    store = new_batch(tmp_path, "one", "two")
    store.write_note("root", "a")
    before = contents(tmp_path)
    JobStore(tmp_path).enlist([new_job("one"), new_job("two")])
    store.write_note("root", "a")
    assert contents(tmp_path) == before


def test_a_job_is_replaced_until_it_runs(tmp_path: Path) -> None:
    store = new_batch(tmp_path, "one", "two", "three")
    store.enlist([new_job("one", rank=8), new_job("two"), new_job("three")])
    assert store.read_document("one")["config"] == {"rank": 8}
    first, second = store.claim(), store.claim()
    assert first is not None
    assert second is not None
    store.finish(second, DONE)
    before = contents(tmp_path)
    changed = [new_job("one", rank=16), new_job("two", rank=16), new_job("three", rank=16)]
    with pytest.raises(UsageError, match="one runs now, with other settings"):
        store.enlist(changed)
    assert contents(tmp_path) == before, "nothing is half submitted"
    store.finish(first, Ending(143, "stopped by a signal", {}))
    store.enlist(changed)
    assert [store.read_document(name)["config"] for name in ("one", "two", "three")] == [{"rank": 16}] * 3
    assert [job.status for job in store.read_jobs()] == ["stopped", "done", "waiting"]


def test_images_that_are_added_while_a_job_runs_change_it_later(tmp_path: Path) -> None:
    """Who fills the store again and again, such as a CronJob, is not stopped by them."""
    store = JobStore(tmp_path)
    one, more = (NewJob("one", tmp_path, document={"data_hash": each}) for each in ("a", "b"))
    store.enlist([one])
    job = store.claim()
    assert job is not None
    store.enlist([more, new_job("two")])
    assert store.read_document("one")["data_hash"] == "a"
    store.finish(job, Ending(143, "stopped by a signal", {}))
    store.enlist([more, new_job("two")])
    assert store.read_document("one")["data_hash"] == "b"


def test_a_job_for_another_version_of_the_program_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_batch(tmp_path, "one")
    with monkeypatch.context() as patch:
        patch.setattr(job_store, "__version__", "99.1")
        with pytest.raises(UsageError, match=r"Install that here: pip install lora-trainer=="):
            store.claim()
    assert store.claim() is not None


def test_a_lost_answer_of_the_disk_is_no_second_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk makes the link, its answer is lost, and asking again finds the name taken: by this process."""
    store = new_batch(tmp_path, "one")
    true = os.link

    def link(*arguments: Any) -> None:
        true(*arguments)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", link)
    job = store.claim()
    assert job is not None
    assert store.read_claim(job) == "held"


def test_a_job_whose_file_is_missing_is_named(tmp_path: Path) -> None:
    store = new_batch(tmp_path, "one")
    (tmp_path / "jobs" / "one" / "job.json").unlink()
    with pytest.raises(UsageError, match=r"job\.json cannot be read"):
        store.claim()


def test_jobs_keep_their_progress_when_they_end(tmp_path: Path) -> None:
    store = new_batch(tmp_path, "one")
    job = store.claim()
    assert job is not None
    assert job.claimed is not None
    store.report_progress(job, Progress("training", 4, 9, 0.25, val_loss=0.5))
    (shown,) = store.read_jobs()
    assert (shown.phase, shown.step, shown.total, shown.loss, shown.val_loss) == ("training", 4, 9, 0.25, 0.5)
    store.finish(job, DONE)
    for seen in (store, JobStore(tmp_path)):
        (shown,) = seen.read_jobs()
        assert (shown.phase, shown.step, shown.status, shown.scores) == (None, 4, "done", DONE.scores)
        assert replace(shown, seconds=0.0, step=None, total=None, loss=None, val_loss=None) == replace(
            job, status="done", exit_code=0, claimed=None, scores=DONE.scores
        )


@pytest.mark.parametrize("several", [True, False])
def test_a_holder_that_the_disk_does_not_hear_stops_where_others_may_take_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """What it would still write is theirs then. On one machine its number is sign enough."""
    store = new_batch(tmp_path, "one")
    store.write_note(SEVERAL_MACHINES, several)
    job = store.claim()
    assert job is not None
    refused = threading.Event()

    def refuse(*_: object) -> None:
        refused.set()
        raise OSError(errno.EIO, "Input/output error")

    for name in ("LOOK_SECONDS", "BEAT_SECONDS"):
        monkeypatch.setattr(worker, name, 0.01)
    stopped = threading.Event()
    with worker.keeping(store, job, stopped.set) as kept:
        assert not stopped.wait(0.3)
        monkeypatch.setattr(Path, "touch", refuse)
        monkeypatch.setattr(worker, "SILENT_SECONDS", 0.0)
        assert refused.wait(300)
        refused.clear()
        assert refused.wait(300), "it was asked again"
        assert stopped.wait(300 if several else 0) == several
    assert kept.is_over == several
