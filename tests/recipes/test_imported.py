"""A config of another trainer, from import to the end of training."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.cli.main import main
from tests.recipes.recipe import Bench, exported, record, rows

CONFIG = """
[model]
pretrained_model_name_or_path = "{model}"
[data]
dataset_config = "data.toml"
[training]
max_train_steps = 6
learning_rate = 1e-3
network_dim = 4
network_alpha = 2
optimizer_type = "AdamW"
lr_scheduler = "constant"
mixed_precision = "no"
seed = 7
output_name = "theirs"
output_dir = "{output}"
"""
DATA = """
[general]
caption_extension = ".txt"
shuffle_caption = true
[[datasets]]
resolution = 64
batch_size = 2
[[datasets.subsets]]
image_dir = "{images}"
num_repeats = 2
[[datasets.subsets]]
image_dir = "none"
num_repeats = 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not (BASE_FOLDER / "unet").is_dir(), reason="the base has not been trained yet")
def test_a_kohya_config_trains_to_the_end(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, ours = tmp_path / "kohya.toml", tmp_path / "ours.toml"
    config.write_text(CONFIG.format(model=BASE_FOLDER.as_posix(), output=bench.output.as_posix()), encoding="utf-8")
    (tmp_path / "data.toml").write_text(DATA.format(images=bench.data.as_posix()), encoding="utf-8")
    assert main(["import", str(config), "--output", str(ours)]) == 0
    assert f"lora-trainer train --config {ours}" in capsys.readouterr().out
    # As imported, except for the cache folder, the gate and its images: those take most of so short a run.
    quick = {"cache.dir": bench.cache, "gates.lora_check": "off"}
    settings = [part for name, value in quick.items() for part in ("--set", f"{name}={value}")]
    assert main(["train", "--config", str(ours), *settings]) == 0
    folder = bench.folder("theirs")
    written = record(folder)
    assert (written["status"], written["dataset"]["samples"]) == ("done", 10)
    assert [(row["lr"], row["samples"]) for row in rows(folder)] == [(1e-3, 2)] * 6
    lora = tomllib.loads((folder / "config.toml").read_text("utf-8"))["lora"]
    assert (lora["rank"], lora["alpha"]) == (4, 2.0)
    assert exported(folder)["kohya"]
