"""`metrics`: a real request to the server, over runs of every state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.report.prometheus import find_runs, newest_row, serve_metrics

pytest.importorskip("prometheus_client", reason="pip install 'lora-trainer[metrics]'")


def make_run(folder: Path, status: str, rows: int) -> Path:
    folder.mkdir(parents=True)
    record = {"status": status, "scores": {"dataset": 1.0, "lora": None}, "arithmetic": {"total": 100}}
    (folder / "run.json").write_text(json.dumps(record))
    lines = [json.dumps({"step": step, "loss": 1 / step, "lr": 1e-4, "skipped": None}) for step in range(1, rows + 1)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "lo']))
    return folder


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    make_run(tmp_path / "runs" / "cat", "running", 4)
    make_run(tmp_path / "runs" / "night" / 'a "dog"', "done", 2)
    server = serve_metrics([tmp_path / "runs", tmp_path / "runs" / "cat"], "127.0.0.1", 0)
    yield tmp_path / "runs", f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


def read(address: str) -> dict[str, float]:
    with urllib.request.urlopen(address, timeout=300) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    lines = text.splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "each metric is described once"
    assert {line.split()[3] for line in lines if line.startswith("# TYPE")} == {"gauge"}
    found = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    assert len({series for series, _, _ in found}) == len(found), "each series is there once"
    return {series: float(value) for series, _, value in found}


def test_the_newest_numbers_of_all_runs_are_served(served: tuple[Path, str]) -> None:
    root, address = served
    shown = read(address)
    cat, dog = f'folder="{root}/cat",run="cat"', f'folder="{root}/night/a \\"dog\\"",run="a \\"dog\\""'
    for labels, step in ((cat, 4), (dog, 2)):
        assert shown[f"lora_trainer_train_step{{{labels}}}"] == step
        assert shown[f"lora_trainer_train_loss{{{labels}}}"] == 1 / step
        assert shown[f"lora_trainer_run_steps_planned{{{labels}}}"] == 100
    assert shown[f'lora_trainer_run_status{{{cat},status="running"}}'] == 1
    assert shown[f'lora_trainer_run_status{{{dog},status="running"}}'] == 0
    assert not any("skipped" in series or 'of="lora"' in series for series in shown), "null has no number"
    with (root / "cat" / "system.jsonl").open("w") as file:
        file.write('{"step": 5, "gpu_utilization": 0.5, "disk MB/s": 3}\n')
    again = read(address)
    assert again[f"lora_trainer_system_gpu_utilization{{{cat}}}"] == 0.5
    assert again[f"lora_trainer_system_disk_MB_s{{{cat}}}"] == 3


def test_damaged_files_hide_no_other_run(served: tuple[Path, str]) -> None:
    root, address = served
    (root / "cat" / "run.json").write_text("[")
    (root / "cat" / "metrics.jsonl").write_bytes(b"\xff\n{}\n[1]\n")
    shown = read(address)
    assert any('run="a \\"dog\\""' in series for series in shown)
    assert not any("train_step" in series and 'run="cat"' in series for series in shown)


def test_the_newest_row_is_found_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "x": "y" * 200}) + "\n" for step in range(2000)))
    assert newest_row(path)[0]["step"] == 1999
    assert newest_row(tmp_path / "missing") == ({}, 0.0)
    assert find_runs([tmp_path]) == []


@pytest.mark.skipif(os.name == "nt", reason="SIGTERM ends a process there at once")
def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    make_run(tmp_path / "cat", "running", 3)
    command = [sys.executable, "-m", "lora_trainer", "metrics", "--port", "0", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            shown = read(line.split(": ")[0])
        finally:
            process.terminate()
    assert "1 run now" in line
    assert any(series.startswith("lora_trainer_train_loss") for series in shown)
    assert process.returncode == 143


@pytest.mark.parametrize(
    ("arguments", "message"), [(["missing"], "is not a folder"), ([".", "--port", "70000"], "no port")]
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", *arguments]) == 2
    assert message in capsys.readouterr().err
