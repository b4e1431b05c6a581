"""The jobs of a batch: every job once, whichever worker claims it and whichever dies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_trainer.core.errors import UsageError
from lora_trainer.jobs import job_state, job_store
from lora_trainer.jobs.job_state import Ending, NewJob, QueuedJob
from lora_trainer.jobs.job_store import JobStore
from lora_trainer.run_folder.progress import Progress
from tests.recipes.recipe import patched

NewStore = Callable[..., JobStore]
ELSEWHERE = json.dumps(["elsewhere", 1, 1.0, "another start"])
NONE = {"dataset": None, "lora": None}


@pytest.fixture
def new_store(tmp_path: Path) -> NewStore:
    """Makes a store that holds jobs of these names."""

    def make(*names: str, folder: Path = tmp_path) -> JobStore:
        store = JobStore(folder)
        store.enlist([NewJob(name, folder / name) for name in names])
        return store

    return make


@contextmanager
def held_by(holder: str) -> Iterator[None]:
    """Inside the block, claims are those of another process."""
    with patched(job_store, "this_process", lambda: holder):
        yield


def claimed(store: JobStore, name: str | None = None) -> QueuedJob:
    job = store.claim(name)
    assert job is not None
    return job


def dead_holder() -> str:
    """A process of this machine with a number that another one has now."""
    host, number, started, machine = json.loads(job_state.this_process())
    return json.dumps([host, number, started - 1000, machine])


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


def test_a_claim_with_a_reused_process_id_is_dead(new_store):
    store = new_store("one")
    with held_by(dead_holder()):
        claimed(store)
    store.give_back_lost()
    assert statuses(store) == {"one": "waiting"}


def test_the_claims_of_a_machine_end_when_it_restarts(new_store):
    """Nobody has to wait after a power cut, where no other machine takes jobs."""
    store = new_store("one")
    host, *_ = json.loads(job_state.this_process())
    with held_by(json.dumps([host, 1, 1.0, "before the restart"])):
        claimed(store)
    assert claimed(store).attempts == 2


def test_a_job_that_kills_every_process_fails(new_store):
    store = new_store("one")
    with held_by(dead_holder()):
        for _ in range(job_state.MOST_DEATHS):
            claimed(store)
    assert store.claim() is None
    (job,) = store.read_jobs()
    assert (job.status, job.exit_code, job.attempts) == ("failed", 5, 3)
    assert "died 3 times" in (job.reason or "")
    store.put_back(["one"])
    assert store.claim() is not None


def test_a_silent_machine_is_dead(new_store, monkeypatch):
    store = new_store("one")
    with held_by(ELSEWHERE):
        job = claimed(store)
    store.give_back_lost()
    assert statuses(store) == {"one": "running"}
    store.sign_of_life(job)
    monkeypatch.setattr(job_state, "SILENT_SECONDS", -1.0)
    store.give_back_lost()
    assert statuses(store) == {"one": "waiting"}


def test_a_silent_process_that_comes_back_changes_nothing(new_store, monkeypatch):
    """Another one took its job meanwhile, and then ended it."""
    store = new_store("one")
    with held_by(ELSEWHERE):
        silent = claimed(store)
    monkeypatch.setattr(job_state, "SILENT_SECONDS", -1.0)
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
    assert (job.exit_code, job.reason) == (None, job_state.CANCELLED)
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
    with held_by(ELSEWHERE):
        claimed(store)
    store.cancel(["one"])
    with held_by(dead_holder()):
        claimed(store)
    store.cancel(["two"])
    assert statuses(store) == {"one": "running", "two": "cancelled"}
    monkeypatch.setattr(job_state, "SILENT_SECONDS", -1.0)
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


def test_a_batch_of_another_version_and_a_run_of_that_name_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(job_store, "VERSION", 7)
        JobStore(tmp_path / "night")
    with pytest.raises(UsageError, match="version 7"):
        JobStore(tmp_path / "night")
    (tmp_path / "runs" / "jobs").mkdir(parents=True)
    (tmp_path / "runs" / "jobs" / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="is the folder of a run"):
        JobStore(tmp_path / "runs")


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


def test_the_list_grows_with_the_jobs_that_are_added_and_not_with_all(new_store, tmp_path):
    """A page adds them one by one."""
    store = new_store()
    for number in range(60):
        store.enlist([NewJob(f"job {number}", tmp_path)], {"number": number}, keep_others=True)
    assert list(statuses(JobStore(tmp_path))) == [f"job {number}" for number in range(60)]
    assert JobStore(tmp_path).read_note("number") == 59
    sizes = [path.stat().st_size for path in (tmp_path / "jobs" / ".batch").glob("[0-9]*.json")]
    assert max(sizes) < 1000


def test_more_jobs_are_behind_those_that_wait_and_may_overtake_them(new_store, tmp_path):
    store = new_store("a", "b")
    store.enlist([NewJob("c", tmp_path / "c", document={"own": 1})], {"together": 2}, keep_others=True)
    assert (list(statuses(store)), store.read_note("together")) == (["a", "b", "c"], 2)
    assert store.read_document("c")["own"] == 1
    assert store.read_document("a") == {}
    store.set_priority("c", 3)
    assert [claimed(store).name for _ in range(3)] == ["c", "a", "b"]


def test_a_failed_training_is_repeated_after_a_pause(new_store, monkeypatch):
    store = new_store("one", "two")
    store.write_note(job_state.RETRIES, 2)
    out_of_memory = Ending(5, "Out of memory.", NONE)
    assert store.finish(claimed(store), out_of_memory) == "waiting"
    assert store.finish(claimed(store), Ending(1, "a bug", NONE)) == "failed", "which would be the same again"
    assert store.claim() is None, "the pause is not over"
    one, two = store.read_jobs()
    assert (one.status, one.exit_code, one.reason, two.retry_in) == ("waiting", 5, "Out of memory.", None)
    assert one.retry_in is not None
    assert 50 < one.retry_in <= 60
    monkeypatch.setattr(job_state, "FIRST_RETRY", 0.0)
    store.put_back(["one"])
    assert store.read_jobs()[0].retry_in is None
    endings = [store.finish(claimed(store, "one"), out_of_memory) for _ in range(3)]
    assert endings == ["waiting", "waiting", "failed"]
    assert store.read_jobs()[0].attempts == 4


def test_pauses_double_up_to_an_hour():
    assert [job_state.retry_wait(failures) for failures in (1, 2, 3, 6, 7, 100)] == [60, 120, 240, 1920, 3600, 3600]


def test_a_death_is_a_failure_to_be_repeated(new_store):
    store = new_store("one")
    store.write_note(job_state.RETRIES, 1)
    with held_by(dead_holder()):
        claimed(store)
    store.give_back_lost()
    (job,) = store.read_jobs()
    assert job.status == "waiting"
    assert job.retry_in is not None
    assert store.claim() is None


def test_a_cancelled_job_is_not_repeated(new_store):
    store = new_store("one")
    store.write_note(job_state.RETRIES, 1)
    job = claimed(store)
    store.cancel(["one"])
    assert store.finish(job, Ending(5, "Out of memory.", NONE)) == "cancelled"
