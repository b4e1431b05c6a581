"""A FLUX.2 checkpoint equals its folder, alone or with its text encoder and VAE in files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import UsageError
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.flux2 import denoiser_part
from lora_trainer.models.published import public_forms
from lora_trainer.models.single.recognize import recognize
from lora_trainer.run.bases.find import find_base
from tests.models.single.originals import flux2_checkpoint, flux2_original, flux2_vae, write
from tests.models.single.test_published import empty_file
from tests.models.single.tiny import tiny_flux2

CPU = torch.device("cpu")
FAMILY = FAMILIES["flux2"]


@pytest.fixture
def pipeline(tmp_path: Path) -> Any:
    tiny = tiny_flux2(tmp_path / "words")
    tiny.vae.bn.running_mean.uniform_(-0.2, 0.2)
    tiny.save_pretrained(tmp_path / "folder")
    return tiny


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "bare"])
def test_a_checkpoint_equals_its_folder(pipeline: Any, bare: bool, tmp_path: Path) -> None:
    folder, tensors = tmp_path / "folder", flux2_checkpoint(pipeline, bare=bare)
    model: dict[str, str] = {"text_encoders": str(folder)}
    if bare:
        texts = {f"model.{name}": each for name, each in pipeline.text_encoder.state_dict().items()}
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "tokenizer").symlink_to(folder / "tokenizer")
        write(texts, tmp_path / "texts" / "qwen_3_4b.safetensors")
        vae = write(flux2_vae(pipeline.vae), tmp_path / "flux2-vae.safetensors")
        model = {"vae": str(vae), "text_encoders": str(tmp_path / "texts")}
    file = write(tensors, tmp_path / "flux-2-klein-base-4b.safetensors")
    found = find_base(ModelSection(path=str(file), **model))
    assert FAMILY.describe(found.folder).variant == "klein-base"
    ours, theirs = (FAMILY.denoiser.load(each, torch.float32, CPU) for each in (found.folder, folder))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in ours.state_dict().items())
    assert dict(ours.config).items() >= {name: theirs.config[name] for name in ("num_layers", "axes_dims_rope")}.items()
    read, expected = (FAMILY.load_encoders(each, torch.float32, CPU) for each in (folder, found.folder))
    assert torch.equal(read.encode_text(["a ring"])["embeds"], expected.encode_text(["a ring"])["embeds"])
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    assert all(
        torch.equal(one, other)
        for one, other in zip(read.encode_image(pixels), expected.encode_image(pixels), strict=True)
    )


def test_base_and_distilled_are_distinguished_by_the_name_or_the_setting(pipeline: Any, tmp_path: Path) -> None:
    folder, tensors = tmp_path / "folder", flux2_checkpoint(pipeline)
    for name, flavor, variant, noted in (
        ("mine.safetensors", None, "klein", True),
        ("flux-2-klein-4b.safetensors", None, "klein", False),
        ("flux-2-klein-base-4b.safetensors", None, "klein-base", False),
        ("mine.safetensors", "base", "klein-base", False),
    ):
        path = write(tensors, tmp_path / name)
        model = ModelSection.model_validate({"path": str(path), "text_encoders": str(folder), "flavor": flavor})
        found = find_base(model)
        facts = FAMILY.describe(found.folder)
        assert (bool(found.note), facts.variant) == (noted, variant)
        assert bool(facts.distilled_from) == (variant == "klein")
    with pytest.raises(UsageError, match="may be base or distilled"):
        recognize(path, "turbo")


def test_a_vae_of_another_class_is_refused(pipeline: Any, tmp_path: Path) -> None:
    AutoencoderKL(block_out_channels=(32, 32), latent_channels=32).save_pretrained(tmp_path / "other")
    file = write(flux2_checkpoint(pipeline), tmp_path / "flux-2-klein-4b.safetensors")
    model = ModelSection(path=str(file), vae=str(tmp_path / "other"), text_encoders=str(tmp_path / "folder"))
    with pytest.raises(UsageError, match="has the class AutoencoderKL, and the model's own has AutoencoderKLFlux2"):
        find_base(model)


@pytest.mark.parametrize(("form", "count"), [(0, 3_875_544_576), (1, 9_078_581_248)], ids=["4b", "9b"])
def test_the_published_transformers_are_recognized_by_their_shapes(form: int, count: int, tmp_path: Path) -> None:
    published = public_forms("flux2")[form]
    with torch.device("meta"):
        tensors = flux2_original(FAMILY.denoiser.make(published))
    part = denoiser_part(recognize(empty_file(tmp_path / "model.safetensors", tensors, "BF16")).denoiser)
    assert {name: part.config[name] for name in published} == dict(published)
    assert sum(tensor.numel() for tensor in tensors.values()) == count
