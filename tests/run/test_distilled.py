"""Models that were distilled for few steps: named at once with what to do, sampled in few steps, trained by choice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.config.schema import Config, LossSection, ModelSection
from lora_trainer.diffusion.timesteps import UNIFORM, Shift, Times, few_step_timesteps
from lora_trainer.evaluation.lora_check import effort_on
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.noise_schedule import make_scheduler
from lora_trainer.models.published import public_architecture
from lora_trainer.run.messages import distilled_line

SD15, SDXL = FAMILIES["sd15"], FAMILIES["sdxl"]


@pytest.mark.parametrize(
    "name",
    ["sdxl-turbo", "sdxl_lightning_4step", "Hyper-SDXL", "dreamshaperXL_v21TurboDPMSDE", "LCM_Dreamshaper_v7", "dmd2"],
)
def test_distilled_by_its_name(name: str) -> None:
    facts = replace(public_architecture("sdxl").facts, path=Path("/models") / name, named="")
    line = distilled_line(Config(), SDXL, facts)
    assert line
    assert line.startswith(f"warning: {name} is distilled")
    assert distilled_line(Config(model=ModelSection(training_adapter="one.safetensors")), SDXL, facts) is None
    assert distilled_line(Config(loss=LossSection(guidance_target=3.0)), SDXL, facts) is None


@pytest.mark.parametrize("name", ["sdxl", "hyperrealism", "calcm", "photon_v1", "Hyperion"])
def test_other_names(name: str) -> None:
    facts = replace(public_architecture("sdxl").facts, path=Path("/models") / name, named="")
    assert distilled_line(Config(), SDXL, facts) is None


def test_folders_above_the_model_do_not_name_it() -> None:
    for path, named, line in (
        ("/home/turbo/models/one.safetensors", "one.safetensors", False),
        ("me/sdxl-turbo", "me/sdxl-turbo", True),
    ):
        facts = replace(public_architecture("sdxl").facts, path=Path("/laid/out"), named=named)
        assert bool(distilled_line(Config(model=ModelSection(path=path)), SDXL, facts)) == line


def test_distilled_by_its_config() -> None:
    facts = replace(public_architecture("flux").facts, distilled_from="FLUX.1-dev")
    line = distilled_line(Config(), FAMILIES["flux"], facts)
    assert line
    assert "train on FLUX.1-dev" in line
    for choice in ("model.training_adapter", "loss.guidance_target"):
        assert choice in line


def scheduled(folder: Path, **changes: object) -> Path:
    """The built-in base with another scheduler's config."""
    shutil.copytree(BASE_FOLDER, folder)
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "few"),
    [
        ({"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"}, True),
        ({"_class_name": "LCMScheduler"}, True),
        ({"timestep_spacing": "leading"}, False),
        ({"timestep_spacing": "trailing", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, False),
    ],
)
def test_a_scheduler_for_few_steps_tells_a_distilled_model(
    changes: dict[str, object], few: bool, tmp_path: Path
) -> None:
    folder = scheduled(tmp_path / "model", **changes)
    family, facts = SD15, SD15.read_facts(folder)
    assert bool(distilled_line(Config(), family, facts)) == few
    usual = family.pipeline.sampling_defaults(folder)
    assert (usual.steps, usual.guided, usual.negative) == ((4, False, False) if few else (25, True, True))
    scheduler = make_scheduler(folder)
    scheduler.set_timesteps(4)
    assert (scheduler.timesteps[0] == 999) == (few or bool(changes.get("rescale_betas_zero_snr")))


def test_a_guided_model_needs_no_guidance_in_its_target() -> None:
    facts = public_architecture("sd3").facts
    line = distilled_line(Config(loss=LossSection(guidance_target=3.0)), FAMILIES["sd3"], facts)
    assert line
    assert "sampling adds again" in line


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_a_verdict_samples_a_distilled_model_in_its_own_few_steps(steps: int, tmp_path: Path) -> None:
    """At the timesteps of the pipeline's scheduler, of a noise schedule and of a flow with a shift."""
    scheduler = make_scheduler(scheduled(tmp_path / "model", timestep_spacing="trailing"))
    scheduler.set_timesteps(steps)
    assert few_step_timesteps(steps, UNIFORM, 1000, (16, 16)) == scheduler.timesteps.tolist()
    flow = FlowMatchEulerDiscreteScheduler(shift=3.0)
    flow.set_timesteps(sigmas=[1.0 - index / steps for index in range(steps)])
    found = few_step_timesteps(steps, Times(shift=Shift(3.0)), 1000, (16, 16))
    assert [each + 1 for each in found] == pytest.approx(flow.timesteps.tolist(), abs=0.6)


def test_a_verdict_takes_no_more_steps_than_the_model_was_distilled_for(tmp_path: Path) -> None:
    few = scheduled(tmp_path / "model", timestep_spacing="trailing")
    for check, steps in (("full", 20), ("lite", 8)):
        assert effort_on(check, SD15, few).steps == 4
        assert effort_on(check, SD15, BASE_FOLDER).steps == steps
