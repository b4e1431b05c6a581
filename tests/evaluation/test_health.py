"""Norms and ranks of updates with known results."""

from __future__ import annotations

import pytest
import torch

from lora_trainer.evaluation.health import effective_rank, examine, singular_values
from lora_trainer.lora_format.kinds.lora import LoraPair


def test_singular_values_are_those_of_the_delta() -> None:
    generator = torch.Generator().manual_seed(0)
    pair = LoraPair(torch.randn(3, 10, generator=generator), torch.randn(7, 3, generator=generator), 1.5)
    expected = torch.linalg.svdvals(pair.delta())[:3]
    assert torch.allclose(singular_values(pair), expected, atol=1e-5)


def test_effective_rank() -> None:
    assert effective_rank(torch.ones(5)) == pytest.approx(5.0, rel=1e-5)
    assert effective_rank(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1.0)
    assert effective_rank(torch.zeros(4)) == 0.0


def test_examine_finds_dead_and_large_modules() -> None:
    alive = LoraPair(torch.eye(2, 4), torch.eye(4, 2), 2.0)
    dead = LoraPair(torch.ones(2, 4), torch.zeros(4, 2), 2.0)
    found = examine({"a": alive, "b": dead}, {"a": 1.0, "b": 1.0})
    assert (found.dead, found.modules, found.largest_module) == (1, 2, "a")
    assert found.largest == pytest.approx(2.0**0.5)
    assert found.rank_used == pytest.approx(1.0)
