"""`/api/runs`: what a client reads of runs, and what it may do to one that does not run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lora_trainer.core.io import read_json, write_json
from lora_trainer.run_folder.alive import is_alive, live_progress
from lora_trainer.run_folder.lock import take_free_lock
from lora_trainer.web import run_list
from lora_trainer.web.run_columns import Columns, thinned
from lora_trainer.web.run_list import RunList, folder_of, id_of
from lora_trainer.web.safety import Refusal
from tests.at_work import AT_WORK
from tests.conftest import needs_links
from tests.web.site import site, write_lines, write_run


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    write_run(tmp_path / "cat", started=1000.0)
    write_run(tmp_path / "night" / "ash~birch", started=2000.0, status="refused")
    return site(tmp_path)


def get(client: TestClient, path: str) -> dict[str, Any]:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_runs_are_listed_newest_first_with_those_of_batches(client: TestClient) -> None:
    rows = get(client, "/api/runs")["runs"]
    assert [(row["id"], row["status"], row["is_live"]) for row in rows] == [
        ("night~ash~.birch", "refused", False),
        ("cat", "done", False),
    ]
    cat = rows[1]
    assert (cat["step"], cat["total"], cat["val_loss"], cat["scores"]) == (40, 40, 0.1, {"dataset": 0.97, "lora": 0.91})
    assert client.get(cat["preview"]).headers["content-type"] == "image/png"
    assert [row["id"] for row in get(client, "/api/runs?status=done")["runs"]] == ["cat"]
    assert [row["id"] for row in get(client, "/api/runs?limit=1&offset=1")["runs"]] == ["cat"]


def test_ids_name_every_folder_and_nothing_else(tmp_path: Path) -> None:
    for parts in (("a",), ("a~b",), ("~", "~~"), ("a", "-b"), ("a~", "b")):
        folder = write_run(tmp_path.joinpath(*parts), steps=1)
        assert folder_of(id_of(folder, tmp_path), tmp_path) == folder
    for wrong in ("", "..", "a~..", ".ui", "a/b", "a~b~c", "a\0", "x" * 5000, "nothing"):
        with pytest.raises(Refusal):
            folder_of(wrong, tmp_path)


def test_a_run_is_its_record_with_what_it_may_be_asked_for(client: TestClient) -> None:
    run = get(client, "/api/runs/cat")
    assert (run["status"], run["config"]["train"]["seed"]) == ("done", 42)
    assert run["may"] == ["resume", "delete"]
    assert run["progress"]["step"] == 40
    assert run["start_error"] is None
    for kind in ("stop", "requests"):
        answer = client.post(f"/api/runs/cat/{kind}", json={"do": "save"} if kind == "requests" else None)
        assert answer.status_code == 409
        assert "does not run" in answer.json()["problems"][0]["message"]


def test_metrics_after_a_step_are_the_rest(client: TestClient) -> None:
    found = get(client, "/api/runs/cat/metrics?after=37")
    assert found["steps"] == [38, 39, 40]
    assert found["loss"] == [1 / 38, 1 / 39, 1 / 40]
    assert found["grad_norm"] == [None] * 3
    assert [row["step"] for row in found["validation"]] == [40]
    both = get(client, "/api/compare?runs=cat,night~ash~.birch&points=4")["runs"]
    assert [each["id"] for each in both] == ["cat", "night~ash~.birch"]
    assert all(1 in each["metrics"]["steps"] and 40 in each["metrics"]["steps"] for each in both)


def test_thinned_columns_keep_every_spike() -> None:
    values = [0.1] * 10_000
    values[1234], values[5678] = 9.0, math.nan
    values[7777] = -3.0
    places = thinned(values, 200)
    assert {0, 1234, 5678, 7777, 9999} <= set(places)
    assert len(places) <= 202
    assert places == sorted(places)
    assert thinned(values[:50], 200) == list(range(50))


def test_columns_read_on_where_a_file_grew_and_anew_where_it_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": step, "loss": float(step)} for step in (1, 2, 3)])
    columns = Columns(path)
    columns.update()
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 4, "loss": 4.0}\n{"step": 5, "lo')  # being written
    columns.update()
    assert list(columns.steps) == [1, 2, 3, 4]
    with open(path, "a", encoding="utf-8") as file:
        file.write('ss": 5.0}\n{"step": 3, "loss": 30.0}\n')  # rolled back
    columns.update()
    assert (list(columns.steps), list(columns.values["loss"])) == ([1, 2, 3], [1.0, 2.0, 30.0])
    write_lines(tmp_path / "other", [{"step": 1, "loss": 7.0}])
    os.replace(tmp_path / "other", path)
    columns.update()
    assert list(columns.values["loss"]) == [7.0]


def test_events_log_samples_verdict_and_settings(client: TestClient, tmp_path: Path) -> None:
    assert get(client, "/api/runs/cat/events")["events"][0]["message"] == "<b>waited</b>"
    assert get(client, "/api/runs/cat/log") == {"text": "", "size": 0, "file": None}
    (tmp_path / "cat" / "logs").mkdir()
    (tmp_path / "cat" / "logs" / "console.txt").write_text("one\ntwo\x1b[2J\n", encoding="utf-8")
    log = get(client, "/api/runs/cat/log?tail=8")
    assert (log["text"], log["size"]) == ("two\\x1b[2J\n", 12)
    samples = get(client, "/api/runs/cat/samples")["samples"]
    assert [(each["step"], each["is_base"], each["prompt"]) for each in samples] == [
        (20, True, "<script>alert(1)</script>"),
        (20, False, "<script>alert(1)</script>"),
    ]
    assert client.get(samples[0]["url"]).content.startswith(b"\x89PNG")
    verdict = get(client, "/api/runs/night~ash~.birch/verdict")
    assert (verdict["headline"], verdict["dataset"]["value"]) == ("No, do not use it", 0.97)
    rows = {row["name"]: row for row in get(client, "/api/runs/cat/settings")["settings"]}
    assert rows["lora.rank"]["on_resume"] == "fixed"
    assert rows["lora.rank"]["value"] == rows["lora.rank"]["default"]


@pytest.mark.parametrize(
    ("name", "kind", "saved"),
    [
        ("report.html", "text/html; charset=utf-8", False),
        ("run.json", "text/plain; charset=utf-8", False),
        ("metrics.jsonl", "text/plain; charset=utf-8", False),
        ("samples/step-000020_00_with.png", "image/png", False),
        ("cat.safetensors", "application/octet-stream", True),
        ("page.html", "application/octet-stream", True),
        ("image.png", "application/octet-stream", True),
        ("drawing.svg", "application/octet-stream", True),
    ],
)
def test_files_are_what_their_content_is_and_never_a_page(
    client: TestClient, tmp_path: Path, name: str, kind: str, saved: bool
) -> None:
    for hostile in ("page.html", "image.png", "drawing.svg"):
        (tmp_path / "cat" / hostile).write_text("<svg><script>alert(1)</script></svg>", encoding="utf-8")
    answer = client.get(f"/api/runs/cat/files/{name}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.headers.get("content-disposition", "").startswith("attachment") == saved
    assert answer.headers["x-content-type-options"] == "nosniff"
    if name == "report.html":
        assert answer.headers["content-security-policy"].startswith("sandbox allow-scripts")
        assert "allow-same-origin" not in answer.headers["content-security-policy"]


def test_thumbnails_are_kept_by_content(client: TestClient, tmp_path: Path) -> None:
    path = "/api/runs/cat/files/samples/step-000020_00_with.png?width=32"
    first = client.get(path)
    assert first.headers["content-type"] == "image/webp"
    assert len(first.content) < 200
    assert client.get(path.replace("with.png", "without.png")).content == first.content
    assert len(list((tmp_path / ".ui" / "thumbnails").rglob("*.webp"))) == 1
    (tmp_path / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert client.get("/api/runs/cat/files/broken.png?width=32").status_code == 415
    assert client.get(path.replace("=32", "=100000")).status_code == 422


@needs_links
def test_links_do_not_lead_out_of_a_run_nor_of_the_runs(client: TestClient, tmp_path: Path) -> None:
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    write_run(secret / "away")
    os.symlink(secret / "away" / "run.json", tmp_path / "cat" / "link.json")
    os.symlink(secret / "away", tmp_path / "cat" / "inside")
    os.symlink(secret / "away", tmp_path / "away")
    assert client.get("/api/runs/cat/files/link.json").status_code == 404
    assert client.get("/api/runs/cat/files/inside/run.json").status_code == 404
    assert client.get("/api/runs/away").status_code == 404
    assert "away" not in {row["id"] for row in get(client, "/api/runs")["runs"]}


def test_a_deleted_run_is_in_the_trash(client: TestClient, tmp_path: Path) -> None:
    moved = Path(client.delete("/api/runs/cat").json()["moved_to"])
    assert (moved / "run.json").is_file()
    assert moved.is_relative_to(tmp_path / ".ui" / "trash")
    assert client.get("/api/runs/cat").status_code == 404


def test_a_locked_run_is_not_deleted_whatever_its_progress_says(client: TestClient, tmp_path: Path) -> None:
    """`progress.json` is missing where the disk is full, and looks old by another machine's clock."""
    lock = take_free_lock(tmp_path / "cat")
    try:
        assert not is_alive(tmp_path / "cat")
        assert client.delete("/api/runs/cat").status_code == 409
        assert (tmp_path / "cat" / "run.json").is_file()
    finally:
        lock.release()
    assert client.delete("/api/runs/cat").status_code == 200
    assert not (tmp_path / "cat").exists()


