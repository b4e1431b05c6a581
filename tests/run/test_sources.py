"""How a run resolves its sources before they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_trainer.config.schema import Config
from lora_trainer.data.sample import Sample
from lora_trainer.run.inputs import with_absolute_paths
from lora_trainer.run.messages import of_each_source
from lora_trainer.run.order import run_folder


def config_of(**source: object) -> Config:
    return Config.model_validate({"data": {"sources": [source]}})


def test_paths_of_sources_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    config = config_of(path="~/a-{0..3}.tar", captions_file="all.csv", masks="alpha")
    (source,) = with_absolute_paths(config).data.sources
    root = tmp_path.resolve()
    assert source.path == str(root / "home" / "a-{0..3}.tar")
    assert (source.captions_file, source.masks) == (str(root / "all.csv"), "alpha")
    (masked,) = with_absolute_paths(config_of(path="a", masks="gray")).data.sources
    assert masked.masks == str(root / "gray")


def test_a_run_over_shards_has_a_plain_name() -> None:
    assert run_folder(config_of(path="data/cats-{000..009}.tar")).name == "cats"
    assert run_folder(config_of(path="data/cats.parquet")).name == "cats"
    assert run_folder(config_of(path="data/{a,b}.tar")).name == "{a,b}"


def test_captions_of_each_source_are_shown() -> None:
    samples = [Sample(Path(f"{n}.png"), "", 8, 8, str(n), source=n // 4) for n in range(12)]
    assert [sample.path.stem for sample in of_each_source(samples, 3)] == ["0", "4", "8"]
    assert [sample.path.stem for sample in of_each_source(samples[:6], 3)] == ["0", "1", "4"]
    assert of_each_source(samples[:2], 3) == samples[:2]
    assert len(of_each_source(samples, 2)) == 2
