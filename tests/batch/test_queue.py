"""The queue of a batch: every job once, whichever worker claims it and whichever dies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.batch import queue
from lora_trainer.core.errors import UsageError
from lora_trainer.monitor.progress import Progress

NONE = {"dataset": None, "lora": None}


def new_queue(folder: Path, *names: str) -> Path:
    path = folder / queue.FILE
    queue.open_queue(path)
    queue.enlist(path, {name: folder / name for name in names})
    return path


def ended(path: Path, name: str, code: int = 0) -> None:
    job = next(job for job in queue.read_jobs(path) if job.name == name)
    assert queue.finish(path, job, queue.Ending(code, None, NONE)) is not None


def statuses(path: Path) -> dict[str, str]:
    return {job.name: job.status for job in queue.read_jobs(path)}


@settings(max_examples=20)
@given(orders=st.lists(st.sampled_from(["claim", "claim of another", "end"]), max_size=30), count=st.integers(0, 6))
def test_jobs_are_taken_once_and_in_order(orders, count, tmp_path_factory):
    names = [f"job {number}" for number in range(count)]
    path = new_queue(tmp_path_factory.mktemp("queue"), *names)
    taken: list[str] = []
    open_claims: list[str] = []
    for order in orders:
        if order == "end" and open_claims:
            ended(path, open_claims.pop())
        elif order != "end" and (job := queue.claim(path)):
            taken.append(job.name)
            open_claims.append(job.name)
            assert (job.status, job.attempts) == ("running", 1)
    assert taken == names[: len(taken)]
    found = statuses(path)
    assert [name for name in names if found[name] == "waiting"] == names[len(taken) :]


def test_concurrent_claims_never_take_the_same_job(tmp_path):
    path = new_queue(tmp_path, *(f"job {number}" for number in range(40)))
    taken: dict[int, list[str]] = {0: [], 1: [], 2: []}

    def take(who: int) -> None:
        while job := queue.claim(path):
            taken[who].append(job.name)
            ended(path, job.name)

    threads = [threading.Thread(target=take, args=(who,)) for who in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    everything = sorted(name for names in taken.values() for name in names)
    assert everything == sorted(f"job {number}" for number in range(40))


def test_the_claim_of_a_dead_process_is_released(tmp_path, checkout):
    path = new_queue(tmp_path, "one", "two")
    program = (
        "import sys, pathlib; from lora_trainer.batch import queue; print(queue.claim(pathlib.Path(sys.argv[1])).name)"
    )
    dead = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        cwd=checkout,
        check=True,
        timeout=300,
    )
    assert dead.stdout.strip() == "one"
    assert statuses(path)["one"] == "running"
    job = queue.claim(path)
    assert job is not None
    assert (job.name, job.attempts) == ("one", 2)
    again = queue.claim(path)
    assert again is not None
    assert again.name == "two", "the claim of a living process stays"


def test_a_claim_with_a_reused_process_id_is_dead(tmp_path):
    path = new_queue(tmp_path, "one")
    host, number, started = json.loads(queue.this_process())
    assert queue.claim(path, json.dumps([host, number, started - 1000])) is not None
    queue.give_back_lost(path)
    assert statuses(path) == {"one": "waiting"}


def test_a_job_that_kills_every_process_fails(tmp_path):
    path = new_queue(tmp_path, "one")
    host, number, started = json.loads(queue.this_process())
    for _ in range(queue.MOST_DEATHS):
        assert queue.claim(path, json.dumps([host, number, started - 1000])) is not None
    assert queue.claim(path) is None
    (job,) = queue.read_jobs(path)
    assert (job.status, job.exit_code, job.attempts) == ("failed", 5, 3)
    assert "died 3 times" in (job.reason or "")
    queue.put_back(path, ["one"])
    assert queue.claim(path) is not None


def test_a_silent_machine_is_dead(tmp_path, monkeypatch):
    path = new_queue(tmp_path, "one")
    job = queue.claim(path, json.dumps(["elsewhere", 1, 1.0]))
    assert job is not None
    queue.give_back_lost(path)
    assert statuses(path) == {"one": "running"}
    queue.sign_of_life(path, job)
    monkeypatch.setattr(queue, "SILENT_SECONDS", -1.0)
    queue.give_back_lost(path)
    assert statuses(path) == {"one": "waiting"}


def test_a_silent_process_that_comes_back_changes_nothing(tmp_path, monkeypatch):
    """Another one took its job meanwhile, and then ended it."""
    path = new_queue(tmp_path, "one")
    silent = queue.claim(path, json.dumps(["elsewhere", 1, 1.0]))
    assert silent is not None
    monkeypatch.setattr(queue, "SILENT_SECONDS", -1.0)
    other = queue.claim(path)
    assert other is not None
    assert (queue.read_claim(path, silent), queue.read_claim(path, other)) == ("lost", "held")
    queue.report_progress(path, silent, Progress("training", 900, 1000))
    (job,) = queue.read_jobs(path)
    assert (job.step, job.attempts) == (None, 2)
    assert queue.finish(path, silent, queue.Ending(5, "Out of memory.", NONE)) is None
    assert statuses(path) == {"one": "running"}
    assert queue.finish(path, other, queue.Ending(0, None, {"dataset": 1.0, "lora": 0.9})) == "done"
    assert queue.finish(path, silent, queue.Ending(5, "Out of memory.", NONE)) is None
    (job,) = queue.read_jobs(path)
    assert (job.status, job.exit_code, job.reason, job.scores["lora"]) == ("done", 0, None, 0.9)


def test_cancelled_jobs_are_not_claimed(tmp_path):
    path = new_queue(tmp_path, "one", "two", "three", "four")
    running, ended_first = queue.claim(path), queue.claim(path)
    assert running is not None
    assert ended_first is not None
    ended(path, "two")
    for _ in range(2):
        queue.cancel(path, ["one", "two", "three"])
    assert statuses(path) == {"one": "running", "two": "done", "three": "cancelled", "four": "waiting"}
    assert queue.read_claim(path, running) == "cancelled"
    assert queue.finish(path, running, queue.Ending(143, "stopped by a signal", NONE)) == "cancelled"
    (job, *_) = queue.read_jobs(path)
    assert (job.exit_code, job.reason) == (None, queue.CANCELLED)
    last = queue.claim(path)
    assert last is not None
    assert last.name == "four"
    assert queue.claim(path) is None
    queue.put_back(path, ["one", "three"])
    again = queue.claim(path)
    assert again is not None
    assert (again.name, again.attempts, queue.read_claim(path, again)) == ("one", 2, "held")


@pytest.mark.parametrize(("code", "status"), [(0, "done"), (4, "refused"), (143, "cancelled")])
def test_a_job_that_ends_before_it_stops_keeps_its_end(code, status, tmp_path):
    path = new_queue(tmp_path, "one")
    job = queue.claim(path)
    assert job is not None
    queue.cancel(path, ["one"])
    assert queue.finish(path, job, queue.Ending(code, None, NONE)) == status


def test_a_cancelled_job_whose_process_died_is_cancelled(tmp_path, monkeypatch):
    path = new_queue(tmp_path, "one", "two")
    host, number, started = json.loads(queue.this_process())
    assert queue.claim(path, json.dumps(["elsewhere", 1, 1.0])) is not None
    queue.cancel(path, ["one"])
    assert queue.claim(path, json.dumps([host, number, started - 1000])) is not None
    queue.cancel(path, ["two"])
    assert statuses(path) == {"one": "running", "two": "cancelled"}
    monkeypatch.setattr(queue, "SILENT_SECONDS", -1.0)
    queue.give_back_lost(path)
    assert statuses(path) == {"one": "cancelled", "two": "cancelled"}


def test_adding_jobs_again_keeps_their_status(tmp_path):
    path = new_queue(tmp_path, "a", "b", "c")
    assert queue.claim(path) is not None
    ended(path, "a", 3)
    queue.enlist(path, {"c": tmp_path / "c", "new": tmp_path / "new", "a": tmp_path / "moved"})
    found = queue.read_jobs(path)
    assert [job.name for job in found] == ["c", "new", "a"], "b waited and is not named any more"
    assert (found[2].status, found[2].exit_code, found[2].data) == ("refused", 3, tmp_path / "moved")
    queue.put_back(path, ["a"])
    assert set(statuses(path).values()) == {"waiting"}


def test_a_file_that_is_no_queue_is_refused(tmp_path):
    path = tmp_path / queue.FILE
    path.write_text("hello " * 100, encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be used"):
        queue.open_queue(path)
    path.unlink()
    queue.open_queue(path)
    queue.write_note(path, "version", 7)
    with pytest.raises(UsageError, match="version 7"):
        queue.open_queue(path)


def test_notes_are_kept(tmp_path):
    path = new_queue(tmp_path)
    assert queue.read_note(path, "root") is None
    queue.write_note(path, "root", {"a": [1, "ü"]})
    assert queue.read_note(path, "root") == {"a": [1, "ü"]}
