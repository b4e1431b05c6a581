"""Host memory of block swap: shown by a plan, compared with the system by a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.presets import preset_layers
from lora_trainer.core.errors import UsageError
from lora_trainer.memory_plan.estimate import GIB
from lora_trainer.memory_plan.host import base_note, weight_bytes
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory.phases import drawn_on_a_cpu, held_bytes, phase_costs
from lora_trainer.models.published import public_architecture
from lora_trainer.run import choices
from lora_trainer.run.choices import Choices, choose
from lora_trainer.run.plans.plan import Plan, make_plan
from lora_trainer.run.plans.view import host_lines, lines
from tests.recipes.recipe import save_tiny_model

SET = {"model": {"family": "flux"}, "memory": {"weight_dtype": "bf16"}}
RESOLVED = resolve([*preset_layers(["6gb"]).layers, Layer("--set", SET)])


def test_a_plan_shows_the_host_memory_of_block_swap() -> None:
    """Nearly all of FLUX.1's 22 GiB in bf16; T5's weights stay mapped while captions are encoded."""
    plan = make_plan(RESOLVED)
    assert plan.fit.swapped > 50
    assert 20.0 < plan.host.least < plan.host.most < 23.0
    assert plan.to_json()["host_gib"] == pytest.approx(plan.host.most, abs=1e-4)
    assert any("swapped" in line and f"up to {plan.host.most:.1f} GiB of host memory" in line for line in lines(plan))
    assert plan.phases["train"].host_gib == plan.host.most
    assert plan.phases["cache"].host_gib == plan.phases["draw"].host_gib == 0.0
    assert plan.to_json()["host_peak_gib"] == plan.to_json()["host_gib"]
    whole = make_plan(resolve([*preset_layers(["24gb"]).layers, Layer("--set", {"model": {"family": "sd15"}})]))
    assert whole.to_json()["host_gib"] == whole.phases["cache"].host_gib == 0.0


def test_a_model_with_fewer_blocks_to_swap_in_4_bits_is_planned_on_a_gpu_that_is_too_small(tmp_path: Path) -> None:
    """Blocks far smaller than the largest are not swapped, and 4 bits leave some of a tiny model below that."""
    values = {"model": {"path": str(save_tiny_model(tmp_path))}}
    plan = make_plan(resolve([Layer("--set", values)]), gpu_gib=0.5, data=((), ()))
    assert plan.fits is False
    assert plan.fit.precision == "nf4"
    assert plan.fit.swapped == plan.fit.swappable > 0


def test_a_run_warns_of_scarce_host_memory_and_is_refused_without_enough(monkeypatch) -> None:
    monkeypatch.setattr(choices, "cuda_memory_gib", lambda: 6.0)
    monkeypatch.setattr(choices, "left_gib", lambda device: 6.0)

    def chosen(total: int, available: int, world: int = 1) -> Choices:
        monkeypatch.setattr(choices, "system_memory", lambda: (total * GIB, available * GIB))
        return choose(RESOLVED, FAMILIES["flux"], public_architecture("flux"), torch.device("cuda"), world)

    assert "GiB of host memory" in chosen(64, 60).lines[0]
    assert "free" not in chosen(64, 60).lines[0]
    assert "of which only 16.0 are free" in chosen(64, 16).lines[0]
    with pytest.raises(UsageError, match=r"of host memory; this system has 16\.0"):
        chosen(16, 15)
    with pytest.raises(UsageError, match=r"in each of 4 processes; this system has 64\.0"):
        chosen(64, 60, world=4)


def published(family: str, **settings: dict[str, object]) -> Plan:
    values: dict[str, dict[str, object]] = {"model": {"family": family}, **settings}
    return make_plan(resolve([Layer("--set", values)]))


def test_without_a_gpu_every_phase_counts_in_host_memory() -> None:
    """FLUX.1 in fp32: 44 GiB of denoiser, and of T5's 18 no more than its largest layer."""
    plan = published("flux")
    hosted = {name: phase.host_gib for name, phase in plan.phases.items()}
    assert 44.0 < hosted["validate"] < 48.0
    assert hosted["train"] > 44.3 + plan.fit.parts.adapter
    assert 3.0 < hosted["cache"] < 14.0, "images, and the captions' own, but no T5"
    assert 50.0 < hosted["draw"] < 62.0
    half = published("flux", memory={"weight_dtype": "bf16"})
    assert half.phases["validate"].host_gib < 1.5, "the weights stay mapped as they are stored"
    assert half.phases["train"].host_gib < hosted["train"] - 44.0


def test_parts_stored_in_the_compute_precision_stay_memory_mapped(tmp_path: Path) -> None:
    """By the files of the folder, part by part."""
    model = save_tiny_model(tmp_path / "model", "flux")
    facts = FAMILIES["flux"].describe(model)
    size = sum(each.numel() for each in load_file(next((model / "transformer").glob("*.safetensors"))).values())
    assert held_bytes(facts, "transformer", 1, "F32") == 0
    assert held_bytes(facts, "transformer", 1, "BF16") == 2 * size
    assert weight_bytes(FAMILIES["flux"], facts, "fp32") == 0
    assert weight_bytes(FAMILIES["flux"], facts, "bf16") == 2 * size
    assert weight_bytes(FAMILIES["flux"], facts, "nf4") == 0


def test_a_plan_shows_where_host_memory_is_too_small() -> None:
    plan = published("flux")
    (line,) = host_lines(plan, 64.0)
    assert line.startswith("host memory, without a GPU: up to ")
    assert line.endswith("this machine has 64.0, which is too little for it")
    assert "too little" not in host_lines(plan, 256.0)[0]
    assert host_lines(published("sd15", memory={"weight_dtype": "bf16", "limit_gib": 24.0}), 64.0) == []


def test_a_base_model_too_large_for_host_memory_is_refused() -> None:
    assert base_note(2 * GIB, 1, 16 * GIB, 8 * GIB) is None
    assert base_note(0, 1, 1, 0) is None
    assert "of which 1.0 are free" in str(base_note(2 * GIB, 1, 16 * GIB, 1 * GIB))
    with pytest.raises(UsageError, match=r"needs 44\.3 GiB of host memory; this system has 16\.0"):
        base_note(int(44.3 * GIB), 1, 16 * GIB, 8 * GIB)
    with pytest.raises(UsageError, match="in each of 4 processes"):
        base_note(8 * GIB, 4, 16 * GIB, 8 * GIB)


def test_fewer_large_images_are_generated_at_once_on_a_cpu() -> None:
    costs = phase_costs("sdxl")
    assert [drawn_on_a_cpu(side * side, 4, costs) for side in (64, 512, 1024, 2048)] == [8, 8, 2, 1]
