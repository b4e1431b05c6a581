"""A run repeated from its saved config, and the differences reported when a run resumes."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from lora_trainer.cli.main import main
from lora_trainer.monitor.trackers import Trackers
from tests.recipes.recipe import Bench, contents, exported, losses, patched, record, rows
from tests.recipes.test_resume import stop

pytestmark = pytest.mark.exact


def test_the_saved_config_repeats_a_run_from_another_folder(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Presets, hardware choices, relative paths and prompts, all from one file."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    shutil.copytree(bench.model, home / "model")
    shutil.copytree(bench.data, home / "images")
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    settings = ['sample.prompts=["a ring"]', "sample.num_inference_steps=2", "cache.dir=caches", "lora.dropout=0.1"]
    settings += ["data.resolution=64", "train.effective_batch_size=2", "validation.every_n_steps=2", "lora.rank=4"]
    settings += ["gates.lora_check=lite"]
    chosen = [part for each in settings for part in ("--set", each)]
    places = ["--model", "model", "--data", "images", "--output", "runs", "--name", "first"]
    assert main(["train", "--preset", "12gb,speed", *places, "--max-steps", "4", *chosen]) == 0
    before = contents(home / "caches")
    monkeypatch.chdir(elsewhere)
    torch.rand(7)  # dropout depends on the seed, not on earlier work of the process
    assert main(["train", "--config", str(home / "runs" / "first" / "config.toml"), "--name", "again"]) == 0
    assert list(elsewhere.iterdir()) == []
    assert contents(home / "caches").keys() == before.keys(), "everything was cached already"
    first, again = home / "runs" / "first", home / "runs" / "again"
    assert losses(first) == losses(again)
    assert list(exported(first).values()) == list(exported(again).values())
    assert rows(first, "validation.jsonl") == rows(again, "validation.jsonl")
    assert record(again)["changed"] == []


def change_record(folder: Path, **changes: dict[str, object]) -> None:
    document = record(folder)
    for part, values in changes.items():
        document[part] = document[part] | values
    (folder / "run.json").write_text(json.dumps(document), encoding="utf-8")


def test_a_resumed_run_reports_differences(bench, capsys):
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert bench.run("moved") == 143
    change_record(bench.folder("moved"), versions={"torch": "2.0.0"}, hardware={"threads": 64})
    capsys.readouterr()
    assert bench.run("moved", "--resume", optimizer__learning_rate="2e-2", gates__lora="0.5") == 0
    output = capsys.readouterr().out
    versions = record(bench.folder("moved"))["versions"]
    assert "changed: optimizer.learning_rate 0.01 → 0.02" in output
    assert "changed: gates.lora 0.9 → 0.5" in output
    assert f"other versions: torch 2.0.0 → {versions['torch']}; results may differ in rounding" in output
    assert "another machine: threads 64 → " in output
    threads = record(bench.folder("moved"))["hardware"]["threads"]
    differences = [
        "optimizer.learning_rate 0.01 → 0.02",
        f"torch 2.0.0 → {versions['torch']}",
        f"threads 64 → {threads}",
    ]
    assert record(bench.folder("moved"))["changed"] == differences
    (event,) = [event for event in record(bench.folder("moved"))["events"] if event["kind"] == "resumed"]
    assert event == {"step": 3, "kind": "resumed", "message": "; ".join(["resumed at step 3", *differences])}


def test_a_repeated_run_reports_differences(finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished.folder("first"), tmp_path / "first"))
    change_record(folder, versions={"peft": "0.1"}, hardware={"machine": "riscv"})
    capsys.readouterr()
    assert main(["train", "--config", str(folder / "config.toml"), "--output", str(tmp_path), "--name", "again"]) == 0
    output = capsys.readouterr().out
    assert "other versions: peft 0.1 → " in output
    assert "another machine: machine riscv → " in output
    assert "this run does not repeat it" not in output
    assert len(record(tmp_path / "again")["changed"]) == 2


def test_a_repeat_on_other_data_is_reported(bench, tmp_path, capsys):
    data = Path(shutil.copytree(bench.data, tmp_path / "images"))
    own = Bench(bench.model, data, bench.output, bench.cache)
    assert own.run("first", steps=1) == 0
    (data / "image_0.txt").write_text("another caption", encoding="utf-8")
    config = str(own.folder("first") / "config.toml")
    capsys.readouterr()
    assert main(["train", "--config", config, "--name", "again"]) == 0
    assert "the data differs from that of first: this run does not repeat it" in capsys.readouterr().out


def test_another_vae_or_noise_is_refused_on_resume(bench, tmp_path, capsys):
    own = Bench(Path(shutil.copytree(bench.model, tmp_path / "model")), bench.data, bench.output, bench.cache)
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert own.run("swapped") == 143
    weights = own.model / "vae" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    scheduler = own.model / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text("utf-8").replace("0.012", "0.013"), encoding="utf-8")
    assert own.run("swapped", "--resume") == 2
    printed = capsys.readouterr().err
    assert "The model's VAE differs from the one at the start of the run." in printed
    assert "the model's noise was \"epsilon, 1000 timesteps, signal " in printed
    assert "text encoder" not in printed
