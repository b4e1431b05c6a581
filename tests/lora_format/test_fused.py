"""Parts of a fused layer are joined and split bit-exactly, also for a pair trained on the whole layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.loaders.single_file_utils import swap_scale_shift
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lora_trainer.lora_format.fused import join, ranks_for_header, split
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.layouts import fused
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import FileLayout, write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of, read_lora
from tests.lora_format.tiny import facts

SHARES = st.sampled_from([(1, 1, 1), (1, 1, 1, 4)])


def layer(shares: tuple[int, ...]) -> tuple[object, ...]:
    return fused("blocks.{}.qkv", *(f"ours.{{}}.{part}" for part in range(len(shares))), shares=shares)


def pair(rank: int, rows: int, seed: int, alpha: float | None = None) -> LoraPair:
    generator = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, 5, generator=generator), torch.randn(rows, rank, generator=generator)
    return LoraPair(down.half(), up.half(), float(rank) if alpha is None else alpha)


@given(SHARES, st.data())
@settings(deadline=None, max_examples=60)
def test_parts_come_back_bit_for_bit(shares: tuple[int, ...], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.sampled_from(range(len(shares))), min_size=1))
    scale = data.draw(st.sampled_from([1.0, 0.5, 2.0]))
    ranks = {part: data.draw(st.integers(1, 4)) for part in sorted(chosen)}
    parts = {part: pair(rank, 3 * shares[part], part, scale * rank) for part, rank in ranks.items()}
    if data.draw(st.booleans()):  # as before the first step
        first = min(parts)
        parts[first] = LoraPair(parts[first].down, torch.zeros_like(parts[first].up), parts[first].alpha)
    rules = layer(shares)
    whole = join(parts, rules)
    assert whole.rank == sum(ranks.values())
    back = split(whole, rules, ranks_for_header(parts, whole, rules))
    assert set(back) == set(parts)
    for part, each in parts.items():
        assert torch.equal(back[part].down, each.down)
        assert torch.equal(back[part].up, each.up)
        assert back[part].alpha == pytest.approx(each.alpha)


@given(SHARES, st.integers(1, 4))
@settings(deadline=None, max_examples=20)
def test_a_lora_of_the_fused_layer_shares_its_down_matrix(shares: tuple[int, ...], rank: int) -> None:
    rules = layer(shares)
    whole = pair(rank, 3 * sum(shares), 1, alpha=0.3)
    parts = split(whole, rules)
    assert torch.allclose(torch.cat([parts[part].delta() for part in sorted(parts)]), whole.delta())
    assert all(each.rank == rank and each.alpha == 0.3 for each in parts.values())
    again = join(parts, rules)
    assert torch.equal(again.up, whole.up)
    assert torch.equal(again.down, whole.down)
    assert again.alpha == whole.alpha


def test_different_scales_are_unified() -> None:
    rules = layer((1, 1, 1))
    parts = {0: pair(2, 3, 0, 2.0), 1: pair(2, 3, 1, 6.0), 2: pair(2, 3, 2, 2.0)}
    back = split(join(parts, rules), rules)
    for part, each in parts.items():
        assert torch.allclose(back[part].delta(), each.delta(), rtol=2e-3, atol=2e-3)


def test_different_scales_that_share_a_down_are_unified() -> None:
    rules = layer((1, 1, 1))
    whole = split(pair(4, 9, 3), rules)
    parts = {
        part: LoraPair(each.down, each.up, alpha)
        for (part, each), alpha in zip(whole.items(), (2.0, 4.0, 4.0), strict=True)
    }
    back = split(join(parts, rules), rules)
    for part, each in parts.items():
        assert torch.allclose(back[part].delta(), each.delta(), rtol=2e-3, atol=2e-3)


def test_rows_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        split(pair(2, 8, 0), layer((1, 1, 1)))
    with pytest.raises(ValueError, match="shares"):
        join({0: pair(2, 4, 0), 1: pair(2, 5, 1)}, layer((1, 1, 1)))


def test_the_last_norm_of_a_text_stream_keeps_scale_and_shift_apart(tmp_path: Path) -> None:
    """diffusers has scale before shift there, the original after; in every other block both have the same six parts."""
    generator = torch.Generator().manual_seed(5)

    def update(rows: int) -> LoraPair:
        return LoraPair(torch.randn(2, 8, generator=generator), torch.randn(rows, 2, generator=generator), 2.0)

    pairs = {
        f"transformer.transformer_blocks.{block}.norm1_context.linear": update(rows)
        for block, rows in enumerate((48, 16))
    }
    path, other = write_lora(
        tmp_path, "a", LoraWeights(pairs), facts(), FileLayout(dtype=torch.float32, names=names_of(FAMILIES["sd3"]))
    )
    stored = load_file(path)
    name = "lora_unet_joint_blocks_{}_context_block_adaLN_modulation_1.lora_up.weight"
    first, last = (each.up for each in pairs.values())
    assert torch.equal(stored[name.format(0)], first)
    assert torch.equal(stored[name.format(1)], torch.cat([last[8:], last[:8]]))
    for written in (path, other):
        back = read_lora(written)
        assert all(torch.equal(back.modules[module].up, each.up) for module, each in pairs.items())


MODULATIONS = {  # module -> the original's name, rows, and whether diffusers' converters of checkpoints swap its halves
    "sd3": {
        "transformer_blocks.0.norm1.linear": ("joint_blocks_0_x_block_adaLN_modulation_1", 48, False),
        "transformer_blocks.0.norm1_context.linear": ("joint_blocks_0_context_block_adaLN_modulation_1", 48, False),
        "transformer_blocks.1.norm1_context.linear": ("joint_blocks_1_context_block_adaLN_modulation_1", 16, True),
        "norm_out.linear": ("final_layer_adaLN_modulation_1", 16, True),
    },
    "flux": {
        "transformer_blocks.0.norm1.linear": ("double_blocks_0_img_mod_lin", 48, False),
        "transformer_blocks.0.norm1_context.linear": ("double_blocks_0_txt_mod_lin", 48, False),
        "single_transformer_blocks.0.norm.linear": ("single_blocks_0_modulation_lin", 24, False),
        "norm_out.linear": ("final_layer_adaLN_modulation_1", 16, True),
    },
}


@pytest.mark.parametrize("family", MODULATIONS)
def test_modulations_are_ordered_as_in_diffusers(family: str, tmp_path: Path) -> None:
    table = MODULATIONS[family]
    pairs = {f"transformer.{name}": pair(2, rows, at) for at, (name, (_, rows, _)) in enumerate(table.items())}
    pairs = {name: LoraPair(torch.randn(2, 8), each.up, 2.0) for name, each in pairs.items()}
    path, _ = write_lora(
        tmp_path, "a", LoraWeights(pairs), facts(), FileLayout(dtype=torch.float32, names=names_of(FAMILIES[family]))
    )
    stored = load_file(path)
    for name, (original, _, swaps) in table.items():
        theirs = stored[f"lora_unet_{original}.lora_up.weight"] @ stored[f"lora_unet_{original}.lora_down.weight"]
        ours = pairs[f"transformer.{name}"].delta()
        assert torch.allclose(swap_scale_shift(theirs, dim=None) if swaps else theirs, ours, atol=1e-5)
