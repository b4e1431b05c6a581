"""`gates.encoder` through the commands: recorded, refused before training, free on resuming."""

from __future__ import annotations

import json
import shutil

from lora_trainer.cli.main import main
from lora_trainer.evaluation.lora_report import NO_ENCODER
from tests.evaluation.tiny_encoders import save_tiny_dino
from tests.recipes.recipe import record

LITE = {"gates__lora_check": "lite"}


def test_a_run_names_the_encoder_that_compared_its_images(bench, tmp_path, capsys):
    dino = save_tiny_dino(tmp_path / "dino")
    assert bench.run("seen", steps=2, gates__encoder=str(dino), **LITE) == 0
    found = record(bench.folder("seen"))
    assert (found["lora"]["encoder"], found["config"]["gates"]["encoder"]) == (str(dino), str(dino))
    assert found["lora"]["numbers"]["judge"]["found"], "samples are compared with the images"
    assert f"images are compared by {dino}" in capsys.readouterr().out
    lora = str(bench.folder("seen") / "seen.safetensors")
    settings = ["--set", "gates.lora_check=lite", "--set", f"gates.encoder={dino}"]
    assert main(["validate", lora, "--model", str(bench.model), *settings, "--json"]) in (0, 4)
    assert json.loads(capsys.readouterr().out)["encoder"] == str(dino)


def test_steps_are_compared_by_the_encoder_too(bench, tmp_path, capsys):
    dino = save_tiny_dino(tmp_path / "dino")
    compared = {"gates__compare": "checkpoints", "checkpoint__export_every_n_steps": 1}
    assert bench.run("seen", steps=2, gates__encoder=str(dino), **compared, **LITE) == 0
    assert len(record(bench.folder("seen"))["lora"]["choice"]["candidates"]) == 2
    # For the verdict, and for each of the two that are compared with each other.
    assert capsys.readouterr().out.count(f"images are compared by {dino}") >= 3


def test_an_encoder_that_cannot_be_loaded_ends_a_run_before_it_trains(bench, tmp_path, capsys):
    broken = save_tiny_dino(tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text("utf-8"))
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 8}), encoding="utf-8")
    for command in ("train", "produce"):
        assert bench.run("never", command=command, gates__encoder=str(broken), **LITE) == 2
        assert f"{broken} (Dinov2Model) cannot be loaded" in capsys.readouterr().err
        assert not (bench.folder("never") / "metrics.jsonl").exists()
    shutil.rmtree(broken)
    assert bench.run("never", gates__encoder=str(broken), **LITE) == 2
    assert "does not exist" in capsys.readouterr().err


def test_without_a_setting_no_encoder_is_used(finished):
    assert record(finished.folder("first"))["lora"]["encoder"] == NO_ENCODER
