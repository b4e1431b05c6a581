"""The predicted size of optimizer state, compared with real optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_trainer.config.schema import OptimizerSection
from lora_trainer.optim.optimizers import (
    OPTIMIZERS,
    make_optimizer,
    optimizer_state_bytes,
    optimizer_state_on_gpu,
)
from lora_trainer.optim.state_size import ROUNDING

SHAPES = [(16, 640), (640, 16), (4, 320), (8, 16, 3, 3), (640,)]
OF_ALL_8_BIT_TENSORS = 2 * 256 * 4  # two tables of code values, which all tensors share


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizer_state_has_the_predicted_size(name: str) -> None:
    parameters = {f"layer.{index}": nn.Parameter(torch.ones(shape)) for index, shape in enumerate(SHAPES)}
    optimizer = make_optimizer(parameters, OptimizerSection(name=name))  # type: ignore[arg-type]
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    state_bytes: dict[int, int] = {}
    for parameter in parameters.values():
        gather(optimizer.state[parameter], state_bytes)
    assert sum(state_bytes.values()) == pytest.approx(
        optimizer_state_bytes(name, SHAPES), rel=0.01, abs=OF_ALL_8_BIT_TENSORS
    )
    on_gpu = sum(-(-size // ROUNDING) * ROUNDING for size in state_bytes.values())
    of_all = OF_ALL_8_BIT_TENSORS if "8bit" in name else 0
    assert on_gpu == optimizer_state_on_gpu(name, SHAPES) + of_all


def gather(state: object, state_bytes: dict[int, int]) -> None:
    """Bytes of every tensor in a state of nested dicts, each storage once."""
    if isinstance(state, torch.Tensor):
        state_bytes[state.untyped_storage().data_ptr()] = state.untyped_storage().nbytes()
    elif isinstance(state, dict):
        for value in state.values():
            gather(value, state_bytes)
