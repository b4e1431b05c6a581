"""What a new run is made of: the schema, the plan, presets of one's own, other trainers' configs; and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from starlette.testclient import TestClient

from lora_trainer.config.needs import settings_with_needs
from lora_trainer.config.presets import presets
from lora_trainer.config.toml import read_toml, setting_names
from lora_trainer.run_folder.process_life import process_start
from lora_trainer.web.children import Children, stop_process
from lora_trainer.web.safety import Refusal
from lora_trainer.web.server_state import ServerState
from tests.web.site import app_of, problems_of, site, write_run


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """One server, whose planner is started once."""
    browser = site(tmp_path_factory.mktemp("runs"))
    yield browser
    state_of(browser).planner.close()


def state_of(client: TestClient) -> ServerState:
    state: ServerState = app_of(client).state.server
    return state


def test_the_schema_has_every_setting_and_preset(client: TestClient) -> None:
    document = client.get("/api/settings").json()
    rows = {row["name"]: row for section in document["sections"] for row in section["settings"]}
    assert list(rows) == list(setting_names())
    assert (rows["lora.rank"]["minimum"], rows["lora.rank"]["types"]) == (1, ["integer"])
    assert "adamw8bit" in rows["optimizer.name"]["choices"]
    assert rows["model.path"]["can_be_empty"]
    assert rows["data.sources"]["is_list"]
    assert all(row["description"] and row["on_resume"] for row in rows.values())
    assert {name for name, row in rows.items() if row["needs"]} == set(settings_with_needs())
    for theirs, ours in (
        ("network_dim", "lora.rank"),
        ("unet_lr", "optimizer.learning_rate"),
        ("save_every", "checkpoint.every_n_steps"),
        ("max_train_steps", "train.max_steps"),
    ):
        assert [name for name, row in rows.items() if theirs in row["aliases"]] == [ours]
    assert {each["name"]: each["kind"] for each in document["presets"]} == {
        name: each.kind for name, each in presets().items()
    }


def test_a_plan_names_each_value_and_what_differs(client: TestClient) -> None:
    asked: dict[str, Any] = {"presets": ["12gb", "quality"], "settings": {"model.family": "sdxl", "lora.rank": 8}}
    plan = client.post("/api/plan", json=asked).json()
    printed = subprocess.run(
        [
            *(sys.executable, "-m", "lora_trainer", "plan", "--preset=12gb,quality", "--json"),
            *("--set=model.family=sdxl", "--set=lora.rank=8"),
        ],
        capture_output=True,
        check=True,
    )
    command = json.loads(printed.stdout)
    assert plan["what_if"] == command.pop("settings")
    assert {key: plan[key] for key in command} == command
    assert plan["settings"]["lora.rank"] == {"value": 8, "origin": "page", "evidence": None}
    assert plan["settings"]["memory.limit_gib"]["origin"] == "preset 12gb"
    assert [each["name"] for each in plan["differences"]] == ["lora.rank"]
    assert plan["problems"] == []


def test_all_problems_of_settings_come_at_once(client: TestClient) -> None:
    wrong = {"lora.rank": 0, "train.max_step": 4, "run.on_finish": "rm -rf /", "nonsense": 1}
    answer = client.post("/api/plan", json={"settings": wrong, "presets": ["13gb"]})
    assert answer.status_code == 422
    messages = " ".join(problems_of(answer.json()))
    for part in ("lora.rank = 0", "train.max_step", "run.on_finish cannot be set here", "nonsense", "13gb"):
        assert part in messages


def test_a_preset_of_ones_own_is_used_by_its_name(client: TestClient) -> None:
    assert client.post("/api/presets", json={"name": "12gb", "settings": {"lora.rank": 4}}).status_code == 422
    assert client.post("/api/presets", json={"name": "../mine", "settings": {"lora.rank": 4}}).status_code == 422
    assert client.post("/api/presets", json={"name": "mine", "settings": {"lora.rank": 0}}).status_code == 422
    settings = {"lora.rank": 4, "run.priority": 2}
    assert client.post("/api/presets", json={"name": "my own", "settings": settings}).status_code == 201
    assert client.get("/api/settings").json()["saved"] == [{"name": "my own", "settings": settings}]
    plan = client.post("/api/plan", json={"presets": ["my own"], "settings": {"model.family": "sdxl"}}).json()
    assert plan["settings"]["lora.rank"] == {"value": 4, "origin": "saved preset my own", "evidence": None}


def test_a_config_of_another_trainer_is_imported_line_by_line(client: TestClient, tmp_path: Path) -> None:
    text = 'network_dim = 8\nlearning_rate = 2e-4\nmax_train_steps = 300\ntrain_data_dir = "images"\nnot_known = 1\n'
    document = client.post("/api/import", json={"text": text, "format": "toml"}).json()
    assert document["format"] == "kohya config"
    assert document["settings"]["lora.rank"] == 8
    assert {line["key"]: line["verdict"] for line in document["keys"]}["not_known"] == "unknown"
    assert tomllib.loads(document["toml"])["train"]["max_steps"] == 300
    assert "/tmp" not in json.dumps(document)
    assert client.post("/api/import", json={"text": "just words"}).status_code == 422
    secret = tmp_path / "secret.toml"
    secret.write_text('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "hidden"\n', encoding="utf-8")
    answer = client.post("/api/import", json={"text": f"network_dim = 8\ndataset_config = '{secret}'\n"})
    assert answer.status_code == 403
    assert "hidden" not in answer.text


def test_a_run_that_cannot_begin_is_refused_before_anything_is_written(client: TestClient, tmp_path: Path) -> None:
    output = state_of(client).output
    write_run(output / "taken", steps=1)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    sent = {"name": "taken", "settings": {"textual_inversion.placeholder_tokens": ["<a b>"]}}
    for wrong, part in (
        (sent, "placeholder_tokens"),
        ({"name": "taken"}, "holds a run already"),
        ({"name": "../x"}, "no name of a folder"),
        ({"name": ".ui"}, "hidden folder"),
        ({"data": [str(tmp_path.parent / "nothing")]}, "outside of the folders"),
    ):
        answer = client.post("/api/runs", json=wrong)
        assert answer.status_code in (403, 422)
        assert part in " ".join(problems_of(answer.json()))
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_a_resumed_run_keeps_what_its_weights_depend_on(client: TestClient) -> None:
    write_run(state_of(client).output / "stopped", status="stopped", steps=4)
    answer = client.post("/api/runs/stopped/resume", json={"settings": {"lora.rank": 3, "train.seed": 7}})
    assert [each.partition(" was ")[0] for each in problems_of(answer.json())] == ["lora.rank", "train.seed"]


def test_a_run_whose_length_is_in_steps_is_resumed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file states the repeats of its preset too, which its steps leave without effect."""
    folder = state_of(client).output / "stopped"
    write_run(folder, status="stopped", steps=4)
    started = list[str]()
    monkeypatch.setattr(Children, "start", lambda _, name, *__, **___: started.append(name))
    settings = read_toml(folder / "config.toml")
    settings["train"] |= {"max_steps": 40, "total_repeats": 80}
    (folder / "config.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    answer = client.post("/api/runs/stopped/resume", json={"settings": {}})
    assert "setting_has_no_effect" not in answer.text
    assert answer.status_code == 201, answer.text
    assert started == ["stopped"]


def test_a_process_is_known_by_its_number_and_start(tmp_path: Path) -> None:
    children = Children(tmp_path)
    child = children.start("cat", ["presets"])
    assert child.is_alive
    if os.name == "posix":
        assert os.getsid(child.pid) == child.pid  # Ctrl-C of the server does not reach it
    with pytest.raises(Refusal, match="is starting"):
        children.start("cat", ["presets"])
    assert Children(tmp_path).of("cat") == child  # the next server's
    while child.is_alive:
        time.sleep(0.01)
    assert "VRAM presets" in children.log("cat").read_text("utf-8")
    assert [each.name for each in children.all()] == ["cat"]
    path = tmp_path / "cat" / "process.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "pid": os.getpid()}), encoding="utf-8")
    again = children.of("cat")
    assert again is not None
    assert not again.is_alive  # the number is used again, by this process
    assert process_start(os.getpid()) is not None
    with pytest.raises(Refusal, match="does not run"):
        again.stop()
    with pytest.raises(Refusal, match="has just ended"):
        stop_process(os.getpid(), again.created)


@pytest.mark.slow
def test_what_a_run_was_asked_to_be_is_kept_for_the_next(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process fails before it writes anything: it can be asked for again, and comparisons leave it out."""
    start = Children.start
    monkeypatch.setattr(Children, "start", lambda self, name, _: start(self, name, ["train", "--nonsense"]))
    state = state_of(client)
    write_run(state.output / "written", steps=1)
    sent = {"name": "robot one", "presets": ["12gb"], "settings": {"lora.rank": 4}, "command": "train"}
    assert client.post("/api/runs", json=sent).status_code == 201
    assert client.get("/api/runs/robot one").json()["has_request"]
    state.children.wait("robot one", 60)
    run = client.get("/api/runs/robot one").json()
    assert (run["status"], run["has_record"], run["may"]) == ("failed", False, ["delete"])
    assert "--nonsense" in run["reason"]
    assert client.get("/api/runs/robot one/request").json() == {**sent, "model": None, "data": []}
    for unknown in ("written", "nothing", "..", "x" * 5000):
        assert client.get(f"/api/runs/{unknown}/request").status_code == 404
    compared = client.get("/api/compare?runs=robot one,written").json()
    assert [each["id"] for each in compared["runs"]] == ["written"]
    assert client.delete("/api/runs/robot one").status_code == 200
    assert client.get("/api/runs/robot one/request").status_code == 404
