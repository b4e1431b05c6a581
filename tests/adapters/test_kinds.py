"""What holds for every kind of adapter, on small layers: matrix of kinds and laws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.masters import make_adapter
from lora_trainer.adapters.timestep_rank import TimestepRank
from lora_trainer.config.schema import OptimizerSection
from lora_trainer.core.errors import UsageError
from lora_trainer.evaluation.loading import at_strength, without_lora
from lora_trainer.evaluation.weight_changes import change_weights
from lora_trainer.lora_format.keys import ONE_TEXT_ENCODER
from lora_trainer.lora_format.reading import read_adapter
from lora_trainer.lora_format.weights import AdapterWeights, shapes_of
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.quantization.store import make_quantizer, store_layers, wide_weight
from lora_trainer.optim.optimizers import make_optimizer
from lora_trainer.optim.random_updates import make_bf16_step
from tests.lora_format.tiny import facts

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


MIXED = AdapterOptions(
    4, 6.0, ranks={"*conv1": 2, "*proj_in": 7}, alphas={"*.to_q": 3.0}, dropouts={"*.to_v": 0.5}, rank_stabilized=True
)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_alphas_and_dropout_by_layer(kind: str, tmp_path: Path):
    """Each layer has those of its pattern, in training, in the change and in both files."""
    model, parameters, weights, x = adapted(kind, MIXED)
    plain = small()
    usual = ADAPTERS[kind].load().inject(plain, NAMES, AdapterOptions(4, 6.0), 1)
    differ = {name for name in parameters if name not in usual or parameters[name].shape != usual[name].shape}
    assert any(KERNEL in name for name in differ)
    assert not any(LINEAR in name for name in differ)
    output = model.eval()(x)
    assert gap(merged(weights, model)(x), output) < 1e-5
    assert torch.equal(model.train()(x), output) == (kind == "oft")  # which has no dropout
    layout = FileLayout(torch.float32, shapes_of({"unet": small()}), ONE_TEXT_ENCODER, ADAPTERS[kind].load().forms)
    for path in write_lora(tmp_path, "cat", weights, facts(), layout):
        assert gap(merged(read_adapter(path), model)(x), output) < 1e-5, path.name


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_starts_from_a_file_of_its_kind(kind: str, tmp_path: Path):
    """Bit for bit where rank and scale are the same, else the same change; both files, alpha unlike rank in the run."""
    spec = ADAPTERS[kind].load()
    assert spec.start_from is not None
    model, _, weights, x = adapted(kind, AdapterOptions(4, 4.0))
    layout = FileLayout(torch.float32, shapes_of({"unet": small()}), ONE_TEXT_ENCODER, spec.forms)
    for path in write_lora(tmp_path, "cat", weights, facts(), layout):
        updates = {name.removeprefix("unet."): update for name, update in read_adapter(path).modules.items()}
        for options, is_exact in (
            (AdapterOptions(4, 4.0), True),
            (AdapterOptions(4 if kind == "oft" else 6, 3.0), False),
        ):
            started = small()
            parameters = spec.inject(started, NAMES, options, 9)
            assert spec.start_from(parameters, updates, options) == []
            assert gap(started(x), model(x)) < 1e-5
            assert not is_exact or torch.equal(started(x), model(x)), path.name
            started(x).square().mean().backward()
            assert all(bool(each.grad.any()) for each in parameters.values() if each.grad is not None)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("lora", "Its rank is 4, and lora.rank=2 is lower"),
        ("dora", "Its rank is 4, and lora.rank=2 is lower"),
        ("lokr", "have a whole w2, and lora.rank a lower rank"),
        ("loha", "Its rank is 4, and lora.rank=2 is lower"),
        ("oft", "have blocks of other sizes: 4, by lora.rank=2 other ones"),
    ],
)
def test_what_an_adapter_cannot_start_from_is_named_and_changes_nothing(kind: str, problem: str):
    spec = ADAPTERS[kind].load()
    assert spec.start_from is not None
    _, _, weights, _ = adapted(kind, AdapterOptions(4, 4.0))
    updates = {name.removeprefix("unet."): update for name, update in weights.modules.items()}
    parameters = spec.inject(small(), NAMES, AdapterOptions(2, 2.0), 1)
    before = {name: each.detach().clone() for name, each in parameters.items()}
    found = spec.start_from(parameters, updates, AdapterOptions(2, 2.0))
    assert problem in found[0].message
    assert all(torch.equal(before[name], each) for name, each in parameters.items())


def test_a_lokr_has_the_sides_of_its_factor():
    """As LyCORIS divides them: 48 = 4 * 12, 32 = 4 * 8; and where 16 is above the square root w2 still has the longer side."""
    for factor, one, two in ((-1, (4, 6), (8, 8)), (4, (4, 4), (8, 12)), (16, (2, 3), (16, 16))):
        options = AdapterOptions(64, 64.0, factor=factor)
        model, parameters, weights, x = adapted("lokr", options)
        own = {name.rpartition(".lokr_")[2]: each for name, each in parameters.items() if name.startswith(LINEAR)}
        assert tuple(own["w1.default"].shape) == one
        assert tuple(own["w2.default"].shape) == two
        assert gap(merged(weights, model)(x), model(x)) < 1e-5
    start = ADAPTERS["lokr"].load().start_from
    assert start is not None
    updates = {LINEAR: weights.modules[f"unet.{LINEAR}"]}
    other = AdapterOptions(64, 64.0, factor=4)
    (problem,) = start(ADAPTERS["lokr"].load().inject(small(), NAMES, other, 1), updates, other)
    assert "w1 is [2, 3], and [4, 4] by lora.lokr_factor=4" in problem.message


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_fewer_rows_at_high_noise_are_the_change_of_these_rows(kind: str):
    """Each sample's output is that of an adapter cut to its rows; a DoRA's norms are those of its rows, too."""
    spec, options = ADAPTERS[kind].load(), AdapterOptions(4, 6.0)
    assert spec.limit_ranks is not None
    model, _, _, x = adapted(kind, options)
    whole = model(x)
    limit = TimestepRank(1, 1.0, 1000)
    spec.limit_ranks(model, limit)
    assert gap(model(x), whole) < 1e-6
    times = torch.tensor([999.0, 400.0])
    assert limit.rows(times, 4).tolist() == [1, 2]
    with limit.limited(times):
        found = model(x)
    for place, rows in enumerate((1, 2)):
        cut, parameters, _, _ = adapted(kind, options)
        for name, parameter in parameters.items():
            if ".lora_A." in name:
                parameter.data[rows:] = 0.0
        assert gap(found[place], cut(x)[place]) < 1e-5
        assert gap(found[place], whole[place]) > 1e-3


def test_a_dora_in_bf16_with_stochastic_rounding_is_the_base_at_first():
    """Its magnitudes stay in fp32, and small steps of them are kept."""
    model = small().to(torch.bfloat16)
    parameters = ADAPTERS["dora"].load().inject(model, NAMES, OPTIONS["scaled"], 1)
    adapter = make_adapter(parameters, torch.bfloat16, has_masters=False)
    x = torch.randn(2, 16, 10, 10, dtype=torch.bfloat16)
    assert torch.equal(model(x), small().to(torch.bfloat16)(x))
    magnitudes = {name: each for name, each in adapter.masters.items() if "magnitude" in name}
    assert {each.dtype for each in magnitudes.values()} == {torch.float32}
    before = {name: each.detach().clone() for name, each in magnitudes.items()}
    optimizer = make_optimizer(adapter.masters, OptimizerSection(learning_rate=1e-6))
    model(x).float().square().mean().backward()
    make_bf16_step(optimizer, adapter.masters, 0)(0)
    for name, each in magnitudes.items():
        moved = (each.detach() - before[name]).abs()
        assert 0.0 < float(moved.max()) < 1e-5


def test_oft_leaves_out_layers_without_a_block_to_rotate():
    """13 outputs have no divisor but 1: such a layer would train numbers that change nothing."""
    model = nn.ModuleDict({"one": nn.Linear(8, 13), "other": nn.Linear(8, 12)})
    parameters = ADAPTERS["oft"].load().inject(model, ["one", "other"], AdapterOptions(4, 4.0), 1)
    assert list(parameters) == ["other.oft_blocks.default"]
    with pytest.raises(UsageError, match="nothing to train"):
        ADAPTERS["oft"].load().inject(small(), NAMES, AdapterOptions(1, 1.0), 1)
