"""The arithmetic of the tools for LoRA files, against torch's own SVD of the full matrices."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.core.errors import UsageError
from lora_trainer.lora_format.kinds.dora import DecomposedUpdate
from lora_trainer.lora_format.kinds.full import RowsUpdate, WholeUpdate
from lora_trainer.lora_format.kinds.lokr import KroneckerUpdate
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.low_rank import EXACT_SIDE, RankLimits, factor, principal, sharing
from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights
from lora_trainer.lora_tools.combining import average_of_parameters, cast_for_storage, combine, ema_weights
from lora_trainer.lora_tools.to_lora import to_lora

NAMES = ("unet.a.attn1.to_q", "unet.a.attn1.to_k", "unet.mid.conv1", "text_encoder.text_model.encoder.layers.0.mlp.fc1")
SHAPES = {NAMES[0]: (24, 20), NAMES[1]: (9, 20), NAMES[2]: (16, 6, 3, 3), NAMES[3]: (40, 12)}


def pair(shape: tuple[int, ...], rank: int, alpha: float, seed: int) -> LoraPair:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, *shape[1:], generator=generator) * 10 ** torch.randn(1, generator=generator)
    up = torch.randn(shape[0], rank, *[1] * (len(shape) - 2), generator=generator)
    return LoraPair(down, up, alpha)


@st.composite
def loras(draw: st.DrawFn) -> LoraWeights:
    """Mixed ranks and alphas, above and below the layers' sides; convolutions among them."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    drawn = {
        name: pair(
            SHAPES[name],
            draw(st.integers(1, 30)),
            draw(st.sampled_from([1.0, 2.0, 0.5, 7.0])),
            draw(st.integers(0, 999)),
        )
        for name in names
    }
    return LoraWeights(drawn)


def delta(weights: LoraWeights, name: str) -> torch.Tensor:
    """The update in float64, zero where the LoRA has none."""
    if name not in weights.modules:
        return torch.zeros(SHAPES[name], dtype=torch.float64)
    found = weights.modules[name]
    wide = LoraPair(found.down.double(), found.up.double(), found.alpha)
    return (wide.up.flatten(1) @ wide.down.flatten(1) * wide.scale).reshape(SHAPES[name])


def share_of_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / (exact.norm() or 1.0))


@given(st.lists(loras(), min_size=1, max_size=3), st.data())
@settings(max_examples=40)
def test_a_merge_is_the_weighted_sum_of_the_updates(files, data):
    weights = [data.draw(st.sampled_from([1.0, -0.5, 0.3, 2.0, 0.0])) for _ in files]
    merged = combine(files, weights)
    for name in {name for each in files for name in each.modules}:
        exact = sum(delta(each, name) * weight for each, weight in zip(files, weights, strict=True))
        largest = max(float((delta(each, name) * weight).norm()) for each, weight in zip(files, weights, strict=True))
        assert float((delta(merged.weights, name) - exact).norm()) <= 1e-6 * (largest or 1.0)
    used = [each for each, weight in zip(files, weights, strict=True) if weight]
    for name, found in merged.weights.modules.items():
        assert found.rank == sum(each.modules[name].rank for each in used if name in each.modules)


@given(st.lists(loras(), min_size=1, max_size=2), st.integers(1, 40))
@settings(max_examples=40)
def test_a_lower_rank_is_the_best_of_that_rank(files, rank):
    """Eckart and Young: no update of the rank is nearer than the truncated SVD of the full matrix."""
    merged = combine(files, [1.0] * len(files), RankLimits(rank=rank))
    rows = {row.name: row for row in merged.layers}
    for name, found in merged.weights.modules.items():
        exact = sum(delta(each, name) for each in files).flatten(1)
        values = torch.linalg.svdvals(exact)
        best = float(values[rank:].square().sum().sqrt())
        error = float((delta(merged.weights, name).flatten(1) - exact).norm())
        assert found.rank <= rank
        assert error <= best + 2e-6 * float(values[0])
        kept = math.sqrt(max(0.0, 1 - (best / float(values.norm())) ** 2))
        assert rows[name].kept == pytest.approx(kept, abs=1e-5)


@given(loras(), st.floats(0.05, 1.0), st.sampled_from(["energy", "frobenius", "ratio"]))
@settings(max_examples=40)
def test_each_limit_keeps_the_fewest_directions_that_satisfy_it(lora, value, limit):
    keep = RankLimits(ratio=1 / value) if limit == "ratio" else RankLimits(**{limit: value})
    found = combine([lora], [1.0], keep).weights
    for group in sharing(lora.modules):  # one layer, fused, where they have a down projection in common
        fused = torch.cat([delta(lora, name).flatten(1) for name in group])
        values = torch.linalg.svdvals(fused)
        squares = values.square().cumsum(0) / values.square().sum()
        if limit == "ratio":
            # Values at the limit itself may be rounded to either side.
            counts = {int((values >= values[0] * value * (1 + off)).sum()) for off in (-1e-6, 1e-6)}
        else:
            wanted = value**2 if limit == "frobenius" else value
            counts = {int((squares < wanted * (1 + off)).sum()) + 1 for off in (-1e-6, 1e-6)}
        real = min(lora.modules[group[0]].rank, *fused.shape)
        ranks = {found.modules[name].rank for name in group}
        assert len(ranks) == 1
        assert ranks <= {max(1, min(count, real)) for count in counts}


