"""The files of a run, and what it must not change."""

from __future__ import annotations

import tomllib

from safetensors import safe_open

from lora_trainer.config.schema import Config
from tests.recipes.recipe import contents, exported, record, rows

FIELDS = {"step", "epoch", "loss", "lr", "grad_norm", "seconds", "samples_per_second"}


def test_a_run_writes_the_files_of_the_contract(finished):
    folder = finished.folder("first")
    for name in ("first.safetensors", "first.diffusers.safetensors", "run.json", "config.toml"):
        assert (folder / name).is_file(), name
    assert (folder / "samples" / "before_after.png").is_file()
    assert any((folder / "logs").iterdir())
    kept = {f"{kind}-00000{step}" for kind in ("step", "best") for step in (3, 6)}
    assert {path.stem for path in (folder / "checkpoints").iterdir()} == kept
    assert not [path for path in folder.rglob("*") if path.name.endswith((".part", ".bin", ".pt", ".pkl"))]


def test_the_record_describes_the_run(finished):
    document = record(finished.folder("first"))
    assert document["status"] == "done"
    assert document["exit_code"] == 0
    assert document["steps"] == 6
    assert document["config"]["lora"]["rank"] == 4
    assert document["origins"]["lora.rank"] == "--set"
    assert document["origins"]["train.max_steps"] == "--max-steps"
    assert set(document["scores"]) == {"dataset", "lora"}
    assert all(0.0 <= score <= 1.0 for score in document["scores"].values())
    assert document["files"]["kohya"] == "first.safetensors"
    assert document["files"]["diffusers"] == "first.diffusers.safetensors"
    assert set(document["seconds"]) >= {"cache", "train", "validate", "total"}
    assert document["seconds"]["total"] >= document["seconds"]["train"] > 0.0
    assert document["versions"]["torch"]
    assert document["hardware"]["processes"] == 1
    assert set(document["hardware"]) >= {"cpus", "threads", "cpu_capability", "onednn"}
    assert len(document["data_hash"]) >= 16


def test_config_toml_is_the_resolved_config(finished):
    text = (finished.folder("first") / "config.toml").read_text(encoding="utf-8")
    values = tomllib.loads(text)
    assert values["lora"]["rank"] == 4
    assert [source["path"] for source in values["data"]["sources"]] == [str(finished.data.resolve())]
    assert set(values) <= {field.alias or name for name, field in Config.model_fields.items()}


def test_metrics_have_one_row_per_step(finished):
    metrics = rows(finished.folder("first"))
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(set(row) >= FIELDS for row in metrics)
    assert all(row["loss"] > 0.0 and row["grad_norm"] > 0.0 and row["seconds"] > 0.0 for row in metrics)
    # 9 trained images, 2 per step: the fifth step ends the epoch with one image.
    assert [row["epoch"] for row in metrics] == [0, 0, 0, 0, 0, 1]
    assert [row["samples"] for row in metrics] == [2, 2, 2, 2, 1, 2]


def test_validation_loss_is_measured_at_the_start_between_and_at_the_end(finished):
    measured = rows(finished.folder("first"), "validation.jsonl")
    assert [row["step"] for row in measured] == [0, 3, 6]
    assert all(row["loss"] > 0.0 for row in measured)


def test_both_formats_hold_the_same_trained_weights(finished):
    files = exported(finished.folder("first"))
    kohya = {name: value for name, value in files["kohya"].items() if not name.endswith(".alpha")}
    assert len(kohya) == len(files["diffusers"]) > 0
    with safe_open(finished.folder("first") / "first.safetensors", framework="numpy") as file:
        ups = [name for name in file.keys() if name.endswith("lora_up.weight")]  # noqa: SIM118
        assert all(file.get_tensor(name).any() for name in ups)
        assert file.metadata()["ss_network_dim"] == "4"


def test_the_data_folder_is_unchanged(bench):
    before = contents(bench.data)
    assert bench.run("clean", steps=1) == 0
    assert contents(bench.data) == before
