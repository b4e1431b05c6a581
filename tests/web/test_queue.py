"""`/api/queue`: jobs are added, ordered, cancelled and retried as `batch` does it, and workers are processes of their own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lora_trainer.core.io import write_json
from lora_trainer.jobs.job_document import settings_of
from lora_trainer.jobs.job_state import SEVERAL_MACHINES, Ending
from lora_trainer.jobs.job_store import JobStore
from lora_trainer.run_folder.process_life import process_start
from lora_trainer.web.children import Child
from lora_trainer.web.server_state import ServerState
from tests.recipes.recipe import draw_images
from tests.web.site import app_of, problems_of, site


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("ash", "birch"):
        draw_images(tmp_path / "customers" / name, 1)
    return tmp_path / "customers"


@pytest.fixture
def client(tmp_path: Path, root: Path) -> TestClient:
    return site(tmp_path / "runs", root)


def jobs_of(document: dict[str, Any]) -> dict[str, tuple[str, int]]:
    return {job["name"]: (job["status"], job["priority"]) for job in document["jobs"]}


def test_folders_become_jobs_and_all_is_as_batch_has_it(client: TestClient, tmp_path: Path, root: Path) -> None:
    assert client.get("/api/queue").json() == {"jobs": [], "workers": [], "together": 1}
    assert client.post("/api/queue/work").status_code == 422  # there are no jobs
    sent = {"root": str(root), "presets": ["12gb"], "settings": {"lora.rank": 4}}
    dry = client.post("/api/queue", json={**sent, "dry_run": True}).json()
    assert [(job["name"], job["problems"]) for job in dry["jobs"]] == [("ash", []), ("birch", [])]
    assert not (tmp_path / "runs" / "jobs").exists()
    added = client.post("/api/queue", json={**sent, "together": 2})
    assert added.status_code == 201
    assert jobs_of(added.json()) == {"ash": ("waiting", 0), "birch": ("waiting", 0)}
    assert added.json()["together"] == 2
    again = client.post("/api/queue", json=sent)
    assert all("already" in message for message in problems_of(again.json()))
    queue = JobStore(tmp_path / "runs")
    job = queue.read_jobs()[0]
    assert settings_of(queue, job).config.lora.rank == 4
    run = settings_of(queue, job).config.run
    assert (run.output, run.name) == (str(tmp_path / "runs"), "ash")

    assert jobs_of(client.post("/api/queue/birch/priority", json={"priority": 5}).json())["birch"] == ("waiting", 5)
    claimed = queue.claim()
    assert claimed is not None
    assert claimed.name == "birch"
    queue.finish(claimed, Ending(5, "out of memory", {"dataset": 1.0, "lora": None}))
    shown = {job["name"]: job for job in client.get("/api/queue").json()["jobs"]}
    assert (shown["birch"]["status"], shown["birch"]["reason"]) == ("failed", "out of memory")
    assert client.post("/api/queue/birch/retry").json()["messages"][0] == "birch: waiting again"
    assert jobs_of(client.post("/api/queue/ash/cancel").json())["ash"] == ("cancelled", 0)
    assert "no job elm" in problems_of(client.post("/api/queue/elm/cancel").json())[0]


def test_a_job_of_its_own_settings_does_not_change_others(client: TestClient, tmp_path: Path, root: Path) -> None:
    client.post("/api/queue", json={"folders": [str(root / "ash")], "settings": {"lora.rank": 4}})
    client.post("/api/queue", json={"folders": [str(root / "birch")], "settings": {"lora.rank": 8}, "priority": 1})
    queue = JobStore(tmp_path / "runs")
    ranks = {job.name: settings_of(queue, job).config.lora.rank for job in queue.read_jobs()}
    assert ranks == {"ash": 4, "birch": 8}


def test_a_new_run_can_wait_in_the_queue(client: TestClient, tmp_path: Path, root: Path) -> None:
    settings = {"lora.rank": 4, "train.max_steps": 3}
    sent = {"name": "cat", "data": [str(root / "ash")], "when": "queue", "settings": settings}
    assert client.post("/api/runs", json=sent).json()["when"] == "queue"
    queue = JobStore(tmp_path / "runs")
    (job,) = queue.read_jobs()
    config = settings_of(queue, job).config
    assert (config.lora.rank, config.train.max_steps) == (4, 3)
    assert (config.run.output, config.run.name) == (str(tmp_path / "runs"), "cat")
    assert [source.path for source in config.data.sources] == [str(root / "ash")]


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        ({}, "No jobs are named"),
        ({"folders": ["/etc"]}, "outside of the folders"),
        ({"root": "ROOT", "folders": ["ROOT/ash"], "configs": ["ROOT/ash"]}, "is a folder"),
        ({"folders": ["ROOT/ash", "ROOT/ash"]}, "one name"),
        ({"root": "ROOT", "settings": {"lora.rank": 0}}, "lora.rank"),
        ({"root": "ROOT", "settings": {"run.on_finish": "rm -rf /"}}, "cannot be set here"),
        ({"root": "ROOT", "data": ["ROOT/ash"]}, "data is not for jobs"),
        ({"root": "ROOT", "priority": 10_000}, "priority"),
    ],
)
def test_wrong_jobs_are_refused_and_none_is_added(
    client: TestClient, tmp_path: Path, root: Path, sent: dict[str, Any], part: str
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(each) for each in value]
        return value.replace("ROOT", str(root)) if isinstance(value, str) else value

    answer = client.post("/api/queue", json={key: filled(value) for key, value in sent.items()})
    assert answer.status_code in (403, 422)
    assert part in " ".join(problems_of(answer.json()))
    assert not (tmp_path / "runs" / "jobs").exists()


def test_no_run_is_named_as_the_folder_of_the_jobs(client: TestClient, root: Path) -> None:
    draw_images(root / "jobs", 1)
    assert client.post("/api/queue", json={"root": str(root)}).status_code == 422
    assert client.get("/api/queue").json()["jobs"] == []


def test_the_folder_of_a_dataset_runs_no_command(client: TestClient, root: Path) -> None:
    """A dataset is somebody else's; so is its `lora.toml`."""
    (root / "ash" / "lora.toml").write_text('[run]\non_finish = "rm -rf /"\n', encoding="utf-8")
    (root / "birch" / "lora.toml").write_text('[lora]\nnetwork_weights = "/etc/passwd"\n', encoding="utf-8")
    dry = client.post("/api/queue", json={"root": str(root), "dry_run": True}).json()
    messages = {job["name"]: " ".join(each["message"] for each in job["problems"]) for job in dry["jobs"]}
    assert "run.on_finish" in messages["ash"]
    assert "outside of the folders" in messages["birch"]


