"""What verdicts measure of the base model alone is made once, and again where it is damaged."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.data.caches.base_features import KIND, BaseFeatures, digest_of
from lora_trainer.data.caches.pruning import cache_clean, cache_status


class Maker:
    """Counts how often it is asked."""

    def __init__(self, **values: Tensor) -> None:
        self.values, self.times = values, 0

    def __call__(self) -> dict[str, Tensor]:
        self.times += 1
        return dict(self.values)


def test_an_entry_is_made_once_and_reads_back_bit_for_bit(tmp_path: Path) -> None:
    make = Maker(mid=torch.randn(3, 5), latents=torch.randn(4, 2, 6))
    for _ in range(3):
        found = BaseFeatures(tmp_path, "model").read_or_make("key", make)
        assert found.keys() == make.values.keys()
        assert all(torch.equal(found[name], value) for name, value in make.values.items())
    assert make.times == 1
    BaseFeatures(tmp_path, "model").read_or_make("another key", make)
    BaseFeatures(tmp_path, "another model").read_or_make("key", make)
    assert make.times == 3
    assert cache_status(tmp_path).counts[KIND] == 3
    assert cache_clean(tmp_path, limit=0).left_bytes == 0


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    make, half = Maker(mid=torch.randn(3, 5)), BaseFeatures(tmp_path, "model")
    half.read_or_make("key", make)
    (entry,) = (tmp_path / KIND).rglob("*.safetensors")
    raw = bytearray(entry.read_bytes())
    raw[-1] ^= 1
    entry.write_bytes(raw)
    assert torch.equal(half.read_or_make("key", make)["mid"], make.values["mid"])
    half.read_or_make("key", make)
    assert make.times == 2


def test_what_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    make, half = Maker(mid=torch.tensor([1.0, float("nan")])), BaseFeatures(tmp_path, "model")
    half.read_or_make("key", make)
    half.read_or_make("key", make)
    assert make.times == 2


def test_a_cache_that_may_not_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make = Maker(mid=torch.ones(2))
    assert torch.equal(
        BaseFeatures(tmp_path / "file" / "cache", "model").read_or_make("key", make)["mid"], torch.ones(2)
    )


def test_a_digest_depends_on_values_types_shapes_and_order() -> None:
    values = torch.arange(6.0)
    different = [
        (values,),
        (values.double(),),
        (values.view(2, 3),),
        (values + 1,),
        (values, ""),
        ("", values),
        ({"a": values},),
        ({"b": values},),
        ("ab", "c"),
        ("a", "bc"),
    ]
    assert len({digest_of(*parts) for parts in different}) == len(different)
    assert digest_of({"a": values, "b": values}) == digest_of({"b": values, "a": values})
