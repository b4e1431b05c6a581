"""`doctor RUN` on a run that is training, was killed, is finished, or was damaged."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.doctor.during import during_lines, sign_of_life
from lora_trainer.doctor.run_facts import read_run_facts
from lora_trainer.monitor.idle import IdleSetup, fix_of
from lora_trainer.run_folder.progress import Progress
from tests.at_work import at_work
from tests.doctor.planted import HEALTHY, REAL, SAMPLE
from tests.recipes.recipe import Bench, record


@pytest.fixture
def cat(finished: Bench, tmp_path: Path) -> Path:
    """A copy of a finished run, named `cat`."""
    folder = tmp_path / "cat"
    shutil.copytree(finished.folder("first"), folder)
    for path in folder.glob("first*"):
        path.rename(folder / path.name.replace("first", "cat", 1))
    document = record(folder)
    files = {kind: name and name.replace("first", "cat", 1) for kind, name in document["files"].items()}
    change(folder, name="cat", files=files)
    return folder


def change(folder: Path, **values: object) -> None:
    """Other values in the run's record."""
    (folder / "run.json").write_text(json.dumps(record(folder) | values), encoding="utf-8")


def flip(path: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def of_the_run(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, list[str]]:
    """Exit code, and the lines below the machine's."""
    code = main(["doctor", str(folder)])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    start = next(index for index, line in enumerate(lines) if line in ("After the run", "During the run"))
    return code, lines[start:]


def test_a_finished_run(cat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in cat.rglob("*") if path.is_file()}
    _, lines = of_the_run(capsys, cat)
    assert lines[0] == "After the run"
    assert any(line.startswith("ok      files: ") and "cat.safetensors" in line for line in lines)
    assert any(line.startswith("ok      files: ") and "checkpoints/step-000006" in line for line in lines)
    assert any(" status: done: " in line for line in lines)
    assert not any(line.startswith("error   files") for line in lines)
    assert {path: path.read_bytes() for path in cat.rglob("*") if path.is_file()} == before, "nothing is changed"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a changed LoRA file": lambda run: flip(run / "cat.safetensors"),
    "a changed checkpoint": lambda run: flip(run / "checkpoints" / "step-000006" / "adapter.safetensors"),
    "a LoRA file that is gone": lambda run: (run / "cat.diffusers.safetensors").unlink(),
    "a record that is damaged": lambda run: (run / "run.json").write_text('{"name": "ca', encoding="utf-8"),
    "a run that was killed": lambda run: change(run, status="running"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_run_says_what_and_how_to_go_back(fault: str, cat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGE[fault](cat)
    code, lines = of_the_run(capsys, cat)
    assert code == 2
    assert REAL[fault][1] in lines
    fix = lines[lines.index(REAL[fault][1]) + 1]
    assert fix.startswith("fix: ")
    if fault == "a run that was killed":
        assert fix.endswith("--resume")
        assert str(cat.parent) in fix


def test_a_failed_run_names_its_reason_and_the_command_that_continues(
    cat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(cat, status="failed", reason="Out of memory.", versions={"torch": "2.8.0"})
    code, lines = of_the_run(capsys, cat)
    assert code == 2
    assert any(line.startswith("error   status: failed: ") and "Out of memory." in line for line in lines)
    assert any(line.startswith("warning versions of the run: torch 2.8.0 is now ") for line in lines)
    assert any(line.startswith("fix: lora-trainer ") and line.endswith("--resume") for line in lines)


def test_a_run_that_trains(cat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process and its step are read, and events are reported."""
    change(cat, status="running")
    event = {"step": 5, "kind": "starved", "message": "steps wait 12.0% of their time for data"}
    (cat / "events.jsonl").write_text(json.dumps(event) + "\n", encoding="utf-8")
    with at_work(cat, Progress("training", 6, 6, loss=0.5)):
        code, lines = of_the_run(capsys, cat)
    text = "\n".join(lines)
    assert lines[0] == "During the run"
    assert "ok      progress: step 6 of 6 (100%), loss " in text
    assert "warning event starved: 1 event, the last at step 5: steps wait 12.0%" in text
    assert f"ok      process: {os.getpid()}" in text
    assert "ok      disk: " in text
    assert "ok      sign of life: " in text
    assert code in (0, 2), "the machine's own lines decide"


def test_a_run_that_is_in_trouble(cat: Path) -> None:
    """No progress for an hour, a loss that is no number, a slow disk, and a GPU that idles."""
    hour = time.time() - 3600
    rows = [json.loads(line) for line in (cat / "metrics.jsonl").read_text("utf-8").splitlines()]
    slow = [{**row, "seconds": 1.0, "data_seconds": 0.5} for row in rows]
    slow[-1] |= {"loss": None}
    idle = {"seconds": 60.0, "gpu_utilization": 0.31, "gpu_memory": 0.42, "gpu_celsius": 57.0, "main_thread": 0.98}
    gpus = [{"utilization": 0.6}, {"utilization": 0.02}]
    system = [{"step": step, **idle, "gpus": gpus} for step in range(3)]
    (cat / "system.jsonl").write_text("".join(json.dumps(row) + "\n" for row in system), encoding="utf-8")
    (cat / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in slow), encoding="utf-8")
    change(cat, status="running", hardware={"device": "cuda:0"})
    with at_work(cat):
        written = json.loads((cat / "progress.json").read_text("utf-8"))
    (cat / "progress.json").write_text(json.dumps(written | {"reported": hour}), encoding="utf-8")
    other = replace(SAMPLE, utilization=1.0)  # the first GPU of the machine, which is not the run's
    run = read_run_facts(cat)
    assert run.live is not None
    found = {line.name: line for line in during_lines(run, run.live, replace(HEALTHY, sample=other))}
    assert {name for name, line in found.items() if line.level == "warning"} >= {
        "sign of life",
        "progress",
        "data",
        "GPU",
    }
    assert "SIGTERM" in found["sign of life"].fix
    for phase, silent, level in (("caching", 3700.0, "warning"), ("validating", 3500.0, "ok")):
        reported = time.time() - silent
        (cat / "progress.json").write_text(json.dumps(written | {"phase": phase, "reported": reported}), "utf-8")
        live = read_run_facts(cat).live
        assert live is not None
        assert [line.level for line in sign_of_life(run, live)] == [level]
    assert "not finite" in found["progress"].found
    assert "50.0%" in found["data"].found
    assert found["data"].fix == fix_of("data", IdleSetup())[0]
    assert found["GPU"].found.startswith("31% in use in the last 03:00, memory 42%, up to 57 degrees: the CPU launches")
    assert found["GPU"].fix.startswith(fix_of("launches", IdleSetup())[0])
