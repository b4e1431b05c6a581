"""Runs that read another LoRA: to start from it (`lora.network_weights`), or as a training adapter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.config.schema import Config, LoraSection
from lora_trainer.core.grid import image_name
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.models.base_loras import add_frozen
from lora_trainer.models.lora_names import read_lora
from lora_trainer.run_folder.record import BEFORE_AFTER
from lora_trainer.training.network_weights import start_from_file
from tests.recipes.recipe import Bench, losses, tensor_bytes

FIRST = {"checkpoint__export_weights": "last", "checkpoint__export_dtype": "fp32"}
STILL = {**FIRST, "optimizer__learning_rate": 1e-12, "optimizer__weight_decay": 0}
CONVOLUTIONS = {"lora__target_modules": '["*.attn*.to_*", "*.resnets.*.conv1"]'}


@pytest.fixture(scope="module")
def earlier(tiny_model: Path, images: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A finished run named `first`: rank 4 with alpha 6, on linear layers and convolutions."""
    bench = Bench(tiny_model, images, tmp_path_factory.mktemp("earlier"), shared_cache)
    assert bench.run("first", lora__alpha=6, **FIRST, **CONVOLUTIONS) == 0
    return bench


def deltas(lora: Path) -> dict[str, torch.Tensor]:
    return {name: pair.delta() for name, pair in read_lora(lora).modules.items()}


@pytest.mark.parametrize("ending", ["safetensors", "diffusers.safetensors"])
def test_a_run_starts_from_the_change_of_the_file(ending: str, earlier: Bench, bench: Bench):
    """Whatever the rank and alpha of both."""
    first = earlier.folder("first") / f"first.{ending}"
    start = {"lora__network_weights": first, "lora__rank": 7, "lora__alpha": 3, "lora__use_rslora": "true"}
    assert bench.run("second", steps=1, **STILL, **CONVOLUTIONS, **start) == 0
    expected, found = deltas(first), deltas(bench.folder("second") / "second.safetensors")
    assert expected.keys() == found.keys()
    for name, delta in expected.items():
        assert delta.abs().max() > 0
        torch.testing.assert_close(found[name], delta, rtol=1e-4, atol=1e-8)


def test_text_encoders_start_from_it_too(bench: Bench):
    texts = {"text_encoder__learning_rates": "[1e-2]"}
    assert bench.run("first", lora__alpha=6, **FIRST, **texts) == 0
    first = bench.folder("first") / "first.safetensors"
    still = {**STILL, "text_encoder__learning_rates": "[1e-12]", "lora__network_weights": first}
    assert bench.run("second", steps=1, **still) == 0
    expected, found = deltas(first), deltas(bench.folder("second") / "second.safetensors")
    assert any(name.startswith("text_encoder") for name in expected)
    for name, delta in expected.items():
        torch.testing.assert_close(found[name], delta, rtol=1e-4, atol=1e-8)


def test_a_resumed_run_that_started_from_a_file_is_the_same(earlier: Bench, bench: Bench):
    start = {"lora__network_weights": earlier.folder("first") / "first.safetensors", **FIRST, **CONVOLUTIONS}
    assert bench.run("whole", steps=6, **start) == 0
    assert bench.run("halves", steps=6, checkpoint__every_n_steps=3, train__max_hours=1e-9, **start) == 0
    assert bench.run("halves", "--resume", steps=6, checkpoint__every_n_steps=3, **start) == 0
    whole, halves = (tensor_bytes(bench.folder(name) / f"{name}.safetensors") for name in ("whole", "halves"))
    assert whole == halves