def test_limits_hold_together():
    values = torch.tensor([8.0, 4.0, 2.0, 1.0])
    assert RankLimits(rank=3).count(values) == 3
    assert RankLimits(energy=0.9).count(values) == 2  # 64 + 16 of 85
    assert RankLimits(frobenius=0.9).count(values) == 2  # 0.81 of 85 is more than 64
    assert RankLimits(frobenius=0.86).count(values) == 1
    assert RankLimits(ratio=4).count(values) == 3
    assert RankLimits(rank=2, energy=1.0).count(values) == 2
    assert RankLimits(rank=4, energy=0.5, ratio=8).count(values) == 1
    assert RankLimits(energy=0.5).count(torch.zeros(4)) == 1


def test_layers_that_share_their_down_projection_keep_sharing():
    """As in a LoRA that was trained on a fused layer: of separate downs the fused layer would have three times the rank."""
    one, other = pair((8, 20), 6, 6.0, 1), pair((12, 20), 6, 3.0, 2)
    lora = LoraWeights({"unet.q": one, "unet.k": LoraPair(one.down.clone(), other.up, 3.0), "unet.v": other})
    assert sharing(lora.modules) == [["unet.q", "unet.k"], ["unet.v"]]
    lower = combine([lora], [1.0], RankLimits(rank=3)).weights.modules
    assert torch.equal(lower["unet.q"].down, lower["unet.k"].down)
    both = torch.cat([lora.modules[name].delta() for name in ("unet.q", "unet.k")]).double()
    best = torch.linalg.svdvals(both)[3:].norm()
    found = torch.cat([lower[name].delta() for name in ("unet.q", "unet.k")]).double()
    assert float((found - both).norm()) == pytest.approx(float(best), rel=1e-5)


def test_small_updates_keep_their_precision_in_fp16():
    """A scale folded into one half alone would lie among fp16's subnormal numbers."""
    small = pair((24, 20), 4, 0.01, 3)
    small = LoraPair(small.down, small.up * 1e-4, 0.01)
    found = cast_for_storage(combine([LoraWeights({NAMES[0]: small})], [1.0]), torch.float16, one_alpha=True)
    assert found.layers[0].error < 2**-10
    folded = (small.up * small.scale).half().double() @ small.down.half().double()
    assert share_of_error(folded, delta(LoraWeights({NAMES[0]: small}), NAMES[0])) > 5 * 2**-10


def test_one_alpha_for_all_ranks_changes_no_update():
    lora = LoraWeights({NAMES[0]: pair(SHAPES[NAMES[0]], 5, 2.0, 1), NAMES[2]: pair(SHAPES[NAMES[2]], 3, 1.0, 2)})
    found = cast_for_storage(combine([lora], [1.0]), torch.float32, one_alpha=True)
    assert {each.alpha for each in found.weights.modules.values()} == {5.0}
    for name in lora.modules:
        assert share_of_error(delta(found.weights, name), delta(lora, name)) < 1e-6
    assert all(layer.error < 1e-6 for layer in found.layers)


@pytest.mark.parametrize("shape", [(EXACT_SIDE + 100, EXACT_SIDE + 20), (600, 64, 3, 3)])
@pytest.mark.parametrize("decay", [0.99, 0.8])
def test_large_layers_are_decomposed_nearly_as_well_as_exactly(shape, decay):
    """Also where singular values fall slowly, as between two fine-tuned models; the same bits each time."""
    torch.manual_seed(0)
    rows, columns = shape[0], math.prod(shape[1:])
    side = min(rows, columns)
    left, right = torch.linalg.qr(torch.randn(rows, side)).Q, torch.linalg.qr(torch.randn(columns, side)).Q
    values = decay ** torch.arange(side)
    change = (left * values @ right.T).reshape(shape)
    low, kept, error = factor(change, RankLimits(rank=16), 16)
    best = float(values[16:].norm() / values.norm())
    assert error <= best * 1.005 + 1e-5
    assert kept == pytest.approx(math.sqrt(1 - best**2), rel=1e-3)
    assert low.weight_shape == shape
    again, _, _ = factor(change, RankLimits(rank=16), 16)
    assert torch.equal(low.up, again.up)
    assert torch.equal(low.down, again.down)


def test_principal_vectors_are_orthonormal():
    torch.manual_seed(0)
    left, values, right = principal(torch.randn(500, 450), 8)
    assert (left.T @ left - torch.eye(8)).abs().max() < 1e-5
    assert (right @ right.T - torch.eye(8)).abs().max() < 1e-5
    assert bool((values[:-1] >= values[1:]).all())


