"""The jobs of a batch, in both kinds of store: every job once, whichever worker claims it and whichever dies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_trainer.batch import job_store, queue
from lora_trainer.batch.job_files import JobFiles
from lora_trainer.batch.job_store import Ending, JobStore, NewJob, QueuedJob
from lora_trainer.batch.queue import JobQueue
from lora_trainer.core.errors import UsageError
from lora_trainer.run_folder.progress import Progress
from tests.recipes.recipe import patched

NewStore = Callable[..., JobStore]
ELSEWHERE = json.dumps(["elsewhere", 1, 1.0])
NONE = {"dataset": None, "lora": None}


@pytest.fixture(params=["queue", "files"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> NewStore:
    """Makes a store of one kind that holds jobs of these names."""
    kind = {"queue": JobQueue, "files": JobFiles}[request.param]

    def make(*names: str, folder: Path = tmp_path) -> JobStore:
        store = kind(folder)
        store.enlist([NewJob(name, folder / name) for name in names])
        return store

    return make


@contextmanager
def held_by(store: JobStore, holder: str) -> Iterator[None]:
    """Inside the block, claims are those of another process."""
    with patched(sys.modules[type(store).__module__], "this_process", lambda **named: holder):
        yield


def claimed(store: JobStore, name: str | None = None) -> QueuedJob:
    job = store.claim(name)
    assert job is not None
    return job


def dead_holder() -> str:
    """A process of this machine with a number that another one has now."""
    host, number, started = json.loads(job_store.this_process())
    return json.dumps([host, number, started - 1000])


def ended(store: JobStore, name: str, code: int = 0) -> None:
    job = next(job for job in store.read_jobs() if job.name == name)
    assert store.finish(job, Ending(code, None, NONE)) is not None


def statuses(store: JobStore) -> dict[str, str]:
    return {job.name: job.status for job in store.read_jobs()}


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders=st.lists(st.sampled_from(["claim", "claim of another", "end"]), max_size=30), count=st.integers(0, 6))
def test_jobs_are_taken_once_and_in_order(orders, count, new_store, tmp_path_factory):
    names = [f"job {number}" for number in range(count)]
    store = new_store(*names, folder=tmp_path_factory.mktemp("store"))
    taken: list[str] = []
    open_claims: list[str] = []
    for order in orders:
        if order == "end" and open_claims:
            ended(store, open_claims.pop())
        elif order != "end" and (job := store.claim()):
            taken.append(job.name)
            open_claims.append(job.name)
            assert (job.status, job.attempts) == ("running", 1)
    assert taken == names[: len(taken)]
    found = statuses(store)
    assert [name for name in names if found[name] == "waiting"] == names[len(taken) :]


def test_concurrent_claims_never_take_the_same_job(new_store):
    store = new_store(*(f"job {number}" for number in range(40)))
    taken: dict[int, list[str]] = {0: [], 1: [], 2: []}

    def take(who: int) -> None:
        while job := store.claim():
            taken[who].append(job.name)
            ended(store, job.name)

    threads = [threading.Thread(target=take, args=(who,)) for who in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    everything = sorted(name for names in taken.values() for name in names)
    assert everything == sorted(f"job {number}" for number in range(40))


def test_the_claim_of_a_dead_process_is_released(new_store, checkout):
    store = new_store("one", "two")
    program = (
        "import sys, pathlib; from lora_trainer.batch.stores import store_of; "
        "print(store_of(pathlib.Path(sys.argv[1])).claim().name)"
    )
    dead = subprocess.run(
        [sys.executable, "-c", program, str(store.output)],
        capture_output=True,
        text=True,
        cwd=checkout,
        check=True,
        timeout=300,
    )
    assert dead.stdout.strip() == "one"
    assert statuses(store)["one"] == "running"
    job = claimed(store)
    assert (job.name, job.attempts) == ("one", 2)
    assert claimed(store).name == "two", "the claim of a living process stays"


def test_a_claim_with_a_reused_process_id_is_dead(new_store):
    store = new_store("one")
    with held_by(store, dead_holder()):
        claimed(store)
    store.give_back_lost()
    assert statuses(store) == {"one": "waiting"}


def test_a_job_that_kills_every_process_fails(new_store):
    store = new_store("one")
    with held_by(store, dead_holder()):
        for _ in range(job_store.MOST_DEATHS):
            claimed(store)
    assert store.claim() is None
    (job,) = store.read_jobs()
    assert (job.status, job.exit_code, job.attempts) == ("failed", 5, 3)
    assert "died 3 times" in (job.reason or "")
    store.put_back(["one"])
    assert store.claim() is not None


def test_a_silent_machine_is_dead(new_store, monkeypatch):
    store = new_store("one")
    with held_by(store, ELSEWHERE):
        job = claimed(store)
    store.give_back_lost()
    assert statuses(store) == {"one": "running"}
    store.sign_of_life(job)
    monkeypatch.setattr(job_store, "SILENT_SECONDS", -1.0)
    store.give_back_lost()
    assert statuses(store) == {"one": "waiting"}


def test_a_silent_process_that_comes_back_changes_nothing(new_store, monkeypatch):
    """Another one took its job meanwhile, and then ended it."""
    store = new_store("one")
    with held_by(store, ELSEWHERE):
        silent = claimed(store)
    monkeypatch.setattr(job_store, "SILENT_SECONDS", -1.0)
    other = claimed(store)
    assert (store.read_claim(silent), store.read_claim(other)) == ("lost", "held")
    store.report_progress(silent, Progress("training", 900, 1000))
    (job,) = store.read_jobs()
    assert (job.step, job.attempts) == (None, 2)
    assert store.finish(silent, Ending(5, "Out of memory.", NONE)) is None
    assert statuses(store) == {"one": "running"}
    assert store.finish(other, Ending(0, None, {"dataset": 1.0, "lora": 0.9})) == "done"
    assert store.finish(silent, Ending(5, "Out of memory.", NONE)) is None
    (job,) = store.read_jobs()
    assert (job.status, job.exit_code, job.reason, job.scores["lora"]) == ("done", 0, None, 0.9)


def test_cancelled_jobs_are_not_claimed(new_store):
    store = new_store("one", "two", "three", "four")
    running, _ = claimed(store), claimed(store)
    ended(store, "two")
    for _ in range(2):
        store.cancel(["one", "two", "three"])
    assert statuses(store) == {"one": "running", "two": "done", "three": "cancelled", "four": "waiting"}
    assert store.read_claim(running) == "cancelled"
    assert store.finish(running, Ending(143, "stopped by a signal", NONE)) == "cancelled"
    (job, *_) = store.read_jobs()
    assert (job.exit_code, job.reason) == (None, job_store.CANCELLED)
    assert claimed(store).name == "four"
    assert store.claim() is None
    store.put_back(["one", "three"])
    again = claimed(store)
    assert (again.name, again.attempts, store.read_claim(again)) == ("one", 2, "held")


@pytest.mark.parametrize(("code", "status"), [(0, "done"), (4, "refused"), (143, "cancelled")])
def test_a_job_that_ends_before_it_stops_keeps_its_end(code, status, new_store):
    store = new_store("one")
    job = claimed(store)
    store.cancel(["one"])
    assert store.finish(job, Ending(code, None, NONE)) == status


def test_a_cancelled_job_whose_process_died_is_cancelled(new_store, monkeypatch):
    store = new_store("one", "two")
    with held_by(store, ELSEWHERE):
        claimed(store)
    store.cancel(["one"])
    with held_by(store, dead_holder()):
        claimed(store)
    store.cancel(["two"])
    assert statuses(store) == {"one": "running", "two": "cancelled"}
    monkeypatch.setattr(job_store, "SILENT_SECONDS", -1.0)
    store.give_back_lost()
    assert statuses(store) == {"one": "cancelled", "two": "cancelled"}


def test_adding_jobs_again_keeps_their_status(new_store, tmp_path):
    store = new_store("a", "b", "c")
    assert store.claim() is not None
    ended(store, "a", 3)
    store.enlist([NewJob("c", tmp_path / "c"), NewJob("new", tmp_path / "new"), NewJob("a", tmp_path / "moved")])
    found = store.read_jobs()
    assert [job.name for job in found] == ["c", "new", "a"], "b waited and is not named any more"
    assert (found[2].status, found[2].exit_code, found[2].data) == ("refused", 3, tmp_path / "moved")
    store.put_back(["a"])
    assert set(statuses(store).values()) == {"waiting"}


def test_a_file_that_is_no_queue_is_refused(tmp_path):
    path = tmp_path / queue.FILE
    path.write_text("hello " * 100, encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be used"):
        JobQueue(tmp_path)
    path.unlink()
    JobQueue(tmp_path).write_note("version", 7)
    with pytest.raises(UsageError, match="version 7"):
        JobQueue(tmp_path)


def test_notes_are_kept(new_store):
    store = new_store()
    assert store.read_note("root") is None
    store.write_note("root", {"a": [1, "ü"]})
    assert store.read_note("root") == {"a": [1, "ü"]}


def test_higher_priorities_begin_first(new_store, tmp_path):
    store = new_store()
    store.enlist(
        [NewJob(name, tmp_path / name, priority) for name, priority in (("a", 0), ("b", -1), ("c", 5), ("d", 5))]
    )
    assert [claimed(store).name for _ in range(4)] == ["c", "d", "a", "b"]
    assert [job.name for job in store.read_jobs()] == ["a", "b", "c", "d"], "they are shown in their order"


def test_a_failed_training_is_repeated_after_a_pause(new_store, monkeypatch):
    store = new_store("one", "two")
    store.write_note(job_store.RETRIES, 2)
    out_of_memory = Ending(5, "Out of memory.", NONE)
    assert store.finish(claimed(store), out_of_memory) == "waiting"
    assert store.finish(claimed(store), Ending(1, "a bug", NONE)) == "failed", "which would be the same again"
    assert store.claim() is None, "the pause is not over"
    one, two = store.read_jobs()
    assert (one.status, one.exit_code, one.reason, two.retry_in) == ("waiting", 5, "Out of memory.", None)
    assert one.retry_in is not None
    assert 50 < one.retry_in <= 60
    monkeypatch.setattr(job_store, "FIRST_RETRY", 0.0)
    store.put_back(["one"])
    assert store.read_jobs()[0].retry_in is None
    endings = [store.finish(claimed(store, "one"), out_of_memory) for _ in range(3)]
    assert endings == ["waiting", "waiting", "failed"]
    assert store.read_jobs()[0].attempts == 4


def test_pauses_double_up_to_an_hour():
    assert [job_store.retry_wait(failures) for failures in (1, 2, 3, 6, 7, 100)] == [60, 120, 240, 1920, 3600, 3600]


def test_a_death_is_a_failure_to_be_repeated(new_store):
    store = new_store("one")
    store.write_note(job_store.RETRIES, 1)
    with held_by(store, dead_holder()):
        claimed(store)
    store.give_back_lost()
    (job,) = store.read_jobs()
    assert job.status == "waiting"
    assert job.retry_in is not None
    assert store.claim() is None


def test_a_cancelled_job_is_not_repeated(new_store):
    store = new_store("one")
    store.write_note(job_store.RETRIES, 1)
    job = claimed(store)
    store.cancel(["one"])
    assert store.finish(job, Ending(5, "Out of memory.", NONE)) == "cancelled"
