"""A Qwen-Image 2.1 checkpoint equals its folder, alone or with its text encoder and VAE, in one file or three."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage21
from diffusers.loaders.single_file_utils import convert_qwen_image21_transformer_checkpoint_to_diffusers

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.families import families
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.qwen_image21 import denoiser_part
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.lay_out import lacking_parts, lay_out, vae_of_file
from lora_trainer.models.single.recognize import recognize
from lora_trainer.run.bases.find import find_base
from tests.models.single.originals import (
    qwen_image21_checkpoint,
    qwen_image21_original,
    rgba_vae_original,
    write,
)
from tests.models.single.test_published import empty_file
from tests.models.single.tiny import tiny_qwen_image21

CPU = torch.device("cpu")
FAMILY = FAMILIES["qwen_image21"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return tiny_qwen_image21()


@pytest.fixture(scope="module")
def folder(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "folder"
    pipeline.save_pretrained(place)
    return place


def same_as(ours: Path, theirs: Path) -> None:
    """Weights, text embeddings and latents of two folders."""
    one, other = (FAMILY.denoiser.load(each, torch.float32, CPU) for each in (ours, theirs))
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())
    read, expected = (FAMILY.load_encoders(each, torch.float32, CPU) for each in (ours, theirs))
    cond, same = (each.encode_text(["a red ring", ""]) for each in (read, expected))
    assert all(torch.equal(cond[name], same[name]) for name in cond)
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    assert torch.equal(read.encode_image(pixels)[0], expected.encode_image(pixels)[0])


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "bare"])
def test_a_checkpoint_equals_its_folder(pipeline: Any, folder: Path, bare: bool, tmp_path: Path) -> None:
    parts: dict[str, Path | None] = {"tokenizer": folder / "processor"}
    if bare:
        parts |= {"text_encoder": folder / "text_encoder", "vae": folder / "vae"}
    file = write(qwen_image21_checkpoint(pipeline, bare=bare), tmp_path / "qwen_image_2.1.safetensors")
    assert (recognize(file).family, recognize(file).note) == ("qwen_image21", "")
    assert lacking_parts(recognize(file)) == ({"text_encoder", "tokenizer"} if bare else {"tokenizer"})
    laid_out = lay_out(file, parts)
    facts, others = FAMILY.describe(laid_out), FAMILY.describe(folder)
    assert (facts.latent_channels, facts.downscale) == (others.latent_channels, others.downscale) == (64, 16)
    assert FAMILY.denoiser.make_process(laid_out).times == FAMILY.denoiser.make_process(folder).times
    same_as(laid_out, folder)


def test_three_files_as_comfyui_keeps_them_equal_a_folder(pipeline: Any, folder: Path, tmp_path: Path) -> None:
    """Found by the settings; the tokenizer lies where a diffusers folder has it."""
    parts = qwen_image21_checkpoint(pipeline)
    names = {"model.diffusion_model.": "models/q-image 2.1 turbo", "vae.": "models/vae"}
    names["text_encoders.qwen3vl_8b.transformer."] = "texts/qwen3vl_8b"
    for place in ("models", "texts"):
        (tmp_path / place).mkdir()
    files = {
        name: write(
            {key.removeprefix(begin): each for key, each in parts.items() if key.startswith(begin)},
            tmp_path / f"{name}.safetensors",
        )
        for begin, name in names.items()
    }
    shutil.copytree(folder / "processor", tmp_path / "texts" / "processor")
    transformer, vae, _ = files.values()
    model = ModelSection(path=str(transformer), vae=str(vae), text_encoders=str(tmp_path / "texts"))
    found = find_base(model).folder
    same_as(found, folder)
    facts, process = FAMILY.describe(found), FAMILY.denoiser.make_process(found)
    assert (facts.variant, FAMILY.pipeline.sampling_defaults(found).steps) == ("turbo", 8)
    assert process.times.shift.of((128, 128)) == 1.0


def test_the_base_and_turbo_are_distinguished_by_the_setting_or_the_name(pipeline: Any, tmp_path: Path) -> None:
    tensors = qwen_image21_checkpoint(pipeline, bare=True)
    for name, flavor, variant, noted in (
        ("model", None, "base", True),
        ("qwen-image-2.1-turbo", None, "turbo", False),
        ("model", "turbo", "turbo", False),
        ("qwen_image_2.1_bf16", None, "base", False),
    ):
        found = recognize(write(tensors, tmp_path / f"{name}.safetensors"), flavor)
        assert (found.variant, bool(found.note)) == (variant, noted)


def test_a_folder_keeps_its_tokenizer_when_another_vae_is_named(folder: Path) -> None:
    assert lacking_parts(folder) == set()
    found = find_base(ModelSection(path=str(folder), vae=str(folder / "vae"))).folder
    assert found != folder
    same_as(found, folder)


def test_every_name_is_that_of_diffusers_converter(pipeline: Any) -> None:
    state = pipeline.transformer.state_dict()
    back = convert_qwen_image21_transformer_checkpoint_to_diffusers(qwen_image21_original(pipeline.transformer))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], weight) for name, weight in state.items())


@pytest.mark.parametrize("fused", [True, False], ids=["ComfyUI", "diffusers"])
def test_the_published_parts_are_recognized_by_their_shapes(fused: bool, tmp_path: Path) -> None:
    published = public_architecture("qwen_image21").denoiser
    with torch.device("meta"):
        model, vae = FAMILY.denoiser.make(published), AutoencoderKLQwenImage21()
        tensors = qwen_image21_original(model) if fused else model.state_dict()
    part = denoiser_part(recognize(empty_file(tmp_path / "model.safetensors", tensors, "BF16")).denoiser)
    assert {name: part.config[name] for name in published} == dict(published)
    assert part.places.keys() == model.state_dict().keys()
    state = rgba_vae_original(vae) if fused else vae.state_dict()
    ours = vae_of_file(empty_file(tmp_path / "vae.safetensors", state), {})
    assert ours.places.keys() == vae.state_dict().keys()
    assert {key: vae.config[key] for key in ours.config if not key.startswith("_")} == {
        key: value for key, value in ours.config.items() if not key.startswith("_")
    }
    counts = families()["qwen_image21"]["phases"]
    assert sum(tensor.numel() for tensor in vae.state_dict().values()) == counts["autoencoder"]
