"""LoKr and DoRA nearest to a change: exact where there is one, never worse than another one, and extracted from two models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.cli.main import main
from lora_trainer.lora_format.kinds import EXTRACTED, KINDS, LORA
from lora_trainer.lora_format.kinds.dora import DecomposedUpdate, nearest_decomposed
from lora_trainer.lora_format.kinds.lokr import KroneckerUpdate, nearest_kronecker
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.layer_updates import LayerUpdate
from lora_trainer.lora_format.low_rank import RankLimits, factor
from lora_trainer.lora_format.weights import adaptable_modules
from lora_trainer.models.lora_names import read_adapter
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline

SHAPES = [(24, 36), (36, 24, 3, 3), (7, 20), (48, 16, 1, 1)]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gap(update: LayerUpdate, weight: Tensor, change: Tensor) -> float:
    return float((update.delta(weight).reshape(change.shape) - change).norm() / change.norm())


def planted_kronecker(shape: tuple[int, ...], rank: int | None) -> Tensor:
    """A Kronecker product with the sides of training; w2 of a rank, or whole."""
    sides = {24: (4, 6), 36: (6, 6), 7: (1, 7), 20: (4, 5), 48: (6, 8), 16: (4, 4)}
    (o1, o2), (i1, i2) = sides[shape[0]], sides[shape[1]]
    two = random(2, o2, i2, *shape[2:])
    if rank is not None:
        flat = two.flatten(1)
        two = (random(3, o2, rank) @ random(4, rank, flat.shape[1])).reshape(two.shape)
    return KroneckerUpdate({"lokr_w1": random(1, o1, i1), "lokr_w2": two}).delta()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 2, None])
def test_a_kronecker_product_is_found_again(shape: tuple[int, ...], rank: int | None):
    change = planted_kronecker(shape, rank)
    found = nearest_kronecker(change, change, rank or 64)
    assert gap(found, change, change) < 1e-5
    assert ("lokr_w2" in found.tensors) == (rank is None)
    assert rank is None or found.rank == rank
    largest = [float(each.abs().max()) for each in found.tensors.values()]
    assert max(largest) < 100 * min(largest)  # fp16 holds all factors alike


@pytest.mark.parametrize("shape", SHAPES)
def test_no_neighbor_of_the_nearest_kronecker_product_is_nearer(shape: tuple[int, ...]):
    change = random(0, *shape)
    found = nearest_kronecker(change, change, 64)
    least = gap(found, change, change)
    for seed in range(20):
        other = {
            name: each + 0.05 * each.norm() * random(seed, *each.shape) / each.numel() ** 0.5
            for name, each in found.tensors.items()
        }
        assert gap(KroneckerUpdate(other, found.alpha), change, change) >= least
    errors = [gap(nearest_kronecker(change, change, rank), change, change) for rank in (1, 2, 3)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] >= least - 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dora_is_nearer_than_the_lora_of_its_rank(shape: tuple[int, ...]):
    """Much nearer to a DoRA of this rank, whose magnitudes no LoRA of it holds."""
    weight = random(0, *shape)
    pair = LoraPair(0.3 * random(1, 2, *shape[1:]), 0.3 * random(2, shape[0], 2, *[1] * (len(shape) - 2)), 2.0)
    magnitude = weight.flatten(1).norm(dim=1) * (1 + 0.1 * random(3, shape[0]))
    planted = DecomposedUpdate(pair, magnitude.reshape(-1, *[1] * (len(shape) - 1))).delta(weight)
    for change, much in ((planted, 0.25), (0.1 * random(4, *shape), 1.0)):
        found = nearest_decomposed(weight, change, 2)
        lora = factor(change, RankLimits(2), 2)[2]
        assert gap(found, weight, change) < much * lora
        assert found.rank == 2


@pytest.mark.parametrize("rows", ["gone", "empty", "opposite"])
def test_a_dora_of_rows_that_vanish_or_turn_around_fits_into_fp16(rows: str):
    """The magnitude that is best for such a row is 0 or below, where a factor of it would divide B by nothing."""
    weight = random(0, 48, 64)
    weight[:20] *= rows != "empty"
    tuned = weight + 0.05 * random(1, 48, 64)
    tuned[:20] = -weight[:20] if rows == "opposite" else 0.0
    change = tuned - weight
    stored = nearest_decomposed(weight, change, 4).rounded(torch.float16)
    assert stored.finite
    assert gap(stored, weight, change) < factor(change, RankLimits(4), 4)[2] + 1e-3


def test_each_kind_is_extracted_or_refused_with_its_reason():
    refused = {name for name in ADAPTERS if KINDS[name].not_extracted}
    assert {LORA, *EXTRACTED} | refused == ADAPTERS.keys()
    assert not {LORA, *EXTRACTED} & refused


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A folder with `base.safetensors` and `tuned.safetensors`, and the weights and changes of its two layers."""
    folder = tmp_path_factory.mktemp("models")
    pipeline: Any = tiny_pipeline(folder / "words", "sd15")
    write(unet_checkpoint(pipeline, "sd15"), folder / "base.safetensors")
    layers = adaptable_modules({"unet": pipeline.unet})
    names = [
        name
        for name in layers
        if name.endswith(("down_blocks.0.resnets.0.conv1", "down_blocks.0.attentions.0.proj_in"))
    ]
    weights = {name: layers[name].weight.detach().clone() for name in names}
    changes = {name: 0.05 * random(len(name), *each.shape) for name, each in weights.items()}
    for name, change in changes.items():
        layers[name].weight.data += change
    write(unet_checkpoint(pipeline, "sd15"), folder / "tuned.safetensors")
    return folder, weights, changes


