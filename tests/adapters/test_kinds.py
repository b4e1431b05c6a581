"""What holds for every kind of adapter, on small layers: matrix of kinds and laws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.masters import make_adapter
from lora_trainer.config.schema import OptimizerSection
from lora_trainer.core.errors import UsageError
from lora_trainer.evaluation.loading import at_strength, without_lora
from lora_trainer.evaluation.weight_changes import change_weights
from lora_trainer.export.keys import ONE_TEXT_ENCODER
from lora_trainer.export.lora_file import FileLayout, read_adapter, write_lora
from lora_trainer.export.weights import AdapterWeights, shapes_of
from lora_trainer.models.quantization.store import make_quantizer, store_layers, wide_weight
from lora_trainer.optim.optimizers import make_optimizer
from tests.export.tiny import facts

LINEAR, KERNEL, STRIDED, POINT = "down_blocks.0.to_q", "mid_block.conv1", "conv_in", "mid_block.proj_in"
OPTIONS = {"scaled": AdapterOptions(4, 6.0), "rank-stabilized": AdapterOptions(6, 2.0, rank_stabilized=True)}
KINDS = sorted(ADAPTERS)


class Small(nn.Module):
    """Linear layers with and without bias, convolutions of one place and of 3 x 3, also with stride."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.mid_block = nn.ModuleDict(
            {"conv1": nn.Conv2d(32, 24, 3, padding=1, bias=False), "proj_in": nn.Conv2d(24, 48, 1)}
        )
        self.down_blocks = nn.ModuleList(
            [nn.ModuleDict({"to_q": nn.Linear(48, 32), "to_v": nn.Linear(32, 64, bias=False)})]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block["proj_in"](self.mid_block["conv1"](self.conv_in(x)).sin())
        block = self.down_blocks[0]
        result: Tensor = block["to_v"](block["to_q"](x.movedim(1, -1)).sin())
        return result


NAMES = [STRIDED, KERNEL, POINT, LINEAR, "down_blocks.0.to_v"]


def small(stored: str = "fp32") -> Small:
    torch.manual_seed(0)
    model = Small().requires_grad_(False)
    if narrow := make_quantizer(stored):  # type: ignore[arg-type]
        store_layers(model, narrow)
    return model


def adapted(kind: str, options: AdapterOptions, stored: str = "fp32", *, moved: float = 0.1):
    """A model with an adapter whose parameters are away from where they began, its updates, and its input."""
    model = small(stored)
    parameters = ADAPTERS[kind].load().inject(model, NAMES, options, 1)
    ADAPTERS[kind].load().speed_up(model)
    generator = torch.Generator().manual_seed(2)
    for parameter in parameters.values():
        parameter.data += moved * torch.randn(parameter.shape, generator=generator)
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    x = torch.randn(2, 16, 10, 10, generator=generator)
    return model, parameters, AdapterWeights(ADAPTERS[kind].load().updates(values, "unet", options)), x


def merged(weights: AdapterWeights, base: Small) -> Small:
    """A plain model with the changes in its weights."""
    model = small()
    for name in NAMES:
        layer, stored = model.get_submodule(name), base.get_submodule(name)
        stored = getattr(stored, "base_layer", stored)
        weight = wide_weight(stored, torch.float32)
        layer.weight.data = weight + weights.modules[f"unet.{name}"].delta(weight).reshape(weight.shape)
    return model


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().norm() / other.detach().norm())


