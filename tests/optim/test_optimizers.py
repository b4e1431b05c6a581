"""Optimizers: weight decay, learning, and the message for a missing library."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch
from torch import nn

from lora_trainer.config.schema import OptimizerSection
from lora_trainer.core.errors import UsageError
from lora_trainer.optim.optimizers import OPTIMIZERS, make_optimizer, schedule_free_weight, shares_of
from lora_trainer.training.step import set_lr

# A learning rate with which each gets near the minimum in a few hundred steps.
RATES = dict.fromkeys(OPTIMIZERS, 0.01) | {"prodigy": 1.0, "adamw_schedulefree": 3e-2}
LORA_A, LORA_B = "blocks.0.to_q.lora_A.default.weight", "blocks.0.to_q.lora_B.default.weight"


def pair(out: int = 12, rank: int = 4, wide: int = 10) -> dict[str, nn.Parameter]:
    """A LoRA as at the start of training: the up projection is 0."""
    torch.manual_seed(0)
    return {LORA_A: nn.Parameter(torch.randn(rank, wide) * 0.3), LORA_B: nn.Parameter(torch.zeros(out, rank))}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_each_optimizer_fits_a_low_rank_change(name):
    """Also one that starts at 0, where an optimizer that scales its learning rate by the weights does not move."""
    parameters = pair()
    target = torch.randn(12, 4) @ torch.randn(4, 10) * 0.3
    optimizer = make_optimizer(parameters, OptimizerSection(name=name, learning_rate=RATES[name], weight_decay=0.0))

    def error(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (up @ down - target).square().mean()

    first = float(error(parameters[LORA_B], parameters[LORA_A]).detach())
    for step in range(300):
        set_lr(optimizer, RATES[name] * (1.0 - step / 300 if name != "adamw_schedulefree" else 1.0))
        error(parameters[LORA_B], parameters[LORA_A]).backward()
        optimizer.step()
        optimizer.zero_grad()
    used = [
        schedule_free_weight(optimizer, each) if name == "adamw_schedulefree" else each.detach()
        for each in parameters.values()
    ]
    assert float(error(used[1], used[0])) < 0.1 * first


def test_weight_decay_applies_only_to_matrices_and_kernels():
    shapes = {
        LORA_A: (4, 10),
        "conv.lora_A.default.weight": (4, 10, 3, 3),
        "to_q.lora_B.default.bias": (12,),
        "norm.weight": (12,),
        "to_q.lora_magnitude_vector.default.weight": (12,),
        "conv.lora_magnitude_vector.default.weight": (1, 12, 1, 1),
        "text_model.embeddings.token_embedding.trainable_tokens_delta.default": (2, 768),
    }
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = make_optimizer(parameters, OptimizerSection(weight_decay=0.02, learning_rate=0.5))
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(2, 0.02), (5, 0.0)]
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert {name: float(parameter.detach().mean()) for name, parameter in parameters.items()} == pytest.approx(
        dict.fromkeys(list(shapes)[:2], 0.99) | dict.fromkeys(list(shapes)[2:], 1.0)
    )


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"adamw"}))
def test_every_optimizer_applies_its_weight_decay(name):
    """A decay of 0.1 at a learning rate of 0.5 takes 5 % from a weight without a gradient; Prodigy's is tiny at first."""
    parameters = {"a": nn.Parameter(torch.ones(80, 80))}
    optimizer = make_optimizer(parameters, OptimizerSection(name=name, weight_decay=0.1, learning_rate=0.5))
    parameters["a"].grad = torch.zeros(80, 80)
    optimizer.step()
    left = float(parameters["a"].detach().mean())
    if name == "prodigy":
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
    elif name == "adamw_schedulefree":
        assert 0.9 < left < 1.0
    else:
        assert left == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"prodigy"}))  # which has one learning rate for all
def test_every_optimizer_applies_the_learning_rate_of_a_group(name):
    parameters = {"a": nn.Parameter(torch.zeros(80, 80)), "b": nn.Parameter(torch.zeros(80, 80))}
    section, rates = OptimizerSection(name=name, weight_decay=0.0, learning_rate=1e-2), ((1e-3, {"b"}),)
    optimizer = make_optimizer(parameters, section, rates)
    assert shares_of(parameters, section, rates) == (1.0, 0.1)
    gradient = torch.randn(80, 80, generator=torch.Generator().manual_seed(0))
    for rate in (1e-2, 5e-3):
        set_lr(optimizer, rate, (1.0, 0.1))
        for parameter in parameters.values():
            parameter.grad = gradient.clone()
        optimizer.step()
    large, small = (float(parameter.detach().norm()) for parameter in parameters.values())
    assert large > 0.0
    assert small == pytest.approx(0.1 * large, rel=1e-3)


@pytest.mark.parametrize("rates", list(product((1e-2, 5e-3), repeat=4)))
def test_equal_learning_rates_form_the_same_groups(rates):
    """The groups of a checkpoint do not depend on learning rates: denoiser, text encoders, tokens."""
    names = (
        LORA_A,
        "norm.bias",
        "text_encoder.lora_A",
        "text_encoder_2.lora_A",
        "text_encoder.token_embedding.learned",
    )
    parameters = {name: nn.Parameter(torch.ones((4,) if "bias" in name else (4, 4))) for name in names}
    section = OptimizerSection(learning_rate=rates[0], weight_decay=0.1)
    owned = tuple((rate, {name}) for rate, name in zip(rates[1:], names[2:], strict=True))
    groups = make_optimizer(parameters, section, owned).param_groups
    assert [[id(each) for each in group["params"]] for group in groups] == [[id(each)] for each in parameters.values()]
    assert [group["lr"] for group in groups] == pytest.approx([rates[0], *rates])
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1, 0.1, 0.0]
    assert shares_of(parameters, section, owned) == tuple(rate / rates[0] for rate in (rates[0], *rates))


def test_the_schedule_free_average_is_the_librarys_own():
    parameters = pair()
    optimizer = make_optimizer(parameters, OptimizerSection(name="adamw_schedulefree", learning_rate=0.1))
    for step in range(5):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, float(step - 1))
        optimizer.step()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    ours = {name: schedule_free_weight(optimizer, parameter) for name, parameter in parameters.items()}
    assert all(torch.equal(parameters[name], before[name]) for name in before)
    optimizer.eval()
    assert all(torch.equal(parameters[name], ours[name]) for name in before)
    assert not torch.equal(before[LORA_B], ours[LORA_B])


@pytest.mark.parametrize(("name", "library"), [("adamw8bit", "bitsandbytes"), ("lion", "pytorch_optimizer")])
def test_an_absent_library_is_named_with_its_installation(name, library, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"needs {library}.*pip install {library}") as caught:
        make_optimizer(pair(), OptimizerSection(name=name))
    assert f"optimizer.name={name}" in str(caught.value)
