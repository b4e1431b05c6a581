"""How much each module changed: exact, by module, and without a trace in the training."""

from __future__ import annotations

import pytest
import torch

from lora_trainer.training.update_sizes import AT_ONCE, UpdateSizes


def test_sizes_are_relative_changes_of_whole_modules() -> None:
    weights = {f"block.{index}.lora_A.default.weight": torch.full((3, 4), 2.0) for index in range(AT_ONCE + 3)}
    weights |= {f"block.{index}.lora_B.default.weight": torch.zeros(4, 3) for index in range(AT_ONCE + 3)}
    weights["still.lora_A.default.weight"] = torch.ones(2)
    weights["empty.lora_B.default.weight"] = torch.zeros(2)
    sizes = UpdateSizes(weights)
    for index in range(AT_ONCE + 3):
        weights[f"block.{index}.lora_A.default.weight"][0, 0] += index
        weights[f"block.{index}.lora_B.default.weight"][0, 0] += 1.0
    found = sizes.measure(weights)
    assert found["still"] == 0
    assert "empty" not in found, "nothing to compare with"
    for index in range(AT_ONCE + 3):
        size = 11 * 4 + (2 + index) ** 2 + 1
        assert found[f"block.{index}"] == pytest.approx(((index**2 + 1) / size) ** 0.5)
    assert set(sizes.measure(weights).values()) == {0.0}, "since the last measurement"
