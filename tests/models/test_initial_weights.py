"""Initial weights of a LoRA, ranks by layer, and rows by timestep: the arithmetic, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import KIND, MovedLinear, inject_lora, sum_updates, updates
from lora_trainer.adapters.timestep_rank import TimestepRank
from lora_trainer.core.errors import TrainingFailed
from lora_trainer.models.quantization.store import make_quantizer, store_layers
from lora_trainer.training.objectives.guidance import without_adapter

MOVED = ("pissa", "pissa_niter_4", "olora")
LAYERS = ("0", "2")


def model(width: int = 20) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, width), nn.Tanh(), nn.Linear(width, 16, bias=False))
    return layers.double().requires_grad_(False)


def adapted(name: str, rank: int = 4, alpha: float = 6.0) -> tuple[nn.Sequential, dict[str, nn.Parameter], Tensor]:
    layers, x = model(), torch.randn(5, 24, dtype=torch.float64)
    base = layers(x)
    options = AdapterOptions(rank, alpha, initialization=name)
    parameters = inject_lora(layers, LAYERS, options, seed=1)
    sum_updates(layers)
    return layers, parameters, base


def inputs() -> Tensor:
    model()  # the same numbers as in `adapted`
    return torch.randn(5, 24, dtype=torch.float64)


@pytest.mark.parametrize("name", ["default", "gaussian", "svd_down", *MOVED])
def test_the_first_prediction_is_the_base_models_to_the_bit(name: str):
    layers, _, base = adapted(name)
    assert torch.equal(layers(inputs()), base)


@pytest.mark.parametrize("name", MOVED)
def test_the_exported_update_reproduces_the_trained_model(name: str):
    """A plain LoRA of twice the rank, on the untouched base."""
    layers, parameters, base = adapted(name)
    with torch.no_grad():
        for each in parameters.values():
            each.add_(torch.randn_like(each) * 0.1)
    trained: dict[str, Tensor] = {**parameters, **KIND.fixed(layers)}
    found = updates(trained, "unet", AdapterOptions(4, 6.0, initialization=name))
    plain, x = model(), inputs()
    with torch.no_grad():
        for module, pair in found.items():
            assert pair.rank == 8
            layer = plain.get_submodule(module.removeprefix("unet."))
            layer.weight += pair.up @ pair.down * pair.scale
    torch.testing.assert_close(layers(x), plain(x), rtol=1e-12, atol=1e-12)
    assert (plain(x) - base).abs().max() > 1e-2
    with without_adapter(layers):
        assert torch.equal(layers(x), base)


@pytest.mark.parametrize("name", MOVED)
def test_gradients_are_those_of_pefts_own_form(name: str):
    """Which keeps W - scale * up0 @ down0 as its base, and trains up0 + up and down0 + down."""
    layers, parameters, _ = adapted(name)
    theirs = model()
    config = LoraConfig(r=4, lora_alpha=6, target_modules=list(LAYERS))
    inject_adapter_in_model(config, theirs)
    with torch.no_grad():
        for module, layer in theirs.named_modules():
            if isinstance(layer, Linear):
                own = layers.get_submodule(module)
                assert isinstance(own, MovedLinear)
                layer.lora_A["default"].weight.copy_(own.initial_down)
                layer.lora_B["default"].weight.copy_(own.initial_up)
                layer.base_layer.weight -= 1.5 * own.initial_up @ own.initial_down
    for net in (layers, theirs):
        net(inputs()).square().sum().backward()
    wanted = dict(theirs.named_parameters())
    for parameter, each in parameters.items():
        assert each.grad is not None
        torch.testing.assert_close(each.grad, wanted[parameter].grad, rtol=1e-9, atol=1e-9)
        assert each.grad.abs().max() > 1e-3  # up and down learn from the first step on


def test_pissa_moves_the_best_approximation_of_the_weight():
    layers, _, _ = adapted("pissa")
    for name in LAYERS:
        layer = layers.get_submodule(name)
        weight = layer.base_layer.weight
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
        best = left[:, :4] * sizes[:4] @ right[:4]
        torch.testing.assert_close(1.5 * layer.initial_up @ layer.initial_down, best, rtol=0, atol=1e-6)


def test_the_fast_svd_finds_what_the_exact_one_does():
    torch.manual_seed(3)
    weight = torch.randn(60, 8) @ torch.randn(8, 50) + 0.01 * torch.randn(60, 50)
    layers = nn.Sequential(nn.Linear(50, 60)).requires_grad_(False)
    layers[0].weight.copy_(weight)
    products = []
    for name in ("pissa", "pissa_niter_4"):
        injected = nn.Sequential(nn.Linear(50, 60)).requires_grad_(False)
        injected[0].weight.copy_(weight)
        inject_lora(injected, ["0"], AdapterOptions(8, 8.0, initialization=name), seed=0)
        products.append(injected[0].initial_up @ injected[0].initial_down)
    torch.testing.assert_close(products[1], products[0], rtol=0, atol=1e-3)


def test_svd_down_starts_as_large_as_usual():
    layers, parameters, _ = adapted("svd_down")
    for name in LAYERS:
        down, up = (parameters[f"{name}.lora_{half}.default.weight"] for half in "AB")
        right = torch.linalg.svd(layers.get_submodule(name).base_layer.weight, full_matrices=False)[2][:4]
        cosines = (down @ right.T).abs() * math.sqrt(3)
        torch.testing.assert_close(cosines, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-5)
        assert not up.any()


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_a_quantized_base_starts_from_its_own_dequantized_weight(stored):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 48)).requires_grad_(False)
    store_layers(layers, make_quantizer(stored))
    x = torch.randn(3, 32)
    base, dequantized = layers(x), layers(torch.eye(32)).T - layers[0].bias[:, None]
    inject_lora(layers, ["0"], AdapterOptions(32, 32.0, initialization="pissa"), seed=0)
    assert torch.equal(layers(x), base)
    torch.testing.assert_close(layers[0].initial_up @ layers[0].initial_down, dequantized, rtol=0, atol=1e-4)


def test_layers_have_the_rank_alpha_and_dropout_of_the_last_pattern_that_matches():
    options = AdapterOptions(
        4, 8.0, 0.0, ranks={"*": 6, "2": 3}, alphas={"2": 1.5}, dropouts={"0": 0.25}, alpha_is_rank=False
    )
    layers = model()
    layers.append(nn.Conv2d(4, 4, 3))
    parameters = inject_lora(layers, ["0", "2", "3"], options, seed=0)
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    assert shapes["0.lora_A.default.weight"] == (6, 24)
    assert shapes["2.lora_B.default.weight"] == (16, 3)
    assert shapes["3.lora_A.default.weight"] == (6, 4, 3, 3)
    assert [layers[place].scaling["default"] for place in (0, 2)] == [8 / 6, 0.5]
    assert layers[0].lora_dropout["default"].p == 0.25
    assert isinstance(layers[2].lora_dropout["default"], nn.Identity)
    pairs = updates(parameters, "unet", options)
    assert {name: (pair.rank, pair.alpha) for name, pair in pairs.items()} == {
        "unet.0": (6, 8.0),
        "unet.2": (3, 1.5),
        "unet.3": (6, 8.0),
    }
    follows = AdapterOptions(4, 4.0, ranks={"0": 2}, alpha_is_rank=True, prefix="text_encoder.")
    assert follows.of_layer("0").rank == 4  # patterns have a text encoder's name first
    assert AdapterOptions(4, 4.0, ranks={"t.0": 2}, alpha_is_rank=True, prefix="t.").of_layer("0").alpha == 2.0


def test_rows_grow_as_the_noise_falls():
    """As in arXiv:2507.05964: from the least rank at the most noise to all at none."""
    limit, t = TimestepRank(2, 1.0, 1000), torch.tensor([0, 1, 250, 500, 999])
    assert limit.rows(t, 8).tolist() == [8, 7, 6, 5, 2]
    assert TimestepRank(2, 2.0, 1000).rows(t, 8).tolist() == [8, 7, 5, 3, 2]
    assert limit.rows(t, 1).tolist() == [1] * 5


@pytest.mark.parametrize("shape", [(4, 24), (4, 3, 24)])
def test_each_sample_trains_its_own_rows(shape: tuple[int, ...]):
    """A batch gives what its samples give one by one with as many rows, forward and backward."""
    layers, limit = model(), TimestepRank(1, 1.0, 100)
    parameters = inject_lora(layers, LAYERS, AdapterOptions(5, 5.0), seed=0)
    sum_updates(layers)
    assert KIND.limit_ranks is not None
    KIND.limit_ranks(layers, limit)
    for name, each in parameters.items():
        if "lora_B" in name:
            nn.init.normal_(each)
    x, t = torch.randn(*shape, dtype=torch.float64), torch.tensor([0, 30, 60, 99])
    unlimited = layers(x)
    with limit.limited(t):
        together = layers(x)
        together.square().sum().backward()
    gradients = {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
    single = torch.zeros_like(together)
    for each in parameters.values():
        each.grad = None
    for place, step in enumerate(t):
        with limit.limited(step[None]):
            single[place] = (alone := layers(x[place : place + 1]))[0].detach()
            alone.square().sum().backward()
    torch.testing.assert_close(together, single, rtol=1e-12, atol=1e-12)
    for name, each in parameters.items():
        torch.testing.assert_close(gradients[name], each.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(together[0], unlimited[0], rtol=1e-12, atol=1e-12)  # no noise: all rows
    assert (together[3] - unlimited[3]).abs().max() > 1e-2
    assert torch.equal(layers(x), unlimited)  # outside of the block all rows are there again


def test_rows_of_convolutions_follow_the_noise_too():
    layers, limit = nn.Sequential(nn.Conv2d(3, 6, 3)).double().requires_grad_(False), TimestepRank(1, 1.0, 10)
    parameters = inject_lora(layers, ["0"], AdapterOptions(4, 4.0), seed=0)
    assert KIND.limit_ranks is not None
    KIND.limit_ranks(layers, limit)
    with limit.limited(torch.tensor([9])):
        layers(torch.randn(1, 3, 8, 8, dtype=torch.float64)).sum().backward()
    gradient = parameters["0.lora_B.default.weight"].grad
    assert gradient is not None
    assert gradient[:, 0].abs().min() > 0
    assert not gradient[:, 1:].any()


def test_a_layer_that_mixes_samples_is_refused():
    layers, limit = model(), TimestepRank(1, 1.0, 10)
    inject_lora(layers, LAYERS, AdapterOptions(4, 4.0), seed=0)
    assert KIND.limit_ranks is not None
    KIND.limit_ranks(layers, limit)
    with limit.limited(torch.tensor([1, 2])), pytest.raises(TrainingFailed, match=r"sees 6 rows in a batch of 2"):
        layers(torch.randn(6, 24, dtype=torch.float64))