def test_a_clamp_cuts_off_the_largest_numbers():
    """As sd-scripts' extraction: of U S and V^T together, at the quantile of their numbers."""
    torch.manual_seed(0)
    change = torch.randn(30, 20)
    left, values, right = torch.linalg.svd(change, full_matrices=False)
    up, down = left[:, :4] * values[:4], right[:4]
    limit = torch.quantile(torch.cat([up.flatten(), down.flatten()]), 0.9)
    expected = up.clamp(-limit, limit) @ down.clamp(-limit, limit)
    low, _, error = factor(change, RankLimits(rank=4), 4, 0.9)
    assert float((low.delta() - expected).norm() / expected.norm()) < 0.02  # one number lies between
    assert error > factor(change, RankLimits(rank=4), 4)[2]


@given(loras(), st.integers(1, 12))
@settings(max_examples=20)
def test_a_change_of_any_kind_becomes_the_nearest_lora(lora, rank):
    changes = {name: delta(lora, name).float() for name in lora.modules}
    found = to_lora("cat", AdapterWeights({name: WholeUpdate({"diff": each}) for name, each in changes.items()}), rank)
    for row in found.layers:
        exact = changes[row.name].double()
        best = float(torch.linalg.svdvals(exact.flatten(1))[rank:].norm() / exact.norm())
        assert row.error == pytest.approx(best, abs=2e-5)
        assert share_of_error(delta(found.weights, row.name), exact) == pytest.approx(best, abs=2e-5)


def test_an_average_of_parameters_is_that_of_the_halves_and_one_of_updates_that_of_products():
    first, second = (LoraWeights({NAMES[0]: pair(SHAPES[NAMES[0]], 4, 2.0, seed)}) for seed in (1, 2))
    mean = average_of_parameters(["a", "b"], [first, second], [3.0, 1.0]).modules[NAMES[0]]
    one, other = first.modules[NAMES[0]], second.modules[NAMES[0]]
    assert torch.allclose(mean.down, one.down * 0.75 + other.down * 0.25, atol=1e-6)
    assert torch.allclose(mean.up, one.up * 0.75 + other.up * 0.25, atol=1e-6)
    updates = combine([first, second], [0.75, 0.25]).weights
    exact = delta(first, NAMES[0]) * 0.75 + delta(second, NAMES[0]) * 0.25
    assert share_of_error(delta(updates, NAMES[0]), exact) < 1e-6
    assert share_of_error(mean.delta().double(), exact) > 0.1


def test_an_average_of_parameters_of_another_kind_is_that_of_its_factors():
    """Of a DoRA of a LoKr too, and of the rows of a fused layer; not of states that are unlike."""
    generator = torch.Generator().manual_seed(3)

    def state(alpha: float = 2.0) -> AdapterWeights:
        shapes = {"lokr_w1": (4, 2), "lokr_w2_a": (3, 2), "lokr_w2_b": (2, 5)}
        lokr = KroneckerUpdate({name: torch.randn(each, generator=generator) for name, each in shapes.items()}, alpha)
        magnitude = torch.rand(12, 1, generator=generator)
        fused = RowsUpdate(replace(lokr, tensors={name: 2 * each for name, each in lokr.tensors.items()}), 3, 9)
        return AdapterWeights({"unet.a": DecomposedUpdate(lokr, magnitude), "unet.b": fused})

    first, second = state(), state()
    mean = average_of_parameters(["a", "b"], [first, second], [1.0, 3.0]).modules
    for name, found in mean.items():
        one, other = first.modules[name], second.modules[name]
        for end in one.change.tensors:
            expected = one.change.tensors[end] * 0.25 + other.change.tensors[end] * 0.75
            assert torch.allclose(found.change.tensors[end], expected, atol=1e-6)
    magnitudes = [each.modules["unet.a"].magnitude for each in (first, second)]
    assert torch.allclose(mean["unet.a"].magnitude, magnitudes[0] * 0.25 + magnitudes[1] * 0.75, atol=1e-6)
    assert (mean["unet.b"].begin, mean["unet.b"].end) == (3, 9)
    for_comfyui = replace(second, metadata={"lora_trainer.dora_over": "base"})
    with pytest.raises(UsageError) as refused:
        average_of_parameters(["a", "b", "c"], [first, state(alpha=1.0), for_comfyui], [1.0, 1.0, 1.0])
    reasons = [problem.message for problem in refused.value.problems]
    assert len(reasons) == 2
    assert "different kinds, ranks or alphas in 2 layers" in reasons[0]
    assert "rewritten for ComfyUI" in reasons[1]


@given(st.integers(1, 30), st.floats(0.01, 1.0))
def test_ema_weights_fall_by_the_decay_and_sum_to_one(count, decay):
    weights = ema_weights(count, decay)
    assert sum(weights) == pytest.approx(1.0)
    assert all(older == pytest.approx(newer * decay) for older, newer in pairwise(weights))
