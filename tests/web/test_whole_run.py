"""Real runs through the server: its death changes no byte, a stopped run is resumed, a worker trains the queue."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_trainer.config.toml import parse_value
from tests.recipes.recipe import QUICK, Bench, draw_images, exported, losses, record, save_tiny_model
from tests.web.test_serve import served

pytestmark = [
    pytest.mark.slow,  # test_serve.py, test_new_run.py and test_queue.py have what needs no training
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]
PATIENCE = 120.0  # seconds


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("whole")
    return Bench(save_tiny_model(folder), draw_images(folder / "images"), folder / "runs", folder / "cache")


def settings(bench: Bench, **more: object) -> dict[str, object]:
    values = QUICK | {"cache.dir": str(bench.cache)}
    parsed: dict[str, object] = {key: parse_value(value) for key, value in values.items()}
    return parsed | {key.replace("__", "."): value for key, value in more.items()}


def sent(bench: Bench, name: str, **more: object) -> dict[str, Any]:
    return {"name": name, "model": str(bench.model), "data": [str(bench.data)], "settings": settings(bench, **more)}


def until(found: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError(what)


def test_the_servers_death_changes_no_byte_of_a_run(bench: Bench) -> None:
    assert bench.run("alone", steps=60) == 0
    roots = ("--output", str(bench.output), "--root", str(bench.model.parent), "--root", str(bench.cache.parent))
    with served(*roots) as (address, _, server):
        body = sent(bench, "cat", train__max_steps=60)
        answer = httpx.post(f"{address}/api/runs", json=body, timeout=300)
        assert answer.status_code == 201, answer.text
        again = httpx.post(f"{address}/api/runs", json=body, timeout=300)
        assert again.status_code in (409, 422)
        until(lambda: (bench.folder("cat") / "metrics.jsonl").is_file(), "no step")
        server.send_signal(signal.SIGKILL)
        server.wait()
    with served(*roots) as (address, _, _):

        def ended() -> dict[str, Any] | None:
            row: dict[str, Any] = httpx.get(f"{address}/api/runs/cat").json()
            return None if row["is_live"] else row

        row = until(ended, "the run did not end")
        assert (row["status"], row["steps"], row["start_error"]) == ("done", 60, None)
        assert "exported: cat.safetensors" in httpx.get(f"{address}/api/runs/cat/log").json()["text"]
    assert exported(bench.folder("cat"))["kohya"] == exported(bench.folder("alone"))["kohya"]
    assert losses(bench.folder("cat")) == losses(bench.folder("alone"))


def test_a_stopped_run_is_resumed_to_the_same_bytes(bench: Bench) -> None:
    steps = 300
    assert bench.run("whole", steps=steps) == 0
    roots = ("--output", str(bench.output), "--root", str(bench.model.parent))
    with served(*roots) as (address, _, _):

        def run() -> dict[str, Any]:
            document: dict[str, Any] = httpx.get(f"{address}/api/runs/dog").json()
            return document

        assert httpx.post(
            f"{address}/api/runs", json=sent(bench, "dog", train__max_steps=steps), timeout=300
        ).is_success
        until(lambda: (run().get("progress") or {}).get("step"), "no step")
        assert httpx.post(f"{address}/api/runs/dog/requests", json={"do": "save"}).status_code == 202
        until((bench.folder("dog") / "requests" / "done" / "1.json").is_file, "it did not save")
        assert httpx.post(f"{address}/api/runs/dog/stop").status_code == 200
        stopped = until(lambda: None if run()["is_live"] else run(), "it was not stopped")
        assert stopped["status"] == "stopped"
        assert 0 < stopped["steps"] < steps
        assert httpx.post(f"{address}/api/runs/dog/stop").status_code == 409
        assert httpx.post(f"{address}/api/runs/dog/resume", json={}, timeout=300).status_code == 201
        assert run()["status"] in ("starting", "running")
        assert until(lambda: run()["status"] == "done", "it was not resumed")
    assert exported(bench.folder("dog"))["kohya"] == exported(bench.folder("whole"))["kohya"]


def test_a_worker_trains_the_jobs_of_the_queue(bench: Bench, tmp_path: Path) -> None:
    output = tmp_path / "queue"
    with served("--output", str(output), "--root", str(bench.model.parent)) as (address, _, _):
        body = sent(bench, "cat", train__max_steps=4, gates__lora_check="lite", gates__lora=0, gates__dataset=0)
        answer = httpx.post(f"{address}/api/runs", json={**body, "when": "queue"}, timeout=300)
        assert answer.status_code == 201, answer.text
        assert httpx.post(f"{address}/api/queue/work", json={"workers": 1}).json()["workers"]

        def job() -> dict[str, Any] | None:
            (found,) = httpx.get(f"{address}/api/queue").json()["jobs"]
            return found if found["status"] not in ("waiting", "running") else None

        ended = until(job, "no worker trained it")
        assert ended["status"] in ("done", "refused", "unresolved"), ended
        assert record(output / "cat")["steps"] == 4
        assert httpx.get(f"{address}/api/runs").json()["runs"][0]["id"] == "cat"
        until(lambda: httpx.get(f"{address}/api/queue").json()["workers"] == [], "the worker did not end")
