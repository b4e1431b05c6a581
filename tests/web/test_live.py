"""`/api/live`: only what changed is read and sent; pages that do not read are let go."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.core.io import read_json, write_json
from lora_trainer.run_folder.process_life import process_start
from lora_trainer.run_folder.progress import Progress, ProgressFile
from lora_trainer.web import live, run_list
from lora_trainer.web.live import Watcher
from lora_trainer.web.run_columns import Tail
from lora_trainer.web.server_state import ServerOptions, ServerState
from tests.at_work import at_work, write_now
from tests.web.site import write_run


@pytest.fixture
def state(tmp_path: Path) -> ServerState:
    write_run(tmp_path / "cat", steps=3)
    return ServerState(ServerOptions(tmp_path))


@pytest.fixture
def progress_file(tmp_path: Path) -> Iterator[ProgressFile]:
    """Of a run that this process trains."""
    folder = write_run(tmp_path / "now", status="running", steps=3, arithmetic={"total": 9})
    with at_work(folder, Progress("training", 3, 9)) as file:
        yield file


@pytest.fixture
def running(progress_file: ProgressFile, tmp_path: Path) -> Path:
    """The folder of the run that this process trains."""
    return tmp_path / "now"


def append(path: Path, row: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def without_machine(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in found if "machine" not in each]


def test_a_run_that_trains_is_followed_row_by_row(
    state: ServerState, running: Path, progress_file: ProgressFile
) -> None:
    watcher = state.watcher
    assert without_machine(watcher.look()) == []  # pages ask for what is there by themselves
    assert without_machine(watcher.look()) == []
    row = {"step": 4, "loss": 0.5}
    append(running / "metrics.jsonl", row)
    append(running / "events.jsonl", {"step": 4, "kind": "disk", "message": "full"})
    write_now(progress_file, Progress("training", 4, 9, loss=0.5))
    changed, news = without_machine(watcher.look())
    assert [(each["id"], each["step"], each["loss"]) for each in changed["runs"]] == [("now", 4, 0.5)]
    assert changed["removed"] == []
    assert news == {"run": "now", "metrics": [row], "events": [{"step": 4, "kind": "disk", "message": "full"}]}
    write_json(running / "run.json", {**read_json(running / "run.json"), "status": "done", "steps": 5})
    append(running / "metrics.jsonl", {"step": 5, "loss": 0.4})
    changed, news = without_machine(watcher.look())
    assert (changed["runs"][0]["status"], changed["runs"][0]["is_live"]) == ("done", False)
    assert news == {"run": "now", "metrics": [{"step": 5, "loss": 0.4}]}  # its last rows too
    append(running / "metrics.jsonl", {"step": 6, "loss": 0.4})
    assert not any("run" in each for each in watcher.look())


def test_a_rollback_makes_pages_ask_again(state: ServerState, running: Path) -> None:
    state.watcher.look()
    rows = (running / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    other = running / "other"
    other.write_text("".join(rows[:1]), encoding="utf-8")
    os.replace(other, running / "metrics.jsonl")
    news = [each for each in state.watcher.look() if "run" in each]
    assert [each["is_incomplete"] for each in news] == [True]


def test_new_and_deleted_runs_are_named(state: ServerState, tmp_path: Path) -> None:
    state.watcher.look()
    write_run(tmp_path / "night" / "ash", steps=1)
    os.rename(tmp_path / "cat", tmp_path / ".ui-gone")
    (changed,) = without_machine(state.watcher.look())
    assert ([each["id"] for each in changed["runs"]], changed["removed"]) == (["night~ash"], ["cat"])


def test_a_start_that_fails_is_reported(state: ServerState, tmp_path: Path) -> None:
    """A process that ends before it has written a record: a page would wait for its first step forever."""
    state.watcher.look()
    started = {"name": "dog", "arguments": ["train"], "about": {}, "pid": os.getpid()}
    started["created"] = process_start(os.getpid())
    write_json(tmp_path / ".ui" / "started" / "dog" / "process.json", {**started, "started": 2000.0})
    (changed,) = without_machine(state.watcher.look())
    assert [(each["id"], each["status"], each["is_live"]) for each in changed["runs"]] == [("dog", "starting", True)]
    log = tmp_path / ".ui" / "started" / "dog" / "log.txt"
    log.write_text("error: no such model", encoding="utf-8")
    write_json(tmp_path / ".ui" / "started" / "dog" / "process.json", {**started, "created": 1.0, "started": 2000.0})
    (changed,) = without_machine(state.watcher.look())
    assert [(each["status"], each["reason"]) for each in changed["runs"]] == [("failed", "error: no such model")]


def test_after_a_look_that_failed_pages_ask_for_all_again(
    state: ServerState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watcher = state.watcher
    watcher.looked()

    def fail(*_: object) -> None:
        raise PermissionError("the queue cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(state.queue, "jobs", fail)
        assert [watcher.looked(), watcher.looked()] == [[], []]
    assert capsys.readouterr().err.count("PermissionError: the queue cannot be read") == 1
    assert without_machine(watcher.looked()) == [{"reconnected": True}]
    write_run(tmp_path / "dog", steps=1)
    assert [row["id"] for row in without_machine(watcher.looked())[0]["runs"]] == ["dog"]


def test_an_idle_look_reads_no_file(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is kept does not grow."""
    state.watcher.look()
    read: list[Path] = []
    monkeypatch.setattr(run_list, "row_of", lambda folder, output: read.append(folder))
    monkeypatch.setattr(Tail, "read", lambda self: read.append(self.path))
    for _ in range(50):
        assert without_machine(state.watcher.look()) == []
    assert read == []
    assert len(state.runs._kept) == 1


def test_listeners_get_messages_and_slow_ones_are_let_go(
    state: ServerState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "EVERY_SECONDS", 0.001)
    monkeypatch.setattr(live, "MOST_WAITING", 4)
    monkeypatch.setattr(live, "MACHINE_SECONDS", 0.0)  # a message at each look
    watcher = Watcher(state.run_rows, state.queue, state.machine, state.tasks)

    async def listen() -> tuple[str, str, int]:
        reading, sleeping = watcher.listen(), watcher.listen()
        first = await anext(reading)
        await anext(sleeping)
        message = await anext(reading)
        async for _ in reading:
            if len(watcher._listeners) == 1:  # the other one's queue was full
                break
        left = len(watcher._listeners)
        rest = [each async for each in sleeping]
        assert len(rest) == 3  # what waited, and no more
        await reading.aclose()  # type: ignore[attr-defined]
        return first, message, left

    first, message, left = asyncio.run(listen())
    assert first == "retry: 2000\n\n"
    assert message.startswith('data: {"machine":')
    assert message.endswith("\n\n")
    assert left == 1
    assert watcher._listeners == set()
