"""Both formats load in diffusers with the right scale; files that would load wrongly are refused."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.core.errors import TrainingFailed, UsageError
from lora_trainer.lora_format.inspection import inspect
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.metadata import FlowFacts, header
from lora_trainer.lora_format.reading import read_lora
from lora_trainer.lora_format.weights import LoraWeights, check_keys, folded, module_name, shapes_of
from lora_trainer.lora_format.writing import FileLayout, write_lora
from tests.lora_format.tiny import facts, random_lora, tiny_pipeline


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> StableDiffusionPipeline:
    return tiny_pipeline(tmp_path_factory.mktemp("tokenizer"))


def predict(pipeline: StableDiffusionPipeline) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    latents, text = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 77, 32, generator=generator)
    with torch.no_grad():
        return pipeline.unet(latents, torch.tensor([100, 700]), text, return_dict=False)[0]


def predict_by_hand(pipeline: StableDiffusionPipeline, weights: LoraWeights) -> Tensor:
    before = {name: tensor.clone() for name, tensor in pipeline.unet.state_dict().items()}
    for name, pair in weights.modules.items():
        module = pipeline.unet.get_submodule(name.removeprefix("unet."))
        module.weight.data += (
            pair.alpha / pair.rank * (pair.up.flatten(1) @ pair.down.flatten(1)).reshape(module.weight.shape)
        )
    result = predict(pipeline)
    pipeline.unet.load_state_dict(before)
    return result


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
@pytest.mark.parametrize(
    "endings", [("to_q", "to_k", "to_v", "to_out.0"), ("to_q", "conv1", "ff.net.0.proj", "proj_in")]
)
def test_files_change_the_model_as_computed_by_hand(
    pipeline: StableDiffusionPipeline,
    form: str,
    endings: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = random_lora(pipeline.unet, rank=4, alpha=2.6, size=0.1, endings=endings)
    paths = dict(
        zip(
            ("kohya", "diffusers"),
            write_lora(tmp_path, "cat", weights, facts(), FileLayout(dtype=torch.float32)),
            strict=True,
        )
    )
    base, expected = predict(pipeline), predict_by_hand(pipeline, weights)
    assert (expected - base).abs().max() > 1e-2

    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        pipeline.load_lora_weights(tmp_path, weight_name=paths[form].name)
    noted = [record.getMessage() for record in caplog.records]
    # Every LoRA on a U-Net only makes diffusers say that the text encoder's part is empty.
    assert not [note for note in noted if "text_encoder" not in note and "CLIPTextModel" not in note]
    loaded = {name for name in pipeline.unet.state_dict() if ".lora_A." in name}
    assert len(loaded) == len(weights.modules)
    assert torch.allclose(predict(pipeline), expected, atol=1e-4)

    pipeline.unload_lora_weights()
    assert torch.allclose(predict(pipeline), base, atol=1e-6)


def test_mixed_ranks_keep_their_scales_in_diffusers(pipeline: StableDiffusionPipeline, tmp_path: Path) -> None:
    wide, narrow = random_lora(pipeline.unet, rank=6, alpha=1.0), random_lora(pipeline.unet, rank=2, alpha=5.0)
    names = list(wide.modules)
    mixed = LoraWeights({name: (wide if index % 3 else narrow).modules[name] for index, name in enumerate(names)})
    expected = predict_by_hand(pipeline, mixed)
    # Not the kohya file: diffusers 0.42 misnames the modules of its alphas where they differ.
    kohya, path = write_lora(tmp_path, "mixed", mixed, facts(), FileLayout(dtype=torch.float32))
    for file in (kohya, path):
        header = read_lora(file).metadata
        assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("6", "6.0"), "as most modules have it"
    pipeline.load_lora_weights(tmp_path, weight_name=path.name)
    assert torch.allclose(predict(pipeline), expected, atol=2e-4)
    pipeline.unload_lora_weights()


def test_both_formats_hold_the_same_fp16_tensors_and_read_back(
    pipeline: StableDiffusionPipeline, tmp_path: Path
) -> None:
    weights = random_lora(pipeline.unet, rank=4, alpha=2.6)
    kohya_path, diffusers_path = write_lora(tmp_path, "cat", weights, facts())
    kohya, diffusers = read_lora(kohya_path), read_lora(diffusers_path)
    assert set(kohya.modules) == set(diffusers.modules) == set(weights.modules)
    for name, pair in kohya.modules.items():
        assert pair.down.dtype == torch.float16
        assert torch.equal(pair.down, diffusers.modules[name].down)
        assert torch.equal(pair.up, diffusers.modules[name].up)
        assert pair.alpha == diffusers.modules[name].alpha == pair.rank == 4
        assert torch.allclose(pair.delta(), weights.modules[name].delta(), atol=2e-3)
    raw = load_file(kohya_path)
    alpha = next(tensor for key, tensor in raw.items() if key.endswith(".alpha"))
    assert alpha.ndim == 0
    assert alpha.dtype == torch.float32


@given(
    st.integers(1, 8),
    st.floats(0.1, 64.0),
    st.floats(1e-5, 1e-1),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=30)
def test_folding_keeps_the_update_within_fp16_rounding(rank: int, alpha: float, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pair = LoraPair(
        torch.randn(rank, 12, generator=generator) * 0.1, torch.randn(9, rank, generator=generator) * size, alpha
    )
    ready = folded(LoraWeights({"unet.x": pair})).modules["unet.x"]
    assert ready.alpha == ready.rank
    error = (ready.delta() - pair.delta()).norm() / pair.delta().norm()
    assert error < 2e-3


def test_text_model_is_put_back() -> None:
    layer = "encoder.layers.0.fc1"
    assert module_name("text_encoder", layer) == f"text_encoder.text_model.{layer}"
    assert module_name("text_encoder", f"text_model.{layer}") == f"text_encoder.text_model.{layer}"
    assert module_name("unet", layer) == f"unet.{layer}"


def test_nonfinite_values_are_not_written(tmp_path: Path) -> None:
    bad = LoraWeights({"unet.mid_block.x": LoraPair(torch.full((2, 3), float("nan")), torch.ones(4, 2), 2.0)})
    huge = LoraWeights({"unet.mid_block.x": LoraPair(torch.ones(2, 3), torch.full((4, 2), 1e6), 2.0)})
    for weights in (bad, huge):
        with pytest.raises(TrainingFailed, match=r"unet\.mid_block\.x"):
            write_lora(tmp_path, "cat", weights, facts())
    assert not list(tmp_path.iterdir())


def test_header_golden(tmp_path: Path) -> None:
    pair = LoraPair(torch.ones(4, 8), torch.ones(8, 4), 2.0)
    weights = LoraWeights({"unet.mid_block.attentions.0.proj_in": pair})
    kohya_path, diffusers_path = write_lora(tmp_path, "cat", weights, facts())
    with safe_open(kohya_path, framework="pt") as opened:
        header = opened.metadata()
    golden = Path(__file__).with_name("header.json")
    assert header == json.loads(golden.read_text(encoding="utf-8"))
    content = kohya_path.read_bytes()
    after_header = 8 + int.from_bytes(content[:8], "little")
    assert header["sshs_model_hash"] == hashlib.sha256(content[after_header:]).hexdigest()
    with safe_open(diffusers_path, framework="pt") as opened:
        adapter = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert adapter["unet.r"] == adapter["unet.lora_alpha"] == 4
    assert adapter["unet.target_modules"] == ["mid_block.attentions.0.proj_in"]


def test_the_header_of_a_flow_model_has_its_timesteps_and_trained_text_encoders() -> None:
    training_facts = facts(
        base_version="sd3",
        architecture="stable-diffusion-3-5-medium/lora",
        prediction="flow",
        flow=FlowFacts("logit_normal", 0.0, 1.0, 1.29, 3.0),
        text_rates=(5e-5, 0.0),
        clip_skip=2,
        max_tokens=150,
    )
    pair = LoraPair(torch.ones(8, 3), torch.ones(4, 8), 8.0)
    words = header(training_facts, LoraWeights({"text_encoder.text_model.encoder.layers.0.mlp.fc1": pair}))
    assert "modelspec.prediction_type" not in words  # a flow model has none
    assert words["ss_weighting_scheme"] == "logit_normal"
    assert words["ss_discrete_flow_shift"] == "3.0"
    assert words["ss_timestep_sampling"] == "sigma"
    assert words["ss_text_encoder_lr"] == "[5e-05, 0.0]"
    assert json.loads(words["ss_network_args"])["text_encoder_dim"] == 8
    assert words["ss_network_dim"] == "8"
    assert (words["ss_clip_skip"], words["ss_max_token_length"]) == ("2", "150")
    by_size = header(facts(prediction="flow", flow=FlowFacts("uniform", 0.0, 1.0, 0.0, None)), LoraWeights({}))
    assert (by_size["ss_timestep_sampling"], by_size["ss_weighting_scheme"]) == ("flux_shift", "none")


def test_check_keys_names_mismatched_keys(pipeline: StableDiffusionPipeline) -> None:
    weights = random_lora(pipeline.unet)
    shapes = shapes_of({"unet": pipeline.unet})
    assert check_keys(weights, shapes) == []
    name = next(iter(weights.modules))
    pair = weights.modules[name]
    wrong = LoraWeights({name: LoraPair(pair.down[:, 1:], pair.up, 1.0), "unet.nowhere.to_q": pair})
    messages = [problem.message for problem in check_keys(wrong, shapes)]
    assert len(messages) == 2
    assert name in messages[0]
    assert "unet.nowhere.to_q" in messages[1]


def test_a_lora_that_does_not_fit_the_model_is_not_written(pipeline: StableDiffusionPipeline, tmp_path: Path) -> None:
    shapes = shapes_of({"unet": pipeline.unet})
    stray = LoraWeights({"unet.mid_block.nowhere": LoraPair(torch.ones(2, 3), torch.ones(4, 2), 2.0)})
    with pytest.raises(TrainingFailed, match=r"unet\.mid_block\.nowhere"):
        write_lora(tmp_path, "cat", stray, facts(), FileLayout(shapes=shapes))
    assert not list(tmp_path.iterdir())
    assert all(
        path.is_file()
        for path in write_lora(tmp_path, "cat", random_lora(pipeline.unet), facts(), FileLayout(shapes=shapes))
    )


NAME = "lora_unet_mid_block_attentions_0_proj_in"
GOOD = {f"{NAME}.lora_down.weight": (4, 8), f"{NAME}.lora_up.weight": (8, 4), f"{NAME}.alpha": ()}
DIFFUSERS = "unet.mid_block.attentions.0.proj_in"


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {key: torch.ones(shape) for key, shape in shapes.items()}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({key: shape for key, shape in GOOD.items() if "lora_up" not in key}, "half a pair"),
        (GOOD | {f"{NAME}.lora_up.weight": (8, 5)}, "down .* and up"),
        (GOOD | {"something.else": (1,)}, "1 unknown key "),
        (GOOD | {"lora_te9_x.lora_down.weight": (4, 8), "lora_te9_x.lora_up.weight": (8, 4)}, "unknown parts"),
        (GOOD | {f"{DIFFUSERS}.lora_A.weight": (4, 8), f"{DIFFUSERS}.lora_B.weight": (8, 4)}, "mixes"),
        (GOOD | {f"{NAME}.dora_scale": (8, 1)}, "DoRA"),
        ({"model.diffusion_model.weight": (8, 8)}, "no LoRA weights among its 1 keys"),
        ({f"{NAME}.alpha": ()}, "alpha without weights"),
        ({}, "no LoRA weights"),
    ],
)
def test_bad_contents_are_refused(shapes: dict[str, tuple[int, ...]], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    save_file(tensors(shapes), path)
    with pytest.raises(UsageError, match=message) as caught:
        read_lora(path)
    assert all(problem.fix for problem in caught.value.problems)


def test_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    save_file(tensors({f"{NAME}.lora_down.weight": (4, 8), "something.else": (1,)}), path)
    with pytest.raises(UsageError) as caught:
        read_lora(path)
    assert len(caught.value.problems) == 2


def truncated(path: Path) -> None:
    save_file(tensors(GOOD), path)
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("cut.safetensors", truncated, "cut off|promises"),
        ("empty.safetensors", lambda path: path.write_bytes(b""), "empty or was cut off"),
        ("noise.safetensors", lambda path: path.write_bytes(bytes(range(256)) * 9), "cut off"),
        ("page.safetensors", lambda path: path.write_bytes(b"\n<!DOCTYPE html><title>Log in"), "web page"),
        ("short.safetensors", lambda path: path.write_bytes(b"<html>\n"), "web page"),
        ("answer.safetensors", lambda path: path.write_bytes(b'{"error":"Access denied"}'), "JSON text"),
        ("image.safetensors", lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(90)), "image .PNG."),
        ("lfs.safetensors", lambda path: path.write_bytes(b"version https://git-lfs"), "Git LFS pointer"),
        ("old.ckpt", lambda path: path.write_bytes(b"anything"), "pickle"),
        ("renamed.safetensors", lambda path: torch.save({"a": torch.ones(2)}, path), "pickle"),
        ("plain.safetensors", lambda path: path.write_bytes(pickle.dumps({"a": 1})), "pickle"),
        ("absent.safetensors", lambda path: None, "no LoRA file"),
        ("folder.safetensors", lambda path: path.mkdir(), "not a LoRA file"),
    ],
)
def test_damaged_files_are_refused(name: str, make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    make(tmp_path / name)
    with pytest.raises(UsageError, match=message):
        read_lora(tmp_path / name)


def test_a_truncated_file_is_recognized_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file(tensors(GOOD), path)
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match=f"it has {whole - 40:,} of the {whole:,} bytes"):
        read_lora(path)


def test_inspect_reports_truncation_of_other_files(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    save_file(tensors({"down_blocks.0.weight": (8, 8)}), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match="cut off"):
        inspect(path, [])


def test_foreign_files_without_alpha_or_header_have_scale_one(tmp_path: Path) -> None:
    kohya, diffusers = tmp_path / "k.safetensors", tmp_path / "d.safetensors"
    save_file(tensors({key: shape for key, shape in GOOD.items() if "alpha" not in key}), kohya)
    save_file(tensors({f"{DIFFUSERS}.lora_A.weight": (4, 8), f"{DIFFUSERS}.lora_B.weight": (8, 4)}), diffusers)
    for path in (kohya, diffusers):
        assert read_lora(path).modules[DIFFUSERS].scale == 1.0


def test_nan_is_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "nan.safetensors"
    save_file(tensors(GOOD) | {f"{NAME}.lora_up.weight": torch.full((8, 4), float("nan"))}, path)
    assert read_lora(path).not_finite() == [DIFFUSERS]
