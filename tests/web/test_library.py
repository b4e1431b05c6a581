"""`/api/loras`: the list by headers alone, folders, tools and their problems, sheets of images, and hostile requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.cli.inspect import document
from lora_trainer.cli.main import main
from lora_trainer.core.grid import image_name
from lora_trainer.core.io import read_json, write_json
from lora_trainer.models.lora_facts import read_lora_facts
from lora_trainer.models.lora_names import inspect_lora
from lora_trainer.web import lora_list, sample_sheets
from tests.conftest import needs_links
from tests.web import tiny_loras
from tests.web.site import app_of, problems_of, site, write_run
from tests.web.tiny_loras import SD15, write

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def client(output: Path, tmp_path: Path) -> TestClient:
    (tmp_path / "others").mkdir()
    return site(output, tmp_path / "others")


@pytest.fixture
def started(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is started, in place of processes."""
    found: list[dict[str, Any]] = []
    tasks = app_of(client).state.server.tasks

    def start(kind: str, title: str, arguments: list[str], about: dict[str, Any]) -> dict[str, Any]:
        row = {"id": str(len(found) + 1), "kind": kind, "title": title, "arguments": arguments, "about": about}
        found.append({**row, "status": "running"})
        return found[-1]

    monkeypatch.setattr(tasks, "start", start)
    monkeypatch.setattr(tasks, "rows", lambda: list(found))
    monkeypatch.setattr(tasks, "row", lambda name: next(each for each in found if each["id"] == name))
    return found


def rows_of(client: TestClient) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in client.get("/api/loras").json()["loras"]}


def id_of(client: TestClient, name: str) -> str:
    found: str = rows_of(client)[name]["id"]
    return found


def test_files_of_runs_tools_and_folders_are_listed_by_their_headers(
    client: TestClient, output: Path, tmp_path: Path
) -> None:
    write_run(output / "cat", outcome="passed")
    write(output / "cat" / "cat.safetensors", **SD15, **{"modelspec.trigger_phrase": HOSTILE, "ss_steps": "40"})
    write(output / "cat" / "cat.diffusers.safetensors", tiny_loras.diffusers(), **SD15)
    write(output / "cat" / "weights" / "cat-step-000020.safetensors", **SD15)
    write(output / "cat" / "cat.embedding-zobo.safetensors")
    write(output / "cat" / "checkpoints" / "step-000020" / "adapter.safetensors")
    write(output / "library" / f"{HOSTILE}.safetensors".replace("/", ""), tiny_loras.kohya(8), **SD15)
    others = tmp_path / "others"
    write(others / "deep" / "style.safetensors", tiny_loras.lokr())
    Image.new("RGB", (64, 48), "red").save(others / "deep" / "style.png")
    write(others / "base.safetensors", {"model.diffusion_model.x": tiny_loras.random(2, 2)})
    (others / "broken.safetensors").write_bytes(b"<!doctype html>")
    (others / ".hidden.safetensors").write_bytes(b"")
    assert client.post("/api/loras/folders", json={"path": str(others)}).status_code == 201
    rows = rows_of(client)
    assert set(rows) == {
        *("cat.safetensors", "cat.diffusers.safetensors", "cat-step-000020.safetensors"),
        *(f"{HOSTILE}.safetensors", "style.safetensors", "broken.safetensors"),
    }
    cat = rows["cat.safetensors"]
    assert (cat["kind"], cat["family"], cat["format"], cat["rank"], cat["alpha"]) == ("LoRA", "sd15", "kohya", 4, 4.0)
    assert (cat["run"], cat["score"], cat["outcome"], cat["trigger"]) == ("cat", 0.91, "passed", HOSTILE)
    assert client.get(cat["preview"]).headers["content-type"] == "image/png"
    assert cat["other_format"] == rows["cat.diffusers.safetensors"]["id"]
    step = rows["cat-step-000020.safetensors"]
    assert (step["step"], step["run"], step["score"], step["can_delete"]) == (20, "cat", None, False)
    assert rows[f"{HOSTILE}.safetensors"]["rank"] == 8
    style = rows["style.safetensors"]
    assert (style["kind"], style["from"]) == ("LoKr", "folder")
    assert client.get(f"{style['preview']}?width=32").headers["content-type"] == "image/webp"
    assert rows["broken.safetensors"]["is_damaged"]
    assert "web page" in rows["broken.safetensors"]["problem"]
    found = client.get(f"/api/loras/{cat['id']}").json()
    assert found["header"]["ss_steps"] == "40"
    assert found["inspection"] is None
    answer = client.get(f"/api/loras/{cat['id']}/file")
    assert answer.content == (output / "cat" / "cat.safetensors").read_bytes()
    assert "attachment" in answer.headers["content-disposition"]