@pytest.mark.parametrize("stored", ["fp32", "int8", "fp8", "nf4"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_change_is_that_of_the_forward_pass_on_every_base(kind: str, stored: str):
    """DoRA's norms are of dequantized weights, and every kernel is the base model's at first."""
    model, parameters, _, x = adapted(kind, OPTIONS["scaled"], stored, moved=0.0)
    assert torch.allclose(model(x), small(stored)(x), atol=1e-5)
    model, parameters, weights, x = adapted(kind, OPTIONS["scaled"], stored)
    output = model(x)
    output.square().mean().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters.values())
    assert gap(merged(weights, model)(x), output) < 1e-5
    assert gap(small(stored)(x), output) > 0.05


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("kind", KINDS)
def test_both_files_read_back_to_the_trained_change(kind: str, options: AdapterOptions, tmp_path: Path):
    model, _, weights, x = adapted(kind, options)
    shapes = shapes_of({"unet": small()})
    output = model(x)
    for path in write_lora(
        tmp_path,
        "cat",
        weights,
        facts(),
        FileLayout(torch.float32, shapes, ONE_TEXT_ENCODER)
        if kind == "lora"
        else FileLayout(torch.float32, shapes, ONE_TEXT_ENCODER, ADAPTERS[kind].load().forms),
    ):
        read = read_adapter(path)
        assert read.modules.keys() == weights.modules.keys()
        assert gap(merged(read, model)(x), output) < 1e-5, path.name


@pytest.mark.parametrize("kind", KINDS)
def test_strength_0_is_the_base_bit_for_bit_and_1_the_trained_model(kind: str):
    model, _, weights, x = adapted(kind, OPTIONS["scaled"])
    output, base = model(x), small()(x)
    pipeline = type("Pipeline", (), {})()
    unet = small()
    change_weights(pipeline, {"unet": unet}, weights)
    assert gap(unet(x), output) < 1e-5
    with without_lora(pipeline):
        assert torch.equal(unet(x), base)
    assert gap(unet(x), output) < 1e-5
    with at_strength(pipeline, 0.0):
        assert torch.equal(unet(x), base)
    half = merged(weights, model)
    for name in NAMES:
        own, before = half.get_submodule(name), small().get_submodule(name)
        own.weight.data = (own.weight.data + before.weight.data) / 2
    with at_strength(pipeline, 0.5):
        assert gap(unet(x), half(x)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_batch_give_its_gradient(kind: str):
    """In float64: a step that is split changes nothing but rounding."""
    gradients = []
    for parts in (1, 4):
        model, parameters, _, x = adapted(kind, OPTIONS["scaled"])
        model.double()
        for part in torch.cat([x, 2 * x]).double().chunk(parts):
            model(part).sin().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in parameters.items()})
    for name, whole in gradients[0].items():
        tolerance = 1e-9 if kind != "oft" and kind != "dora" else 1e-5  # norms and rotations are made in fp32
        assert gap(gradients[1][name], whole) < tolerance, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_adapter(kind: str):
    one, other, different = (
        ADAPTERS[kind].load().inject(small(), NAMES, OPTIONS["scaled"], seed) for seed in (3, 3, 4)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    random = kind != "oft"  # which begins at 0
    assert random == any(not torch.equal(one[name], different[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_magnitudes_have_no_weight_decay_and_stay_in_fp32(kind: str):
    parameters = ADAPTERS[kind].load().inject(small().to(torch.bfloat16), NAMES, OPTIONS["scaled"], 1)
    adapter = make_adapter(parameters, torch.bfloat16)
    optimizer = make_optimizer(adapter.masters, OptimizerSection(weight_decay=0.1))
    undecayed = [each for group in optimizer.param_groups if not group["weight_decay"] for each in group["params"]]
    assert len(undecayed) == (len(NAMES) if kind == "dora" else 0)
    wide = [name for name, copy in adapter.copies.items() if copy.dtype == torch.float32]
    assert len(wide) == len(undecayed)
    assert all("magnitude" in name for name in wide)


@pytest.mark.parametrize("kind", ["lokr", "loha", "dora"])
def test_dropout_is_of_the_adapters_input(kind: str):
    model = small()
    ADAPTERS[kind].load().inject(model, NAMES, AdapterOptions(4, 4.0, dropout=0.5), 1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    x = torch.randn(2, 16, 10, 10, generator=generator)
    assert torch.equal(model.eval()(x), model(x))
    assert not torch.equal(model.train()(x), model(x))


def test_oft_leaves_out_layers_without_a_block_to_rotate():
    """13 outputs have no divisor but 1: such a layer would train numbers that change nothing."""
    model = nn.ModuleDict({"one": nn.Linear(8, 13), "other": nn.Linear(8, 12)})
    parameters = ADAPTERS["oft"].load().inject(model, ["one", "other"], AdapterOptions(4, 4.0), 1)
    assert list(parameters) == ["other.oft_blocks.default"]
    with pytest.raises(UsageError, match="nothing to train"):
        ADAPTERS["oft"].load().inject(small(), NAMES, AdapterOptions(1, 1.0), 1)
