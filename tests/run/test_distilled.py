"""Models that were distilled for few steps are named at once, with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.config.schema import Config, ModelSection
from lora_trainer.models.published import public_architecture
from lora_trainer.run.messages import distilled_line


@pytest.mark.parametrize(
    "name",
    ["sdxl-turbo", "sdxl_lightning_4step", "Hyper-SDXL", "dreamshaperXL_v21TurboDPMSDE", "LCM_Dreamshaper_v7", "dmd2"],
)
def test_distilled_by_its_name(name: str) -> None:
    facts = replace(public_architecture("sdxl").facts, path=Path("/models") / name, named="")
    line = distilled_line(Config(), facts)
    assert line
    assert line.startswith(f"warning: {name} is distilled")
    assert distilled_line(Config(model=ModelSection(training_adapter="one.safetensors")), facts) is None


@pytest.mark.parametrize("name", ["sdxl", "hyperrealism", "calcm", "photon_v1", "Hyperion"])
def test_other_names(name: str) -> None:
    facts = replace(public_architecture("sdxl").facts, path=Path("/models") / name, named="")
    assert distilled_line(Config(), facts) is None


def test_folders_above_the_model_do_not_name_it() -> None:
    facts = replace(public_architecture("sdxl").facts, path=Path("/laid/out"), named="sdxl")
    for path, line in (("/home/turbo/models/one.safetensors", False), ("me/sdxl-turbo", True)):
        assert bool(distilled_line(Config(model=ModelSection(path=path)), facts)) == line


def test_distilled_by_its_config() -> None:
    facts = replace(public_architecture("flux").facts, distilled_from="FLUX.1-dev")
    line = distilled_line(Config(), facts)
    assert line
    assert "Train on FLUX.1-dev" in line
