"""What a card without bf16 units makes of the settings: fp16 in place of bf16, also under weights in 8 bits."""

from __future__ import annotations

import pytest
import torch

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.presets import preset_layers
from lora_trainer.models import FAMILIES
from lora_trainer.models.family import public_architecture
from lora_trainer.production import choices
from lora_trainer.production.choices import Choices, choose


@pytest.fixture
def old_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(choices, "cuda_memory_gib", lambda: 5.8)


def chosen(family: str, *user: Layer) -> Choices:
    resolved = resolve([*preset_layers(["6gb"]).layers, *user])
    return choose(resolved, FAMILIES[family], public_architecture(family), torch.device("cuda"), 1)


@pytest.mark.parametrize(("family", "precision"), [("sd15", "fp16"), ("sdxl", "fp8")])
def test_an_old_card_computes_in_fp16_and_its_own_config_repeats_that(
    family: str, precision: str, old_card: None
) -> None:
    first = chosen(family)
    assert (first.precision.value, first.dtype) == (precision, torch.float16)
    # As a run's config.toml has it: what was decided counts as asked for.
    again = chosen(family, Layer("--config", {"memory": {"base_precision": precision}}))
    assert (again.precision.value, again.dtype) == (precision, torch.float16)
    assert (again.micro, again.checkpointing) == (first.micro, first.checkpointing)
