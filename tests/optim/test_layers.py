"""Learning rates and weight decay of layers by patterns: who gets which, and patterns that match nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_trainer.config.schema import OptimizerSection
from lora_trainer.core.errors import UsageError
from lora_trainer.optim.layers import layer_notes
from lora_trainer.optim.optimizers import OPTIMIZERS, make_optimizer, shares_of
from lora_trainer.training.step import set_lr

LAYERS = ("down_blocks.0.attn1.to_q", "down_blocks.1.attn1.to_q", "mid_block.attn1.to_q", "up_blocks.0.attn2.to_k")
TEXT = "text_encoder.layers.0.q_proj"


def weights(*layers: str) -> dict[str, nn.Parameter]:
    names = [f"{layer}.lora_{half}.default.weight" for layer in layers for half in "AB"]
    return {name: nn.Parameter(torch.ones(4, 4)) for name in names}


def test_the_last_pattern_that_matches_a_layer_counts():
    section = OptimizerSection(
        learning_rate=1e-2,
        weight_decay=0.1,
        layer_learning_rates={"down_blocks.*": 0.5, "*.1.*": 0.0, "text_encoder.*": 2.0},
        layer_weight_decay={"*.attn2.*": 0.3},
    )
    parameters = weights(*LAYERS, TEXT)
    rates = ((1e-3, {name for name in parameters if name.startswith("text")}),)
    optimizer = make_optimizer(parameters, section, rates)
    set_lr(optimizer, 5e-3, shares_of(parameters, section, rates))
    names = {id(each): name.partition(".lora_")[0] for name, each in parameters.items()}
    found = {
        names[id(each)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for each in group["params"]
    }
    expected = dict(zip(LAYERS, [(2.5e-3, 0.1), (0.0, 0.1), (5e-3, 0.1), (5e-3, 0.3)], strict=True))
    assert found == {name: pytest.approx(values) for name, values in {**expected, TEXT: (1e-3, 0.1)}.items()}


@pytest.mark.parametrize("optimizer_name", sorted(set(OPTIMIZERS) - {"prodigy"}))  # it has one learning rate for all
def test_a_layer_with_the_factor_0_stays_as_it_is(optimizer_name):
    section = OptimizerSection(name=optimizer_name, learning_rate=1e-2, layer_learning_rates={"mid_block.*": 0.0})
    parameters = weights(*LAYERS)
    optimizer = make_optimizer(parameters, section)
    for _ in range(3):
        set_lr(optimizer, 1e-2, shares_of(parameters, section, ()))
        for each in parameters.values():
            each.grad = torch.ones_like(each)
        optimizer.step()
    for name, each in parameters.items():
        assert torch.equal(each, torch.ones(4, 4)) == name.startswith("mid_block.")


def test_the_log_says_which_layers_have_which_values():
    section = OptimizerSection(
        layer_learning_rates={"*": 0.5, "down_blocks.*": 2.0}, layer_weight_decay={"*.attn2.*": 0.0}
    )
    assert layer_notes(weights(*LAYERS), section) == (
        "learning rate x 0.5: 2 of 4 layers, '*' (mid_block.attn1.to_q, up_blocks.0.attn2.to_k)",
        "learning rate x 2: 2 of 4 layers, 'down_blocks.*' (down_blocks.0.attn1.to_q, down_blocks.1.attn1.to_q)",
        "weight decay 0: 1 of 4 layers, '*.attn2.*' (up_blocks.0.attn2.to_k)",
    )
    assert layer_notes(weights(*LAYERS), OptimizerSection()) == ()


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names():
    section = OptimizerSection(
        layer_learning_rates={"middle_block.*": 0.5}, layer_weight_decay={"*.attn3.*": 0.0, "*": 0.0}
    )
    with pytest.raises(UsageError) as caught:
        layer_notes(weights(*LAYERS), section)
    first, second = caught.value.problems
    assert first.message == "optimizer.layer_learning_rates: 'middle_block.*' matches none of 4 layers."
    assert first.fix.startswith("Did you mean 'mid_block.*' or ")
    assert "'*.attn3.*'" in second.message
    assert second.fix.startswith("Did you mean '*.attn")
