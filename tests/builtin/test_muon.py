"""The optimizers that the miniature bases are trained with."""

from __future__ import annotations

import copy

import torch
from torch import nn

from builtin_base.muon import Optimizers, orthogonalized, rate


def test_an_update_has_nearly_equal_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((24, 60), (60, 24), (32, 32)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3, shape


def test_every_weight_is_trained_by_one_of_both_and_training_resumes_to_the_bit() -> None:
    def make() -> tuple[nn.Module, Optimizers]:
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.GroupNorm(8, 32), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32, 16)
        )
        return module, Optimizers(module, 1e-3, weight_decay=0.01)

    def step(module: nn.Module, optimizers: Optimizers, number: int) -> None:
        torch.manual_seed(number)
        module(torch.randn(4, 3, 5, 5)).square().mean().backward()
        optimizers.step(1.0)

    module, optimizers = make()
    before = [weight.clone() for weight in module.parameters()]
    step(module, optimizers, 1)
    assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    sizes = [sum(len(group["params"]) for group in each.param_groups) for each in optimizers.both]
    assert sizes == [2, 6]  # the second convolution and the linear layer are matrices
    again, resumed = make()
    again.load_state_dict(module.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizers.state_dict()))
    for pair in ((module, optimizers), (again, resumed)):
        step(*pair, 2)
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), again.parameters(), strict=True))


def test_the_rate_rises_stays_and_falls() -> None:
    assert rate(0.0) < 0.02
    assert rate(0.25) == rate(0.49) == 1.0
    assert 0.009 < rate(1.0) < 0.02
    assert rate(0.6) > rate(0.8) > rate(0.95)