@pytest.mark.parametrize(
    ("tensors", "header"),
    [
        (tiny_loras.kohya(), SD15),
        (tiny_loras.kohya(text=1024), {}),
        (tiny_loras.kohya(text=2048), {}),
        (tiny_loras.diffusers(), SD15),
        (tiny_loras.lokr(), SD15),
        (tiny_loras.dora(), SD15),
        (tiny_loras.flux(), {"ss_base_model_version": "flux1"}),
        (tiny_loras.flux(), {"ss_base_model_version": "chroma"}),
    ],
)
def test_the_header_shows_what_inspect_finds(tensors: Any, header: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", tensors, **header)
    facts, full = read_lora_facts(path)[0], document(inspect_lora(path))
    assert (facts.kind, facts.family) == (full["kind"], full["family"])
    assert facts.format == full["form"].partition(",")[0]
    if facts.kind == "LoRA":
        assert {str(facts.rank)} == set(full["ranks"])
        assert full["alphas"] == [facts.alpha]


@pytest.mark.slow
def test_a_thousand_files_are_listed_from_what_was_read_before(
    client: TestClient, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write(output / "library" / "lora.safetensors").read_bytes()
    for number in range(999):
        (output / "library" / f"lora-{number}.safetensors").write_bytes(one)
    monkeypatch.setattr(lora_list, "AT_ONCE_SECONDS", 0.01)
    first = client.get("/api/loras").json()
    assert (first["count"], first["pending"] > 0) == (1000, True)
    monkeypatch.setattr(lora_list, "AT_ONCE_SECONDS", 60.0)
    assert client.get("/api/loras").json()["pending"] == 0

    def read(path: Path) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(lora_list, "read_lora_facts", read)
    for each in (client, site(output)):  # also the next server
        start = time.process_time()
        assert each.get("/api/loras").json()["count"] == 1000
        assert time.process_time() - start < 0.5
    (output / "library" / "lora-7.safetensors").unlink()
    assert client.get("/api/loras").json()["count"] == 999


def test_a_changed_file_is_read_again(client: TestClient, output: Path) -> None:
    path = write(output / "library" / "x.safetensors")
    assert rows_of(client)["x.safetensors"]["rank"] == 4
    write(path, tiny_loras.kohya(9))
    assert rows_of(client)["x.safetensors"]["rank"] == 9
    (output / ".ui" / "loras.json").write_text('{"version": 1, "files": 3}', encoding="utf-8")
    assert {row["rank"] for row in site(output).get("/api/loras").json()["loras"]} == {9}


def test_the_server_needs_no_torch(output: Path) -> None:
    """Its process stays small: what needs tensors is a task."""
    write(output / "library" / "x.safetensors")
    program = (
        "import sys; from pathlib import Path; from starlette.testclient import TestClient\n"
        "from lora_trainer.web.app import make_app; from lora_trainer.web.server_state import ServerOptions\n"
        f"client = TestClient(make_app(ServerOptions(Path({str(output)!r}))), base_url='http://127.0.0.1')\n"
        "row = client.get('/api/loras').json()['loras'][0]\n"
        "assert client.get(f'/api/loras/{row[\"id\"]}').json()['kind'] == 'LoRA'\n"
        "assert client.get(f'/api/loras/{row[\"id\"]}/bases').json()['bases']\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_only_folders_that_may_be_read_are_added(client: TestClient, output: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    write(others / "x.safetensors")
    for _ in range(2):
        assert client.post("/api/loras/folders", json={"path": str(others)}).status_code == 201
    (others / ".secret").mkdir()
    for path, status in {
        str(tmp_path): 403,
        "/etc": 403,
        f"{others}/../..": 403,
        f"{others}/.secret": 403,
        f"{output}/.ui": 403,
        f"{others}/x.safetensors": 422,
        "": 422,
        "\0": 403,
    }.items():
        answer = client.post("/api/loras/folders", json={"path": path})
        assert (path, answer.status_code) == (path, status)
        assert problems_of(answer.json())
    listed = client.get("/api/loras").json()["folders"]
    assert listed == [{"path": str(others), "count": 1, "is_there": True}]
    assert site(output).get("/api/loras").json()["loras"] == []  # a server without this root
    assert client.delete("/api/loras/folders", params={"path": "/etc"}).status_code == 404
    assert client.delete("/api/loras/folders", params={"path": str(others)}).status_code == 200
    assert (others / "x.safetensors").exists()
    assert client.get("/api/loras").json()["folders"] == []


@needs_links
def test_links_lead_nowhere_else(client: TestClient, output: Path, tmp_path: Path) -> None:
    secret = write(tmp_path / "elsewhere" / "secret.safetensors")
    library = output / "library"
    write(library / "own.safetensors")
    os.symlink(secret, library / "link.safetensors")
    os.symlink(secret.parent, tmp_path / "others" / "linked")
    os.symlink(library / "own.safetensors", library / "again.safetensors")
    client.post("/api/loras/folders", json={"path": str(tmp_path / "others")})
    assert set(rows_of(client)) == {"own.safetensors", "again.safetensors"}
    name = id_of(client, "again.safetensors")
    (library / "again.safetensors").unlink()
    os.symlink(secret, library / "again.safetensors")
    assert client.get(f"/api/loras/{name}/file").status_code == 404
    os.rename(library, output / "moved")
    os.symlink(secret.parent, library)
    assert rows_of(client) == {}
    asked = {"tool": "extract", "name": "x", "base": str(BASE_FOLDER), "tuned": str(BASE_FOLDER), "rank": 4}
    assert "a link" in problems_of(client.post("/api/loras/tools", json=asked).json())[0]


def tool(client: TestClient, **asked: Any) -> Any:
    return client.post("/api/loras/tools", json={"name": "new", **asked})


@pytest.fixture
def files(client: TestClient, output: Path) -> dict[str, str]:
    """The ids of a LoRA, another of the same family, a LoKr, a DoRA, one of another family, and a damaged file."""
    library = output / "library"
    for name, tensors in {
        "a": tiny_loras.kohya(),
        "b": tiny_loras.kohya(6, seed=5),
        "lokr": tiny_loras.lokr(),
        "dora": tiny_loras.dora(),
    }.items():
        write(library / f"{name}.safetensors", tensors, **SD15)
    write(library / "flux.safetensors", tiny_loras.flux(), ss_base_model_version="flux1")
    (library / "broken.safetensors").write_bytes(b"PK\x03\x04 is no LoRA")
    return {name.removesuffix(".safetensors"): row["id"] for name, row in rows_of(client).items()}


WRONG_TOOLS: list[tuple[dict[str, Any], list[str]]] = [
    ({"tool": "merge", "loras": []}, ["merge takes 1 to 32 files, not 0"]),
    ({"tool": "convert", "loras": ["a", "b"], "to": "kohya"}, ["convert takes 1 files"]),
    ({"tool": "convert", "loras": ["a"]}, ["convert needs a format"]),
    ({"tool": "convert", "loras": ["a"], "to": "lora"}, ["needs a rank"]),
    ({"tool": "convert", "loras": ["a"], "to": "kohya", "rank": 4}, ["kohya is exact"]),
    ({"tool": "convert", "loras": ["a"], "to": "comfyui"}, ["base model is needed", "a.safetensors is a LoRA"]),
    ({"tool": "convert", "loras": ["dora"], "to": "lora", "rank": 4}, ["changes a weight that it does not hold"]),
    ({"tool": "convert", "loras": ["lokr"], "to": "diffusers"}, ["lokr.safetensors is a LoKr"]),
    ({"tool": "convert", "loras": ["a"], "to": "kohya", "family": "sd9"}, ["sd9 is no family"]),
    ({"tool": "resize", "loras": ["a"]}, ["resize needs a limit"]),
    (
        {"tool": "resize", "loras": ["lokr"], "rank": 0, "frobenius": 2.0, "ratio": 0.5},
        ["rank is 0", "frobenius is 2", "ratio is 0.5", "is a LoKr: resize takes LoRA files"],
    ),
    ({"tool": "merge", "loras": ["a", "b"], "weights": [1.0]}, ["1 weight for 2 files"]),
    ({"tool": "merge", "loras": ["a", "b"], "weights": [0.0, 0.0]}, ["weights are all 0"]),
    ({"tool": "merge", "loras": ["a", "b"], "weights": [1.0, 1e9]}, ["over 100"]),
    ({"tool": "merge", "loras": ["a", "b"], "of": "updates"}, ["of is not for merge"]),
    ({"tool": "merge", "loras": ["a", "flux"]}, ["different models"]),
    ({"tool": "merge", "loras": ["a", "broken"]}, ["broken.safetensors"]),
    ({"tool": "merge", "loras": ["a", "0123"], "to": "comfyui"}, ["no LoRA 0123", "merge does not write comfyui"]),
    ({"tool": "average", "loras": ["a", "b"], "weights": [1.0, -2.0]}, ["sum to -1"]),
    ({"tool": "average", "loras": ["a", "b"], "of": "parameters", "rank": 3}, ["keeps the rank"]),
    ({"tool": "average", "run": "nobody"}, ["There is no run nobody"]),
    ({"tool": "extract"}, ["extract needs base, tuned, rank"]),
    (
        {"tool": "extract", "base": "/etc", "tuned": f"{BASE_FOLDER}/none", "rank": 4},
        ["/etc is outside", "is not there"],
    ),
    ({"tool": "resize", "loras": ["a"], "rank": 2, "name": "../x"}, ["'../x' is not a name"]),
    ({"tool": "resize", "loras": ["a"], "rank": 0, "name": "b"}, ["rank is 0", "There is a LoRA b"]),
]


def test_all_that_is_wrong_with_a_tool_is_said_before_it_starts(
    client: TestClient, files: dict[str, str], started: list[Any]
) -> None:
    for asked, words in WRONG_TOOLS:
        loras = [files.get(each, each) for each in asked.get("loras", [])]
        answer = tool(client, **{**asked, **({"loras": loras} if "loras" in asked else {})})
        assert answer.status_code == 422, asked
        problems = problems_of(answer.json())
        assert len(problems) == len(words), problems
        assert all(any(word in problem for problem in problems) for word in words), problems
    assert started == []


def test_the_tools_write_into_the_library(
    client: TestClient, output: Path, files: dict[str, str], started: list[Any]
) -> None:
    """What is started is a command that works, and its file appears by itself."""
    a, b = files["a"], files["b"]
    for asked in (
        {"tool": "merge", "name": "both + more", "loras": [a, b], "weights": [1.0, -0.00002]},
        {"tool": "merge", "name": "less", "loras": [a, b], "rank": 3, "to": "diffusers", "dtype": "fp16"},
        {"tool": "average", "name": "mean", "loras": [a, b], "weights": [1.0, 3.0]},
        {"tool": "resize", "name": "small", "loras": [a], "rank": 2, "frobenius": 0.99},
        {"tool": "convert", "name": "other.safetensors", "loras": [a], "to": "diffusers"},
        {"tool": "convert", "name": "plain", "loras": [files["lokr"]], "to": "lora", "rank": 3},
        {"tool": "average", "name": "Größe", "loras": [a, b], "rank": 2},
    ):
        row = tool(client, **asked)
        assert row.status_code == 201, row.json()
        assert tool(client, **asked).status_code == 409  # it is being written
        assert main(started[-1]["arguments"]) == 0, started[-1]
        started[-1]["status"] = "done"
        answer = tool(client, **asked)
        assert answer.status_code == 409
        assert "Choose another name" in answer.json()["problems"][0]["fix"]
        found = client.get(f"/api/loras/{row.json()['about']['lora']}").json()
        assert found["name"] == f"{asked['name'].removesuffix('.safetensors')}.safetensors"
        assert found["from"] == "library"
    rows = rows_of(client)
    assert [rows[f"{name}.safetensors"]["rank"] for name in ("both + more", "less", "small", "plain")] == [10, 3, 2, 3]
    assert rows["both + more.safetensors"]["made_of"] == "a.safetensors, b.safetensors"
    assert rows["other.safetensors"]["format"] == "diffusers"
    write_run(output / "cat")
    tool(client, tool="average", name="ema", run="cat", decay=0.8)
    assert started[-1]["arguments"][:3] == ["average", str(output / "cat"), "--decay=0.8"]
    tool(client, tool="extract", name="taken", base=str(BASE_FOLDER), tuned=str(BASE_FOLDER), rank=4, type="lokr")
    assert started[-1]["arguments"][:5] == ["extract", *2 * [str(BASE_FOLDER)], "--type=lokr", "--rank=4"]


def test_only_files_of_the_library_are_deleted(client: TestClient, output: Path, files: dict[str, str]) -> None:
    write_run(output / "cat")
    write(output / "cat" / "cat.safetensors")
    write(output / "library" / "a.embedding-zobo.safetensors")
    answer = client.delete(f"/api/loras/{id_of(client, 'cat.safetensors')}")
    assert (answer.status_code, answer.json()["problems"][0]["fix"]) == (
        409,
        "Delete its run, or the file where it is.",
    )
    trash = Path(client.delete(f"/api/loras/{files['a']}").json()["moved_to"])
    assert {path.name for path in trash.iterdir()} == {"a.safetensors", "a.embedding-zobo.safetensors"}
    assert trash.is_relative_to(output / ".ui" / "trash")
    assert client.get(f"/api/loras/{files['a']}").status_code == 404
    assert client.delete(f"/api/loras/{files['broken']}").status_code == 200  # a damaged one as well


def sheet(client: TestClient, lora: str, **asked: Any) -> Any:
    return client.post("/api/loras/sheets", json={"lora": lora, "prompts": [HOSTILE, "b"], **asked})


def test_a_sheet_shows_its_images_as_they_come(
    client: TestClient, output: Path, files: dict[str, str], started: list[Any]
) -> None:
    answer = sheet(
        client, files["a"], strengths=[0.5, -1.0, 0.5], seeds=[3, 4], num_inference_steps=2, width=64, height=96
    )
    assert answer.status_code == 201
    assert started[0]["arguments"] == [
        *("sample", str(output / "library" / "a.safetensors"), "--offline", f"--model={BASE_FOLDER}"),
        *(f"--prompt={HOSTILE}", "--prompt=b", "--strength=0.5", "--strength=-1.0", "--seed=3", "--seed=4"),
        *("--num-inference-steps=2", "--size=64x96", f"--output={output / '.ui' / 'sheets' / '1'}"),
    ]
    found = answer.json()
    assert found["columns"] == [None, 0.5, -1.0]
    assert [(row["prompt"], row["seed"]) for row in found["rows"]] == [(HOSTILE, 3), (HOSTILE, 4), ("b", 3), ("b", 4)]
    folder = output / ".ui" / "sheets" / "1"
    Image.new("RGB", (8, 8), "red").save(folder / image_name("a_before_after", 1, 0.5))
    row = client.get("/api/loras/sheets/1").json()["rows"][1]
    assert row["urls"] == [None, "/api/loras/sheets/1/images/1/1", None]
    assert client.get(row["urls"][1]).headers["content-type"] == "image/png"
    assert client.get(f"{row['urls'][1]}?width=32").headers["content-type"] == "image/webp"
    for wrong in ("0/0", "1/0", "99/1", "1/99"):
        assert client.get(f"/api/loras/sheets/1/images/{wrong}").status_code == 404
    for wrong in ("-1/1", "x/1", "1/1e3", "../1"):
        assert client.get(f"/api/loras/sheets/1/images/{wrong}").status_code in (404, 422)
    assert client.delete("/api/loras/sheets/1").status_code == 409
    Image.new("RGB", (8, 8), "red").save(folder / image_name("a_before_after", 0, 0.5))
    assert rows_of(client)["a.safetensors"]["preview"] == "/api/loras/sheets/1/images/0/1"
    # At the end the recipe has the prompts as they were used.
    used = {"images": [{"prompt": "zobo", "seed": 3}], "steps": 2, "size": [64, 96], "family": "sd15"}
    write_json(folder / "a_before_after.json", used)
    started[0]["status"] = "done"
    found = client.get(f"/api/loras/sheets?lora={files['a']}").json()["sheets"][0]
    assert (found["rows"][0]["prompt"], found["steps"], found["base"]) == ("zobo", 2, "built-in miniature model")
    assert client.get("/api/loras/sheets?lora=none").json() == {"sheets": []}
    assert client.delete("/api/loras/sheets/1").status_code == 200
    assert client.get("/api/loras/sheets").json() == {"sheets": []}


def test_old_sheets_are_removed(
    client: TestClient, output: Path, files: dict[str, str], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_sheets, "MOST_SHEETS", 2)
    for _ in range(4):
        assert sheet(client, files["a"]).status_code == 201
        started[-1]["status"] = "running" if len(started) == 1 else "done"
    names = [each["id"] for each in client.get("/api/loras/sheets").json()["sheets"]]
    assert names == ["4", "3", "1"]  # the first one is still being generated
    (output / ".ui" / "sheets" / "4" / "sheet.json").write_text("[]", encoding="utf-8")
    assert client.get("/api/loras/sheets").json()["sheets"][0]["status"] == "damaged"
    assert client.get("/api/loras").status_code == 200


def test_a_sheet_that_was_not_started_leaves_nothing(
    client: TestClient, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_trainer.web.tasks.MOST_RUNNING", 0)
    assert sheet(client, files["a"]).status_code == 409
    assert client.get("/api/loras/sheets").json() == {"sheets": []}


def test_a_sheet_needs_a_base_model_that_may_be_read(
    client: TestClient, output: Path, files: dict[str, str], started: list[Any]
) -> None:
    run = write_run(output / "cat")
    write(run / "cat.safetensors", **SD15)
    write(run / "weights" / "cat-step-000020.safetensors", **SD15)
    record = read_json(run / "run.json")
    base = output / "base"
    base.mkdir()
    for path, status in {str(base): 201, "/etc": 403}.items():
        record["config"]["model"]["path"] = path
        write_json(run / "run.json", record)
        answer = sheet(client, id_of(client, "cat.safetensors"))
        assert answer.status_code == (201 if status == 201 else 422)
    # The command reads the run's own base model and its parts; beside the files of steps is no record.
    assert not any(each.startswith("--model") for each in started[0]["arguments"])
    record["config"]["model"]["path"] = str(base)
    write_json(run / "run.json", record)
    sheet(client, id_of(client, "cat-step-000020.safetensors"))
    assert f"--model={base}" in started[1]["arguments"]
    found = client.get(f"/api/loras/{id_of(client, 'cat.safetensors')}/bases").json()["bases"]
    assert [(each["name"], each["is_default"], each["fits"]) for each in found] == [
        ("base", True, True),
        ("built-in miniature model", False, True),
    ]
    others = client.get(f"/api/loras/{files['flux']}/bases").json()["bases"]
    assert {each["fits"] for each in others} == {False}
    assert sheet(client, files["a"], model="owner/name").status_code == 201
    assert "--model=owner/name" in started[2]["arguments"]


HOSTILE_SHEETS: list[dict[str, Any]] = [
    {"model": "/etc/passwd"},
    {"model": f"{BASE_FOLDER}/../../../../../../etc"},
    {"model": "\0"},
    {"prompts": ["a\0b"]},
    {"prompts": ["\ud800"]},
    {"prompts": [" "]},
    {"prompts": ["x"] * 33},
    {"prompts": ["x", "y"], "seeds": list(range(16)), "strengths": [each / 10 for each in range(16)]},
    {"strengths": [1e300]},
    {"seeds": [-1]},
    {"width": 64},
    {"width": 10**9, "height": 64},
    {"num_inference_steps": 10**9},
    {"lora": "../../etc/passwd"},
    {"output": "/etc"},
    {"settings": {"run.on_finish": "touch /tmp/x"}},
]


def test_hostile_sheets_start_nothing(
    client: TestClient, output: Path, files: dict[str, str], started: list[Any]
) -> None:
    for asked in HOSTILE_SHEETS:
        body = json.dumps({"lora": files["a"], "prompts": ["x"], **asked})
        answer = client.post("/api/loras/sheets", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (404, 422), asked
        assert problems_of(answer.json())
    assert started == []
    assert not (output / ".ui" / "sheets").exists()


def test_an_id_names_nothing_but_what_is_listed(client: TestClient, files: dict[str, str]) -> None:
    asked = [*(("GET", each) for each in ("", "/file", "/preview", "/bases")), ("DELETE", ""), ("POST", "/inspect")]
    for name in ("..", "%2e%2e%2fcat", "0123456789abcdef", "a/../b", "x" * 300, "<b>", "*", "~"):
        for method, path in asked:
            answer = client.request(method, f"/api/loras/{name}{path}")
            assert answer.status_code in (404, 405), (method, name, path)
            assert problems_of(answer.json())


def test_no_name_leads_out_of_the_library(client: TestClient, files: dict[str, str], started: list[Any]) -> None:
    outside = ("../a", "/etc/x", "a/b", "a\\b", ".hidden", "-rf", "a\nb", "a\0", "a:b", "<b>", "\u202e")
    for name in (*outside, "", " ", "x" * 121, "a.embedding-b"):
        answer = tool(client, tool="resize", loras=[files["a"]], rank=2, name=name)
        assert answer.status_code == 422, name
    assert started == []


def test_a_file_is_inspected_once(
    client: TestClient, files: dict[str, str], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert client.post(f"/api/loras/{files['a']}/inspect").status_code == 201
    assert [each["arguments"][0] for each in started] == ["inspect"]
    started[0]["status"] = "failed"  # as for a damaged file, which has a document nevertheless
    monkeypatch.setattr(app_of(client).state.server.tasks, "document", lambda name: {"kind": "LoRA"})
    assert client.get(f"/api/loras/{files['a']}").json()["inspection"] == {"kind": "LoRA"}
    client.post(f"/api/loras/{files['a']}/inspect")
    assert len(started) == 1
    monkeypatch.setattr(app_of(client).state.server.tasks, "document", lambda name: None)
    client.post(f"/api/loras/{files['a']}/inspect")
    assert len(started) == 2


@pytest.mark.slow  # the commands of the fast tests, in processes of their own
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_commands_run_and_their_results_are_shown(client: TestClient, files: dict[str, str]) -> None:
    def ended(row: dict[str, Any]) -> dict[str, Any]:
        for _ in range(600):
            found: dict[str, Any] = client.get(f"/api/tasks/{row['id']}").json()
            if found["status"] != "running":
                return found
            time.sleep(0.2)
        raise AssertionError(found)

    found = ended(tool(client, tool="resize", loras=[files["a"]], rank=2).json())
    assert (found["status"], len(found["document"]["layers"])) == ("done", 2)
    assert "rank 4 -> 2" in found["last_line"]
    assert rows_of(client)["new.safetensors"]["rank"] == 2
    ended(client.post(f"/api/loras/{files['a']}/inspect").json())
    clients = client.get(f"/api/loras/{files['a']}").json()["inspection"]["clients"]
    assert {each["name"] for each in clients} >= {"ComfyUI", "diffusers"}
    wrong = ended(sheet(client, files["flux"], num_inference_steps=1).json()["task"])
    assert wrong["status"] == "failed"
    assert "flux" in wrong["last_line"]
