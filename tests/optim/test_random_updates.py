"""Gradient noise and stochastic rounding: unbiased, by position, and the same however many weights are updated at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lora_trainer.config.schema import OptimizerSection
from lora_trainer.optim import random_updates
from lora_trainer.optim.clipping import gradient_norm
from lora_trainer.optim.optimizers import OPTIMIZERS, make_optimizer
from lora_trainer.optim.random_updates import (
    make_bf16_step,
    make_gradient_noise,
    position_generator,
    round_stochastically,
    seen_in_fp32,
)

CPU = torch.device("cpu")
APART = sorted(name for name, spec in OPTIMIZERS.items() if spec.updates_apart)


def source(number: int) -> torch.Generator:
    return position_generator(CPU, 0, "test", number)


def neighbors(value: float) -> tuple[float, float]:
    """The bf16 numbers at or next to an fp32 number, towards 0 and away from it."""
    bits = torch.tensor(value).view(torch.int32)
    inner = bits & -(2**16)
    outer = inner if bits == inner else inner + 2**16
    return float(inner.view(torch.float32)), float(outer.view(torch.float32))


@settings(max_examples=60)
@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120),
    st.integers(0, 99),
)
def test_stochastic_rounding_is_unbiased_between_two_neighbors(value, number):
    """The mean of 10,000 roundings lies within six standard errors of the value."""
    values = torch.full((10_000,), value)
    inner, outer = neighbors(float(values[0]))
    rounded = round_stochastically(values, source(number)).double()
    assert set(rounded.unique().tolist()) <= {inner, outer}
    share = 0.0 if inner == outer else (float(values[0].double()) - inner) / (outer - inner)
    found = 0.0 if inner == outer else float((rounded == outer).double().mean())
    assert abs(found - share) <= 6.0 * math.sqrt(max(share * (1.0 - share), 1e-9) / 10_000) + 1e-9


def test_what_bf16_can_express_stays():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).mul(2**16).view(torch.float32)
    rounded = round_stochastically(every, source(0))
    finite = ~torch.isnan(every)
    assert torch.equal(rounded[finite].float().view(torch.int32), every[finite].view(torch.int32))
    assert torch.isnan(rounded[~finite]).all()


def bf16_weights() -> dict[str, nn.Parameter]:
    """Two layers large enough for 8-bit state, and a small one."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "a.lora_A.default.weight": (64, 80),
        "b.lora_A.default.weight": (80, 64),
        "b.lora_B.default.weight": (8, 4),
    }
    return {
        name: nn.Parameter(torch.randn(shape, generator=draw).mul(0.1).to(torch.bfloat16))
        for name, shape in shapes.items()
    }


def gradients(parameters: dict[str, nn.Parameter], step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(each.shape, generator=draw).to(torch.bfloat16) for each in parameters.values()]


def trained(name: str, seed: int = 0, steps: int = 3) -> list[Tensor]:
    parameters, section = bf16_weights(), OptimizerSection(name=name, learning_rate=1e-3)
    optimizer = make_optimizer(parameters, section)
    take = make_bf16_step(optimizer, parameters, seed)
    memory = [each.data_ptr() for each in parameters.values()]
    for step in range(steps):
        for each, gradient in zip(parameters.values(), gradients(parameters, step), strict=True):
            each.grad = gradient
        take(step)
    assert [each.data_ptr() for each in parameters.values()] == memory, "where the model reads them"
    assert {each.dtype for each in parameters.values()} == {torch.bfloat16}
    state = [value for own in optimizer.state.values() for value in own.values() if torch.is_tensor(value)]
    assert torch.bfloat16 not in {value.dtype for value in state}, "fp32 or 8 bits"
    return [each.detach().clone() for each in parameters.values()]


@pytest.mark.parametrize("name", APART)
def test_weights_are_rounded_the_same_however_many_are_updated_at_a_time(name, monkeypatch):
    whole = trained(name)
    monkeypatch.setattr(random_updates, "ROUNDED_AT_ONCE", 100)
    assert all(torch.equal(*pair) for pair in zip(whole, trained(name), strict=True))
    assert not all(torch.equal(*pair) for pair in zip(whole, trained(name, seed=1), strict=True))


