"""`/api/tasks`: commands that the server runs, their documents, and what is left when they or the server end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lora_trainer.web.safety import Refusal
from lora_trainer.web.tasks import TaskList
from tests.recipes.recipe import draw_images
from tests.web.site import app_of, problems_of, site


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return site(tmp_path / "runs")


def tasks_of(client: TestClient) -> TaskList:
    found: TaskList = app_of(client).state.server.tasks
    return found


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 300.0
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)


def ended(client: TestClient, task: str) -> dict[str, Any]:
    until(lambda: client.get(f"/api/tasks/{task}").json()["status"] != "running")
    found: dict[str, Any] = client.get(f"/api/tasks/{task}").json()
    return found


def test_a_command_has_its_document_and_how_it_ended(client: TestClient, tmp_path: Path) -> None:
    assert client.get("/api/tasks").json() == {"tasks": []}
    tasks = tasks_of(client)
    images = draw_images(tmp_path / "images", 1)
    row = tasks.start("check", "Check", ["check", str(images), "--json"], {"data": "images"})
    assert (row["status"], row["kind"]) == ("running", "check")
    found = ended(client, row["id"])
    assert (found["status"], found["exit_code"]) == ("done", 3)  # the gate refuses one image
    assert found["document"]["passed"] is False
    kept = tasks.newest("check", {"data": "images"})
    assert kept is not None
    assert kept == TaskList(tasks.folder).newest("check")  # also of the next server
    assert tasks.newest("check", {"data": "others"}) is None
    wrong = tasks.start("wrong", "Wrong", ["presets", "show", "13gb"])
    found = ended(client, wrong["id"])
    assert (found["status"], found["exit_code"], found["document"]) == ("failed", 2, None)
    assert found["last_line"].startswith("error:")
    assert [each["id"] for each in client.get("/api/tasks").json()["tasks"]] == [wrong["id"], row["id"]]
    assert client.delete(f"/api/tasks/{row['id']}").status_code == 200
    assert client.get(f"/api/tasks/{row['id']}").status_code == 404
    (tasks.folder / "4").mkdir()  # a server was killed while it began it
    assert tasks.start("presets", "Presets", ["presets"])["id"] == "5"
    found = ended(client, "5")
    assert (found["status"], found["document"]) == ("done", None)  # a table


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_tasks_are_few_and_can_be_stopped(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_trainer.web.tasks.MOST_RUNNING", 1)
    tasks = tasks_of(client)
    command = ["ui", "--port", "0", "--output", str(tmp_path / "other")]  # ends by a signal alone
    name = tasks.start("ui", "Server", command)["id"]
    with pytest.raises(Refusal, match="run already"):
        tasks.start("ui", "Server", command)
    assert client.delete(f"/api/tasks/{name}").status_code == 409
    until(lambda: "page:" in tasks.log(name, 1000))
    assert client.post(f"/api/tasks/{name}/stop").status_code == 200
    assert ended(client, name)["status"] in ("stopped", "done")
    assert client.post(f"/api/tasks/{name}/stop").status_code == 409


@pytest.mark.parametrize("name", ["9", "..", "%2e%2e%2fconfigs", "1/../2", "x" * 300, "<b>"])
def test_only_tasks_are_answered(client: TestClient, name: str) -> None:
    for answer in (
        client.get(f"/api/tasks/{name}"),
        client.post(f"/api/tasks/{name}/stop"),
        client.delete(f"/api/tasks/{name}"),
    ):
        assert answer.status_code in (404, 405)
        assert problems_of(answer.json())
