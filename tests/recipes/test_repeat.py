"""A run repeated from its own config, from elsewhere; and what is said where a run goes on otherwise than before."""

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


def test_its_config_repeats_a_run_from_another_folder(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Presets, what the hardware decided, relative paths and prompts, all from the one file."""
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
    torch.rand(7)  # dropout is drawn from the seed, whatever was computed in the process before
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


def test_a_resumed_run_says_what_differs(bench, capsys):
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert bench.run("moved") == 143
    change_record(bench.folder("moved"), versions={"torch": "2.0.0"}, hardware={"threads": 64})
    capsys.readouterr()
    assert bench.run("moved", "--resume", optimizer__learning_rate="2e-2", gates__lora="0.5") == 0
    said = capsys.readouterr().out
    versions = record(bench.folder("moved"))["versions"]
    assert "changed: optimizer.learning_rate 0.01 → 0.02" in said
    assert "changed: gates.lora 0.9 → 0.5" in said
    assert f"other versions: torch 2.0.0 → {versions['torch']}; results may differ in rounding" in said
    assert "another machine: threads 64 → " in said
    threads = record(bench.folder("moved"))["hardware"]["threads"]
    told = ["optimizer.learning_rate 0.01 → 0.02", f"torch 2.0.0 → {versions['torch']}", f"threads 64 → {threads}"]
    assert record(bench.folder("moved"))["changed"] == told
    (event,) = [event for event in record(bench.folder("moved"))["events"] if event["kind"] == "resumed"]
    assert event == {"step": 3, "kind": "resumed", "message": "; ".join(["went on from step 3", *told])}


def test_a_repeated_run_says_what_differs(finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished.folder("first"), tmp_path / "first"))
    change_record(folder, versions={"peft": "0.1"}, hardware={"machine": "riscv"})
    capsys.readouterr()
    assert main(["train", "--config", str(folder / "config.toml"), "--output", str(tmp_path), "--name", "again"]) == 0
    said = capsys.readouterr().out
    assert "other versions: peft 0.1 → " in said
    assert "another machine: machine riscv → " in said
    assert "this run does not repeat it" not in said
    assert len(record(tmp_path / "again")["changed"]) == 2


def test_a_repetition_on_other_data_is_told(bench, tmp_path, capsys):
    data = Path(shutil.copytree(bench.data, tmp_path / "images"))
    own = Bench(bench.model, data, bench.output, bench.cache)
    assert own.run("first", steps=1) == 0
    (data / "image_0.txt").write_text("another caption", encoding="utf-8")
    config = str(own.folder("first") / "config.toml")
    capsys.readouterr()
    assert main(["train", "--config", config, "--name", "again"]) == 0
    assert "the data is not what first was trained on: this run does not repeat it" in capsys.readouterr().out


def test_another_autoencoder_or_noise_is_refused_on_resume(bench, tmp_path, capsys):
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
    said = capsys.readouterr().err
    assert "The model's VAE differs from the one that the run began with." in said
    assert "the model's noise was \"epsilon, 1000 timesteps, signal " in said
    assert "text encoder" not in said
