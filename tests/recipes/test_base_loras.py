"""Runs on a base model with LoRAs merged in (`model.loras`): everywhere it is loaded, and nowhere in the LoRA."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lora_trainer.core.errors import UsageError
from lora_trainer.models.base_loras import base_digest, with_loras
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import PLAIN, Family
from lora_trainer.models.lora_names import read_lora
from lora_trainer.models.quantization.store import make_quantizer
from tests.recipes.recipe import Bench, header_of, losses

EXACT = {"checkpoint__export_weights": "last", "checkpoint__export_dtype": "fp32"}
STILL = {**EXACT, "optimizer__learning_rate": 1e-12, "optimizer__weight_decay": 0}
CPU, FP32 = torch.device("cpu"), torch.float32
FAMILY = FAMILIES["sd15"]


@pytest.fixture(scope="module")
def earlier(tiny_model: Path, images: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A finished run named `first`, of the denoiser and the text encoder, with alpha 6 and rank 4."""
    bench = Bench(tiny_model, images, tmp_path_factory.mktemp("earlier"), shared_cache)
    settings = {"lora__alpha": 6, "text_encoder__learning_rates": "[1e-2]", "optimizer__learning_rate": 3e-2}
    assert bench.run("first", **settings, **EXACT) == 0
    return bench


def file_of(bench: Bench, name: str) -> Path:
    return bench.folder(name) / f"{name}.safetensors"


def as_toml(loras: Mapping[Path, float]) -> str:
    return "{" + ", ".join(f"{json.dumps(str(path))} = {weight}" for path, weight in loras.items()) + "}"


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: layer.weight for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}


def merged(family: Family, lora: Path, weight: float) -> Family:
    return with_loras(family, {str(lora): weight})


def test_every_loader_has_the_loras_merged_in(earlier: Bench, tiny_model: Path):
    first = file_of(earlier, "first")
    changes = {name: 0.5 * pair.delta() for name, pair in read_lora(first).modules.items()}
    family = merged(FAMILY, first, 0.5)
    for plain, changed in (
        (FAMILY.denoiser.load(tiny_model, FP32, CPU), family.denoiser.load(tiny_model, FP32, CPU)),
        (FAMILY.pipeline.make(tiny_model, FP32, CPU).unet, family.pipeline.make(tiny_model, FP32, CPU).unet),
    ):
        before, after = weights_of(plain), weights_of(changed)
        for name, weight in before.items():
            change = changes.get(f"unet.{name}", torch.zeros(()))
            torch.testing.assert_close(after[name], weight + change, rtol=1e-6, atol=1e-8)
    captions, options = ("a robot",), PLAIN
    encoders = [each.encoders.load(tiny_model, FP32, CPU, options) for each in (FAMILY, family)]
    parts = [each.text.load(tiny_model, FP32, CPU) for each in (FAMILY, family)]
    plain_text, text = (next(iter(each.encode_text(captions).values())) for each in encoders)
    assert (text - plain_text).abs().max() > 1e-3
    torch.testing.assert_close(next(iter(family.text.encode(parts[1], captions, options).values())), text)
    assert encoders[0].text_key != encoders[1].text_key == family.encoder_keys(tiny_model, FP32)[1]
    assert encoders[0].image_key == encoders[1].image_key
    assert len({base_digest(each, tiny_model) for each in (FAMILY, family, merged(FAMILY, first, 0.4))}) == 3


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_quantized_layers_add_the_change_to_their_output(stored, earlier: Bench, tiny_model: Path):
    first = file_of(earlier, "first")
    pairs = read_lora(first).modules
    plain = FAMILY.denoiser.load(tiny_model, FP32, CPU, make_quantizer(stored))
    changed = merged(FAMILY, first, -2.0).denoiser.load(tiny_model, FP32, CPU, make_quantizer(stored))
    name = next(name for name in pairs if name.startswith("unet.") and name.endswith("to_q"))
    layers = [each.get_submodule(name.removeprefix("unet.")) for each in (plain, changed)]
    x = torch.randn(3, layers[0].in_features)
    torch.testing.assert_close(layers[1](x) - layers[0](x), -2.0 * x @ pairs[name].delta().T, rtol=1e-4, atol=1e-5)


def test_the_lora_is_trained_on_top_and_recorded(earlier: Bench, bench: Bench):
    """The first losses are those of a run that continues from the same LoRA, and the exported LoRA holds none of it."""
    first = file_of(earlier, "first")
    texts = {"text_encoder__learning_rates": "[1e-12]", "lora__network_weights": first, "lora__alpha": 6}
    assert bench.run("continued", steps=2, **STILL, **texts) == 0
    assert bench.run("on it", steps=2, **STILL, model__loras=as_toml({first: 1.0})) == 0
    wanted, found = losses(bench.folder("continued")), losses(bench.folder("on it"))
    assert found == pytest.approx(wanted, rel=1e-4)
    changes = read_lora(file_of(bench, "on it")).modules.values()
    assert max(float(pair.delta().abs().max()) for pair in changes) < 1e-7
    assert header_of(file_of(bench, "on it"))["lora_trainer.base_loras"] == "first.safetensors x 1"
    recorded = json.loads((bench.folder("on it") / "run.json").read_text())["config"]["model"]["loras"]
    assert recorded == {str(first): 1.0}


def test_a_run_resumes_only_with_the_same_loras(earlier: Bench, bench: Bench, capsys: pytest.CaptureFixture[str]):
    first = file_of(earlier, "first")
    assert bench.run("cat", model__loras=as_toml({first: 0.5}), checkpoint__every_n_steps=3) == 0
    for other in ({first: 0.25}, {}):
        assert bench.run("cat", "--resume", steps=9, model__loras=as_toml(other)) == 2
        assert "or those of model.loras, differ" in " ".join(capsys.readouterr().err.split())


def test_loras_that_do_not_fit_are_refused_with_their_names(
    earlier: Bench, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert bench.run("cat", model__loras=as_toml({tmp_path / "none.safetensors": 1.0})) == 2
    assert "model.loras: there is no file" in " ".join(capsys.readouterr().err.split())
    tensors = load_file(file_of(earlier, "first"))
    other = tmp_path / "other.safetensors"
    save_file({key.replace("down_blocks_0", "down_blocks_9"): each for key, each in tensors.items()}, other)
    assert bench.run("cat", model__loras=as_toml({other: 1.0})) == 2
    assert f"model.loras={other}: " in " ".join(capsys.readouterr().err.split())


def test_all_missing_files_are_named_at_once(tmp_path: Path):
    with pytest.raises(UsageError) as caught:
        with_loras(FAMILY, {str(tmp_path / "a.safetensors"): 1.0, str(tmp_path / "b.safetensors"): 1.0})
    assert len(caught.value.problems) == 2