def test_all_that_a_run_cannot_start_from_is_named(
    earlier: Bench, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first = earlier.folder("first") / "first.safetensors"
    tensors = load_file(first)
    tensors = {key.replace("lora_unet_down_blocks_0", "lora_unet_down_blocks_9"): each for key, each in tensors.items()}
    other = tmp_path / "other.safetensors"
    save_file(tensors, other)
    settings = {"lora__network_weights": first, "lora__rank": 2, "model__training_adapter": other}
    assert bench.run("second", **settings) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"model.training_adapter={other}: " in said
    assert "down_blocks.9" in said or "down_blocks_9" in said
    assert "would not be trained (first: unet." in said
    assert "Set lora.target_modules to attention+ff" in said
    assert "Its rank is 4, and lora.rank=2 is lower. Set lora.rank=4." in said
    assert not (bench.folder("second") / "run.json").exists()


def test_a_training_adapter_changes_the_prediction_and_not_the_file(earlier: Bench, bench: Bench):
    first = earlier.folder("first") / "first.safetensors"
    assert bench.run("started", steps=2, **STILL, **CONVOLUTIONS, lora__network_weights=first) == 0
    assert bench.run("with it", steps=2, **STILL, **CONVOLUTIONS, model__training_adapter=first) == 0
    assert bench.run("without", steps=2, **STILL, **CONVOLUTIONS) == 0
    started, adapted, plain = (losses(bench.folder(name)) for name in ("started", "with it", "without"))
    assert adapted == pytest.approx(started, rel=1e-5)
    assert adapted != pytest.approx(plain, rel=1e-3)
    found = deltas(bench.folder("with it") / "with it.safetensors")
    assert max(float(each.abs().max()) for each in found.values()) < 1e-8


def test_images_and_verdict_are_without_the_training_adapter(earlier: Bench, bench: Bench):
    """Of a LoRA that has learned nothing, so that the base model's own images and numbers are compared."""
    first = earlier.folder("first") / "first.safetensors"
    checked = {**STILL, **CONVOLUTIONS, "gates__lora_check": "lite", "gates__lora": 0}
    parts, images = [], []
    for name, settings in {"with it": {"model__training_adapter": first}, "without": {}}.items():
        bench.run(name, steps=2, **checked, **settings)
        parts.append(json.loads((bench.folder(name) / "run.json").read_text())["lora"]["parts"])
        drawn = bench.folder(name) / "samples"
        images += [np.asarray(Image.open(drawn / image_name(BEFORE_AFTER, 0, each)), int) for each in (None, 1.0)]
    assert max(np.abs(image - images[0]).max() for image in images) <= 1
    assert parts[0].keys() == parts[1].keys()
    for name, part in parts[0].items():
        assert part["measured"] == parts[1][name]["measured"]
        for key in ("value", "low", "high"):
            assert part[key] == pytest.approx(parts[1][name][key], abs=1e-3), (name, key)


def test_a_run_resumes_only_with_the_same_training_adapter(
    earlier: Bench, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    adapter = tmp_path / "adapter.safetensors"
    tensors = load_file(earlier.folder("first") / "first.safetensors")
    save_file(tensors, adapter)
    assert bench.run("cat", model__training_adapter=adapter, checkpoint__every_n_steps=3) == 0
    save_file({key: each * 2 for key, each in tensors.items()}, adapter)
    for other in (adapter, None):
        assert bench.run("cat", "--resume", steps=9, model__training_adapter=other) == 2
        assert "training adapter (model.training_adapter) differs" in " ".join(capsys.readouterr().err.split())


def test_a_run_without_an_adapter_or_a_start_does_not_resume_with_one(
    earlier: Bench, bench: Bench, capsys: pytest.CaptureFixture[str]
):
    first = earlier.folder("first") / "first.safetensors"
    assert bench.run("cat", **CONVOLUTIONS, checkpoint__every_n_steps=3) == 0
    for setting in ("model__training_adapter", "lora__network_weights"):
        assert bench.run("cat", "--resume", steps=9, **CONVOLUTIONS, **{setting: first}) == 2
        assert f"({setting.replace('__', '.')}) differs" in " ".join(capsys.readouterr().err.split())


def test_the_path_of_a_start_may_begin_at_home_and_change(
    earlier: Bench, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = earlier.folder("first") / "first.safetensors"
    (tmp_path / "home.safetensors").write_bytes(first.read_bytes())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    at_home = {"lora__network_weights": "~/home.safetensors", "model__training_adapter": "~/home.safetensors"}
    assert bench.run("cat", **CONVOLUTIONS, checkpoint__every_n_steps=3, **at_home) == 0
    elsewhere = {"lora__network_weights": first, "model__training_adapter": first}
    assert bench.run("cat", "--resume", steps=9, **CONVOLUTIONS, **elsewhere) == 0


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_missing_file_is_refused(
    dry: tuple[str, ...], bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for setting in ("model__training_adapter", "lora__network_weights"):
        assert bench.run("cat", *dry, **{setting: tmp_path / "absent.safetensors"}) == 2
        assert "absent.safetensors" in capsys.readouterr().err


def test_the_line_counts_modules_that_are_taken_new_and_left_out(earlier: Bench):
    """With CLIP skip a file may have more of a text encoder's modules than a run trains."""
    first = earlier.folder("first") / "first.safetensors"
    pairs = list(read_lora(first).modules.items())
    parameters = {
        f"{name.removeprefix('unet.')}.lora_{half}.default.weight": torch.nn.Parameter(torch.zeros_like(value))
        for name, pair in pairs[3:]
        for half, value in (("A", pair.down), ("B", pair.up))
    }
    config, options = Config(lora=LoraSection(network_weights=str(first))), AdapterOptions(4, 4.0)
    modules = [name.removeprefix("unet.") for name, _ in pairs[3:]]
    line = start_from_file(config, "unet", modules, parameters, options)
    of_all = f"{len(pairs) - 3} modules; 3 of its modules reach no prediction here and are left out"
    assert line == f"unet: starts from first.safetensors, {of_all} (lora.network_weights)"


def test_an_adapters_weights_move_with_its_layer():
    pair = LoraPair(torch.randn(2, 4), torch.randn(3, 2), 1.0)
    layer, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    expected = layer(x) + x @ pair.delta().T
    add_frozen(layer, pair, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(layer(x), expected)
    assert not any(half.requires_grad for half in layer.buffers())
    assert layer.to("meta")(x.to("meta")).is_meta
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_a_bf16_run_starts_from_exact_values(earlier: Bench, bench: Bench):
    """bf16 layers round the file's values; the masters, which are exported, do not."""
    first = earlier.folder("first") / "first.safetensors"
    start = {"lora__network_weights": first, "lora__alpha": 6, "memory__weight_dtype": "bf16"}
    assert bench.run("second", steps=1, **STILL, **CONVOLUTIONS, **start) == 0
    found = deltas(bench.folder("second") / "second.safetensors")
    for name, delta in deltas(first).items():
        torch.testing.assert_close(found[name], delta, rtol=1e-4, atol=1e-8)
