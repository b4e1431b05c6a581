"""The targets of the report: each next to its measurement, if there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cli.main import main
from lora_trainer.report import write_comparison
from lora_trainer.report.read import read_run
from lora_trainer.report.targets import Target, targets_of
from lora_trainer.report.write import render_run

SEEN = {"gpu_utilization": 0.91, "memory": 0.62, "cpu": 0.3, "system_memory": 0.5, "io_wait": 0.2}


def targets(folder: Path, **record: Any) -> dict[str, Target]:
    (folder / "run.json").write_text(json.dumps({"name": "run", "status": "done", "config": {"run": {}}, **record}))
    rows = [{"step": step, "seconds": 1.0, "data_seconds": 0.02} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    assert ("The machine" in render_run(run)) == bool(targets_of(run))
    return {target.name: target for target in targets_of(run)}


def test_a_gpu_is_compared_with_its_targets(tmp_path):
    stalls = {"stall_seconds": {"median": 0.02}}
    found = targets(tmp_path, seen=SEEN, hardware={"device": "cuda:0"}, checkpoints=stalls)
    assert {name: (target.seen, target.met) for name, target in found.items()} == {
        "GPU utilization": ("91.0 %", True),
        "GPU memory, of what is allowed": ("62.0 %", False),
        "CPU utilization": ("30.0 %", True),
        "system memory (RAM)": ("50.0 %", True),
        "I/O wait": ("20.0 %", False),
        "steps wait for data": ("2.0 %", False),  # with caches 1 % is allowed
        "a checkpoint stops the steps": ("20 ms", True),
    }
    without = targets(tmp_path, seen=SEEN, config={"cache": {"latents": False}})
    assert without["steps wait for data"].met


def test_a_cpu_and_an_older_run_have_measurements_only(tmp_path):
    assert list(targets(tmp_path, seen=SEEN, hardware={"device": "cpu"})) == [
        "system memory (RAM)",
        "I/O wait",
        "steps wait for data",
    ]
    assert list(targets(tmp_path)) == ["steps wait for data"]


def test_an_idle_gpu_is_explained_in_the_report_and_by_the_command(tmp_path, capsys):
    row = {"seconds": 10.0, "gpu_utilization": 0.5, "gpu_memory": 0.4, "gpu_celsius": 55.0, "main_thread": 0.98}
    rows = [{"step": step, **row, "cpu": 0.2, "system_memory": 0.3} for step in (10, 20, 30)]
    (tmp_path / "system.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    setup = {"micro": 2, "samples": 2, "largest_micro": 6, "compiled": False, "cached": "damaged"}
    found = targets(tmp_path, hardware={"device": "cuda:0"}, setup=setup, seen={"memory": 0.4})
    assert (found["GPU utilization"].seen, found["GPU utilization"].met) == ("50.0 %", False)
    assert found["GPU memory, of what is allowed"].about.startswith("A micro-batch of 6 fits")
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "GPU utilization 50%: the CPU launches the GPU's work too slowly" in said
    assert "lora-trainer bench step --config config.toml --compare compile.enabled=true" in said
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "--compare compile.enabled=true" in page
    assert 'id="chart-gpu"' in page
    assert 'id="chart-host"' in page


def test_a_gpu_that_was_not_measured_is_named_with_the_reason(tmp_path):
    why = "a package is missing: pip install 'lora-trainer[gpu]'"
    found = targets(tmp_path, hardware={"device": "cuda:0"}, seen={"gpu_not_measured": why})["GPU utilization"]
    assert (found.seen, found.met, found.about) == ("", None, why)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({}, "It was trained by an earlier version, which recorded no system.jsonl."),
        ({"system_every_seconds": 0.0}, "run.system_every_seconds=0 measures nothing."),
        ({"system_every_seconds": 10.0}, "No interval of run.system_every_seconds=10 was full."),
    ],
)
def test_a_gpu_without_rows_is_explained_by_the_settings(run: dict[str, float], why: str, tmp_path: Path) -> None:
    found = targets(tmp_path, hardware={"device": "cuda:0"}, seen={"utilisation": 0.9}, config={"run": run})
    assert found["GPU utilization"].about == why


def test_a_run_that_is_written_while_runs_are_compared_stays_itself(tmp_path: Path, monkeypatch) -> None:
    """Its record is read once: the page and the count of failures agree."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        record = {"name": name, "status": "failed", "exit_code": 5, "reason": "Out of memory.", "started": 1.0}
        (tmp_path / name / "run.json").write_text(json.dumps(record), "utf-8")
    read, opened = Path.read_text, list[str]()
    monkeypatch.setattr(Path, "read_text", lambda path, *a, **k: opened.append(path.name) or read(path, *a, **k))
    failures = write_comparison([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html")
    assert opened.count("run.json") == 2
    assert failures.failed == 2
