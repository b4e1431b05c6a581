"""Host memory that streaming takes: said by a plan, held against the system by a run."""

from __future__ import annotations

import pytest
import torch

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.presets import preset_layers
from lora_trainer.core.errors import UsageError
from lora_trainer.models import FAMILIES
from lora_trainer.models.family import public_architecture
from lora_trainer.production import choices
from lora_trainer.production.choices import Choices, choose
from lora_trainer.production.memory import GIB
from lora_trainer.production.plans.plan import make_plan
from lora_trainer.production.plans.view import lines

SET = {"model": {"family": "flux"}, "memory": {"base_precision": "bf16"}}
RESOLVED = resolve([*preset_layers(["6gb"]).layers, Layer("--set", SET)])


def test_a_plan_says_what_streaming_holds_in_host_memory() -> None:
    """Nearly all of FLUX.1's 22 GiB in bf16, and T5's weights as they are stored while captions are encoded."""
    plan = make_plan(RESOLVED)
    assert plan.fit.streamed > 50
    assert 20.0 < plan.host.least < plan.host.most < 23.0
    assert plan.to_json()["host_gib"] == pytest.approx(plan.host.most, abs=1e-4)
    assert any("streamed" in line and f"up to {plan.host.most:.1f} GiB of host memory" in line for line in lines(plan))
    assert 9.0 < plan.phases["cache"].host_gib < 9.4
    whole = make_plan(resolve([*preset_layers(["24gb"]).layers, Layer("--set", {"model": {"family": "sd15"}})]))
    assert whole.to_json()["host_gib"] == whole.phases["cache"].host_gib == 0.0


def test_a_run_warns_of_host_memory_that_is_scarce_and_is_refused_where_it_cannot_be(monkeypatch) -> None:
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