@pytest.mark.parametrize("name", APART)
def test_each_weight_is_a_neighbor_of_the_optimizers_own(name):
    """One step: the fp32 result of the same optimizer, rounded up or down."""
    exact = {each: nn.Parameter(value.detach().float()) for each, value in bf16_weights().items()}
    optimizer = make_optimizer(exact, OptimizerSection(name=name, learning_rate=1e-3))
    for each, gradient in zip(exact.values(), gradients(bf16_weights(), 0), strict=True):
        each.grad = gradient.float()
    optimizer.step()
    for rounded, value in zip(trained(name, steps=1), exact.values(), strict=True):
        inner = (value.detach().view(torch.int32) & -(2**16)).view(torch.float32)
        outer = (value.detach().view(torch.int32) & -(2**16)).add(2**16).view(torch.float32)
        assert ((rounded.float() == inner) | (rounded.float() == outer)).all()


def test_small_updates_count_on_average():
    """An update of a tenth of bf16's spacing: rounded to nearest it vanishes each time."""
    parameters = {"a.lora_A.default.weight": nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))}
    (weight,) = parameters.values()
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    take = make_bf16_step(optimizer, parameters, 0)
    for step in range(20):
        weight.grad = torch.full_like(weight, -(2.0**-7) / 10.0)
        take(step)
    assert float(weight.detach().double().mean()) - 1.0 == pytest.approx(20 * 2.0**-7 / 10.0, rel=0.02)
    for _ in range(20):
        weight.data.add_(2.0**-7 / 10.0)
    assert float(weight.detach().double().mean()) - 1.0 == pytest.approx(20 * 2.0**-7 / 10.0, rel=0.02), "vanished"


def test_an_optimizers_state_is_not_cast_to_bf16_on_loading():
    parameters = bf16_weights()
    first = make_optimizer(parameters, OptimizerSection())
    take = make_bf16_step(first, parameters, 0)
    for each, gradient in zip(parameters.values(), gradients(parameters, 0), strict=True):
        each.grad = gradient
    take(0)
    second = make_optimizer(parameters, OptimizerSection())
    with seen_in_fp32(parameters):
        second.load_state_dict(first.state_dict())
    assert {each.dtype for each in parameters.values()} == {torch.bfloat16}
    for each in parameters.values():
        assert torch.equal(first.state[each]["exp_avg_sq"], second.state[each]["exp_avg_sq"])
        assert second.state[each]["exp_avg_sq"].dtype == torch.float32


def test_norms_of_bf16_gradients_are_fp32():
    parameters = bf16_weights()
    for each, gradient in zip(parameters.values(), gradients(parameters, 0), strict=True):
        each.grad = gradient
    expected = torch.cat([each.grad.flatten().double() for each in parameters.values() if each.grad is not None])
    assert float(gradient_norm(list(parameters.values()))) == pytest.approx(float(expected.norm()), rel=1e-6)


@settings(max_examples=30)
@given(st.floats(1e-4, 1.0), st.floats(0.0, 1.0), st.integers(0, 1000))
def test_the_variance_of_gradient_noise_falls_with_the_step(eta, gamma, step):
    weight = nn.Parameter(torch.zeros(100, 100))
    weight.grad = torch.zeros(100, 100)
    add = make_gradient_noise({"a": weight}, OptimizerSection(gradient_noise=eta, gradient_noise_decay=gamma), 0)
    assert add is not None
    add(step)
    assert float(weight.grad.var()) == pytest.approx(eta / (1 + step) ** gamma, rel=0.1)


def test_gradient_noise_is_drawn_by_position():
    """Of its variance, without a bias, and the same whatever else is drawn."""
    names = ("a.lora_A.default.weight", "b.lora_A.default.weight")
    section = OptimizerSection(gradient_noise=0.04, gradient_noise_decay=0.5)

    def noise(step: int, *drawn: str, seed: int = 0) -> dict[str, Tensor]:
        parameters = {name: nn.Parameter(torch.zeros(200, 200)) for name in drawn}
        for each in parameters.values():
            each.grad = torch.ones(200, 200)
        add = make_gradient_noise(parameters, section, seed)
        assert add is not None
        add(step)
        return {name: each.grad - 1.0 for name, each in parameters.items() if each.grad is not None}

    found = noise(3, *names)
    for values in found.values():
        assert float(values.mean()) == pytest.approx(0.0, abs=6 * 0.1414 / 200)
        assert float(values.var()) == pytest.approx(0.04 / 4**0.5, rel=0.05)
    again = noise(3, *reversed(names))
    assert all(torch.equal(found[name], again[name]) for name in names)
    assert torch.equal(found[names[0]], noise(3, names[0])[names[0]])
    others = [found[names[1]], noise(4, names[0])[names[0]], noise(3, names[0], seed=1)[names[0]]]
    assert not any(torch.equal(found[names[0]], other) for other in others)
    assert make_gradient_noise({}, OptimizerSection(), 0) is None