@pytest.mark.parametrize("kind", [LORA, *EXTRACTED])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_printed_errors_of_an_extracted_file_are_those_of_the_file(kind, dtype, models, tmp_path, capsys):
    folder, weights, changes = models
    out = tmp_path / "out.safetensors"
    names = [str(folder / "base.safetensors"), str(folder / "tuned.safetensors")]
    command = ["extract", *names, "--rank", "8", "--type", kind, "--dtype", dtype, "--output", str(out), "--json"]
    assert main(command) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    found = read_adapter(out)
    assert found.family == "sd15"
    assert found.modules.keys() == weights.keys()
    errors = {name: gap(found.modules[name], weights[name], change) for name, change in changes.items()}
    for row in document["layers"]:
        assert row["error"] == pytest.approx(errors[row["name"]], rel=1e-4)
    whole = sum((errors[name] * float(change.norm())) ** 2 for name, change in changes.items()) ** 0.5
    share = whole / sum(float(change.norm()) ** 2 for change in changes.values()) ** 0.5
    assert f"the {ADAPTERS[kind].title} differs from tuned - base by {share:.1%}" in document["notes"][0]
    with safe_open(out, "pt") as file:
        header = file.metadata()
    arguments = json.loads(header.get("ss_network_args", "{}"))
    expected = {"lora": {}, "dora": {"algo": "lora", "dora_wd": True}, "lokr": {"algo": "lokr"}}[kind]
    assert expected.items() <= arguments.items()
    assert header["ss_network_module"] == ("networks.lora" if kind == LORA else "lycoris.kohya")
    assert header["ss_base_model_version"].startswith("sd_v1")
    assert ("type" in json.loads(header["lora_trainer.origin"])) == (kind != LORA)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--type", "loha"], "--type loha cannot be extracted: an entrywise product"),
        (["--type", "oft"], "--type oft cannot be extracted: an OFT rotates the outputs"),
        (["--type", "locon"], "--type locon is not known"),
        (["--type", "lokr", "--frobenius", "0.9"], "--frobenius is for --type lora"),
        (["--type", "dora", "--clamp-quantile", "0.99"], "--clamp-quantile is for --type lora"),
    ],
)
def test_kinds_that_cannot_be_extracted_are_refused(flags, words, models, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    names = [str(models[0] / f"{name}.safetensors") for name in ("base", "tuned")]
    assert main(["extract", *names, "--rank", "4", *flags, "--output", str(out)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
