"""`/api/doctor`: a check of this machine and of a run, its newest result, its fixes, and what is refused."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from lora_trainer.core.io import write_json
from lora_trainer.web.children import PROCESS
from lora_trainer.web.doctor_api import COMMAND
from lora_trainer.web.task_process import DOCUMENT, END
from lora_trainer.web.tasks import TaskList
from tests.conftest import needs_links
from tests.web.site import app_of, problems_of, site, write_run

PATIENCE = 120.0
GOOD = {"part": "before", "name": "python", "level": "ok", "found": "3.11", "wanted": "", "fix": ""}
BAD = {**GOOD, "name": "versions", "level": "error", "fix": "pip install 'diffusers==0.42.1'"}


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    write_run(tmp_path / "runs" / "cat", steps=2)
    return site(tmp_path / "runs")


def write_check(client: TestClient, number: int, document: object, *, code: int = 0, run: str | None = None) -> None:
    """A check that has ended, as its process leaves it."""
    tasks: TaskList = app_of(client).state.server.tasks
    place = tasks.folder / str(number)
    place.mkdir(parents=True)
    about = {"run": run}
    shown = {"kind": "doctor", "title": "Check", "about": about}
    task = {"name": str(number), "arguments": ["doctor"], "about": shown}
    write_json(place / PROCESS, {**task, "pid": 2**22 + number, "created": 1.0, "started": 100.0 + number})
    (place / DOCUMENT).write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    write_json(place / END, {"exit_code": code, "ended": 103.0 + number})


def document_of(*lines: dict[str, str]) -> dict[str, Any]:
    errors = sum(line["level"] == "error" for line in lines)
    return {"lines": lines, "errors": errors, "warnings": 0, "summary": "…"}


def test_a_check_is_started_and_its_result_is_the_newest(client: TestClient) -> None:
    of_run = {"run": "cat"}
    assert client.get("/api/doctor", params=of_run).json() == {"run": "cat", "last": None, "newest": None}
    answer = client.post("/api/doctor", json=of_run)
    task = answer.json()
    assert (answer.status_code, task["kind"], task["about"]) == (201, "doctor", of_run)
    assert client.post("/api/doctor", json=of_run).json()["id"] == task["id"]  # one at a time
    end = time.monotonic() + PATIENCE
    while psutil.pid_exists(task["pid"]):
        assert client.get("/api/doctor").json()["last"] is None  # of this machine
        assert time.monotonic() < end
        time.sleep(0.1)
    found = client.get("/api/doctor", params=of_run).json()
    assert found["newest"]["id"] == found["last"]["id"] == task["id"]
    lines = found["newest"]["document"]["lines"]
    assert {line["part"] for line in lines} == {"before", "after"}
    assert {"torch", "status", "files"} <= {line["name"] for line in lines}
    assert all(isinstance(line["commands"], list) for line in lines)


def test_a_check_that_found_errors_is_a_result(client: TestClient) -> None:
    write_check(client, 1, document_of(GOOD))
    write_check(client, 2, document_of(GOOD, BAD), code=2)
    write_check(client, 3, document_of(GOOD), run="cat")
    found = client.get("/api/doctor").json()
    assert (found["newest"]["id"], found["newest"]["document"]["errors"]) == ("2", 1)
    assert [line["commands"] for line in found["newest"]["document"]["lines"]] == [[], [BAD["fix"]]]
    assert client.get("/api/doctor", params={"run": "cat"}).json()["newest"]["id"] == "3"


@pytest.mark.parametrize("document", ["", "no JSON", "[]", "{}", '"lines"', "null"])
def test_a_check_without_a_document_leaves_the_one_before_it(client: TestClient, document: str) -> None:
    write_check(client, 1, document_of(GOOD))
    write_check(client, 2, document, code=1)
    found = client.get("/api/doctor").json()
    assert (found["last"]["id"], found["last"]["status"], found["newest"]["id"]) == ("2", "failed", "1")


@pytest.mark.parametrize(
    "run", ["..", "../cat", "dog", "/etc", "~", "cat~..", ".ui", "-x", "", "cat/../cat", "\0", "<b>", "x" * 700]
)
def test_only_runs_of_the_folder_are_checked(client: TestClient, run: str) -> None:
    started, shown = client.post("/api/doctor", json={"run": run}), client.get("/api/doctor", params={"run": run})
    for answer in (started, shown):
        assert answer.status_code in (404, 422)
        assert problems_of(answer.json())
    assert client.get("/api/tasks").json()["tasks"] == []


@needs_links
def test_a_run_outside_is_not_checked(client: TestClient, tmp_path: Path) -> None:
    write_run(tmp_path / "elsewhere" / "dog", steps=2)
    (tmp_path / "runs" / "dog").symlink_to(tmp_path / "elsewhere" / "dog")
    assert client.post("/api/doctor", json={"run": "dog"}).status_code == 404
    assert client.get("/api/tasks").json()["tasks"] == []


@pytest.mark.parametrize(
    "body", [{"run": 1}, {"run": ["cat"]}, {"folder": "/"}, {"run": None, "online": True}, [], "cat", {"run": {"a": 1}}]
)
def test_wrong_requests_start_nothing(client: TestClient, body: object) -> None:
    answer = client.post("/api/doctor", json=body)
    assert answer.status_code == 422
    assert problems_of(answer.json())
    assert client.get("/api/tasks").json()["tasks"] == []


def test_commands_of_every_documented_fix_can_be_copied(checkout: Path) -> None:
    page = (checkout / "docs" / "doctor.md").read_text("utf-8")
    fixes = set(re.findall(r"<br>fix: ([^|]*) \|", page))
    assert len(fixes) > 30
    found = {command for fix in fixes for command in COMMAND.findall(fix)}
    assert found == {
        "sudo nvidia-smi mig -cgi 19 -C",
        "sudo nvidia-smi -mig 0",
        "sudo nvidia-smi -pl 450",
        "sudo nvidia-smi -pm 1",
        "docker run --shm-size 8g",
        "docker run --cpus 4",
        "docker run --memory 16g",
        "docker run --gpus all",
        "pip install --force-reinstall torch",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
        "pip install -c constraints.txt -e .",
        "pip install --upgrade xformers",
        "pip install 'diffusers==0.42.1'",
        "timedatectl set-ntp true",
        "ulimit -n 4096",
        "ulimit -v unlimited",
    }
    sentence = "continue: lora-trainer train --config 'a, b. c.toml' --resume. Then look."
    assert COMMAND.findall(sentence) == ["lora-trainer train --config 'a, b. c.toml' --resume"]