def test_the_jobs_of_several_machines_are_left_to_them(client: TestClient, tmp_path: Path, root: Path) -> None:
    JobStore(tmp_path / "runs").write_note(SEVERAL_MACHINES, True)
    answer = client.post("/api/queue", json={"folders": [str(root / "ash")]})
    assert answer.status_code == 409
    assert "several machines" in problems_of(answer.json())[0]


@pytest.mark.slow
def test_workers_are_started_on_their_gpus_and_stopped(
    client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("/api/queue", json={"folders": [str(root / "ash")]})
    state: ServerState = app_of(client).state.server
    started = []

    def start(name: str, arguments: list[str], environment: dict[str, str], **named: object) -> None:
        started.append((name, arguments, environment.get("CUDA_VISIBLE_DEVICES")))

    monkeypatch.setattr(state.children, "start", start)
    assert client.post("/api/queue/work", json={"workers": 3, "gpus": [0, 1]}).status_code == 201
    batch = ["batch", "work", str(state.output)]
    assert started == [("~worker-1", batch, "0"), ("~worker-2", batch, "1"), ("~worker-3", batch, "0")]
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child = Child("~worker-1", ("batch",), {"gpu": "0"}, process.pid, process_start(process.pid) or 0.0, 1.0)
        write_json(state.own / "started" / "~worker-1" / "process.json", asdict(child))
        (worker,) = client.get("/api/queue").json()["workers"]
        assert (worker["name"], worker["gpu"], worker["is_live"]) == ("worker-1", "0", True)
        assert client.post("/api/queue/stop").json()["stopped_workers"] == ["worker-1"]
        assert process.wait(300) != 0
    finally:
        process.kill()
        process.wait()
    assert client.get("/api/queue").json()["workers"] == []