def test_a_process_at_work_makes_a_run_live(client: TestClient, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "now", status="running", started=3000.0, arithmetic={"total": 90})
    assert get(client, "/api/runs")["runs"][0]["is_live"] is False  # it was killed
    assert get(client, "/api/runs?is_live=true") == {"runs": [], "count": 0}
    process = subprocess.Popen([sys.executable, "-c", AT_WORK, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        assert (live := live_progress(folder)) is not None
        assert live.pid == process.pid
        server = site(tmp_path)
        assert [row["id"] for row in get(server, "/api/runs?is_live=true")["runs"]] == ["now"]
        assert get(server, "/api/runs/now")["may"] == ["stop", "save", "sample", "prompts"]
        assert server.delete("/api/runs/now").status_code == 409
        assert server.post("/api/runs/now/resume").status_code == 409
        sent = {"do": "prompts", "prompts": ["a cat"]}
        assert [server.post("/api/runs/now/requests", json=sent).json()["number"] for _ in range(2)] == [1, 2]
        kept = json.loads((folder / "requests" / "2.json").read_text("utf-8"))
        assert kept == sent  # the trainer refuses other keys
        assert server.post("/api/runs/now/requests", json={"do": "prompts"}).status_code == 422
        assert server.post("/api/runs/now/requests", json={**sent, "do": "save"}).status_code == 422
        (folder / "requests" / "2.json").rename(folder / "requests" / "done" / "2.json")  # answered
        assert server.post("/api/runs/now/requests", json={"do": "save"}).json()["number"] == 3
        assert json.loads((folder / "requests" / "3.json").read_text("utf-8")) == {"do": "save"}
        write_json(folder / "run.json", {**read_json(folder / "run.json"), "training": {"step": 90}})
        assert get(server, "/api/runs/now")["may"] == ["stop"]  # its LoRA is checked: nothing reads requests
        assert server.post("/api/runs/now/stop").status_code == 200
        assert process.wait(300) == -15
    finally:
        process.kill()
        process.communicate()


def test_a_thousand_runs_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed again, only files that changed are read: counted, not timed."""
    write_run(tmp_path / "run-0", steps=1)
    document = (tmp_path / "run-0" / "run.json").read_bytes()
    for number in range(1, 1000):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "run.json").write_bytes(document)
    read: list[Path] = []
    make_row = run_list.row_of

    def row_of(folder: Path, output: Path) -> dict[str, Any]:
        read.append(folder)
        return make_row(folder, output)

    monkeypatch.setattr(run_list, "row_of", row_of)
    runs = RunList(tmp_path)
    assert len(runs.rows()) == 1000
    assert len(read) == 1000
    runs.rows()
    assert len(read) == 1000
    os.utime(tmp_path / "run-7" / "run.json")
    runs.rows()
    assert read[1000:] == [tmp_path / "run-7"]
