"""Ranks by layer, initial weights, LoRA+ and ranks by timestep, through the command and in the exported files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.core.errors import UsageError
from lora_trainer.lora_format.weights import adaptable_modules
from lora_trainer.models.lora_names import read_lora
from lora_trainer.run.release import lora_weights
from tests.recipes.recipe import Bench
from tests.training.tiny_run import TinyPlace

EXACT = {"checkpoint__export_weights": "last", "checkpoint__export_dtype": "fp32"}


@pytest.fixture
def place(tiny_model: Path, images: Path, shared_cache: Path, tmp_path: Path) -> TinyPlace:
    return TinyPlace(tiny_model, images, tmp_path, shared_cache)


def test_files_hold_each_layers_rank_and_scale(bench: Bench, capsys: pytest.CaptureFixture[str]):
    """alpha is not the rank, and there are three ranks, text encoders included; both formats hold the same changes."""
    settings = {
        "lora__rank": 4,
        "lora__alpha": 6,
        "lora__rank_pattern": '{"*.to_k" = 2, "text_encoder.*" = 3}',
        "lora__alpha_pattern": '{"*.attn2.to_k" = 5}',
        "text_encoder__learning_rates": "[1e-3]",
    }
    assert bench.run("mixed", steps=2, **settings, **EXACT) == 0
    assert "(lora.rank_pattern)" in capsys.readouterr().out
    kohya, diffusers = (
        read_lora(bench.folder("mixed") / f"mixed.{end}").modules for end in ("safetensors", "diffusers.safetensors")
    )
    assert kohya.keys() == diffusers.keys()
    for name, pair in kohya.items():
        expected = 3 if name.startswith("text_encoder") else 2 if name.endswith("to_k") else 4
        assert (pair.rank, diffusers[name].rank) == (expected, expected)
        torch.testing.assert_close(pair.delta(), diffusers[name].delta(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["pissa", "olora"])
def test_the_exported_weights_reproduce_the_trained_model(name: str, place: TinyPlace):
    """On the whole denoiser: the base's weights plus the file's changes predict what the trained model does."""
    run = place.run("a", steps=3, lora__init_lora_weights=name, lora__alpha=3.0, optimizer__learning_rate=1e-2)
    untouched = {key: value.clone() for key, value in run.context.denoiser.state_dict().items()}
    micro = run.feed.micros(0)[0]

    def predicted() -> torch.Tensor:
        with torch.no_grad():
            return run.context.predict(run.context.denoiser, micro.latents, micro.t, micro.cond, micro.sizes)

    start = predicted()
    place.train(run)
    trained = predicted()
    family, denoiser = _family(), run.context.denoiser
    updates = lora_weights(run.config, family, run.context.shown()).modules
    for each in run.context.adapter.masters.values():
        each.data.zero_()  # the base alone
    torch.testing.assert_close(predicted(), start, rtol=0, atol=0)
    base = {key.replace(".base_layer.", "."): value for key, value in untouched.items()}
    for key, layer in adaptable_modules({"unet": denoiser}).items():
        if key.endswith(".base_layer") and (update := updates.get(key.removesuffix(".base_layer"))) is not None:
            assert torch.equal(layer.weight, base[f"{key.removesuffix('.base_layer').removeprefix('unet.')}.weight"])
            layer.weight.data += update.delta()
    torch.testing.assert_close(predicted(), trained, rtol=1e-3, atol=1e-5)
    assert (trained - start).abs().max() > 1e-3


def _family():
    from lora_trainer.models.families import FAMILIES

    return FAMILIES["sd15"]


def test_up_projections_have_the_ratio_of_lora_plus(place: TinyPlace):
    ratios = {"lora__loraplus_lr_ratio": 16.0, "lora__loraplus_text_encoder_lr_ratio": 2.0}
    run = place.run(
        "a", steps=1, **ratios, text_encoder__learning_rates=(1e-4,), optimizer__layer_learning_rates={"*.to_k": 0.5}
    )
    place.train(run)
    names = {id(master): name for name, master in run.context.adapter.masters.items()}
    rate = run.config.optimizer.learning_rate
    groups = zip(run.context.optimizer.param_groups, run.context.shares, strict=True)
    found = {names[id(each)]: share * rate for group, share in groups for each in group["params"]}
    assert found.keys() == run.context.adapter.masters.keys()
    for name, lr in found.items():
        is_text, is_up = name.startswith("text_encoder."), ".lora_B." in name
        expected = (1e-4 if is_text else rate) * ((2.0 if is_text else 16.0) if is_up else 1.0)
        assert lr == pytest.approx(expected * (0.5 if ".to_k." in name else 1.0)), name


def test_rows_by_timestep_train_in_training_alone(place: TinyPlace):
    """A run's first step differs, and with the least rank as high as the rank it is that of a plain run, to the bit."""
    runs = {
        least: place.run(f"least {least}", steps=2, lora__rank=4, lora__timestep_min_rank=least)
        for least in (None, 1, 4)
    }
    for run in runs.values():
        place.train(run)
    plain, limited, full = (list(run.context.adapter.masters.values()) for run in runs.values())
    assert any(not torch.equal(one, other) for one, other in zip(limited, plain, strict=True))
    for one, other in zip(full, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert runs[1].context.timestep_rank is not None
    assert runs[1].context.timestep_rank.noise is None


def test_patterns_that_cannot_be_followed_are_refused_at_once(bench: Bench, capsys: pytest.CaptureFixture[str]):
    settings = {
        "lora__rank_pattern": '{"*.to_q" = 4000, "nowhere.*" = 2}',
        "lora__alpha_pattern": '{"mid.*" = 2}',
    }
    assert bench.run("refused", **settings) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "lora.rank_pattern: 'nowhere.*' matches none of" in error
    assert "lora.alpha_pattern: 'mid.*' matches none of" in error
    assert "lora.rank_pattern: rank 4000 is above the size of" in error
    assert not (bench.folder("refused") / "run.json").exists()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"init_lora_weights": "pissa", "timestep_min_rank": 2}, "starts from parts of the base model's weights"),
        ({"init_lora_weights": "olora", "network_weights": "a.safetensors"}, "starts from parts of the base model's"),
        ({"timestep_rank_exponent": 2.0}, "lora.timestep_min_rank is empty"),
        ({"timestep_min_rank": 33, "rank": 8, "rank_pattern": {"*": 32}}, "no layer's rank is so high"),
        ({"init_lora_weights": "pisa"}, "lora.init_lora_weights"),
        ({"rank_pattern": {"*": 0}}, "lora.rank_pattern"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], problem: str):
    with pytest.raises(UsageError, match=problem):
        resolve([Layer("test", {"lora": settings})])


def test_lora_plus_is_refused_where_one_learning_rate_is_found_for_all():
    values = {"lora": {"loraplus_lr_ratio": 16.0}, "optimizer": {"name": "prodigy", "learning_rate": 1.0}}
    with pytest.raises(UsageError, match="prodigy finds one learning rate for all that is trained"):
        resolve([Layer("test", values)])
