"""A Krea 2 checkpoint equals its folder, alone or with its text encoder and VAE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_krea2_transformer_checkpoint_to_diffusers

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.tensorfile import read_tensor_header
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.krea2 import denoiser_part
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.lay_out import lacking_parts, lay_out
from lora_trainer.models.single.recognize import recognize
from lora_trainer.models.single.stored import Stored
from lora_trainer.models.single.texts import kind_of_file
from lora_trainer.run.bases.find import find_base
from tests.models.single.originals import krea2_checkpoint, krea2_original, write
from tests.models.single.test_published import empty_file
from tests.models.single.tiny import tiny_krea2

CPU = torch.device("cpu")
FAMILY = FAMILIES["krea2"]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return tiny_krea2()


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "bare"])
def test_a_checkpoint_equals_its_folder(pipeline: Any, bare: bool, tmp_path: Path) -> None:
    folder, tensors = tmp_path / "folder", krea2_checkpoint(pipeline, bare=bare)
    pipeline.save_pretrained(folder)
    parts: dict[str, Path | None] = {"tokenizer": folder / "tokenizer"}
    if bare:
        parts |= {"text_encoder": folder / "text_encoder", "vae": folder / "vae"}
    file = write(tensors, tmp_path / "raw.safetensors")
    assert (recognize(file).family, recognize(file).note) == ("krea2", "")
    assert lacking_parts(recognize(file)) == ({"text_encoder", "tokenizer"} if bare else {"tokenizer"})
    laid_out = lay_out(file, parts)
    assert FAMILY.describe(laid_out).variant == FAMILY.describe(folder).variant == "raw"
    assert FAMILY.denoiser.make_process(laid_out).times == FAMILY.denoiser.make_process(folder).times
    one, other = (FAMILY.denoiser.load(each, torch.float32, CPU) for each in (laid_out, folder))
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())
    read, expected = (FAMILY.load_encoders(each, torch.float32, CPU) for each in (laid_out, folder))
    cond, same = (each.encode_text(["a red ring", ""]) for each in (read, expected))
    assert all(torch.equal(cond[name], same[name]) for name in cond)


def test_raw_and_turbo_are_distinguished_by_the_setting_or_the_name(pipeline: Any, tmp_path: Path) -> None:
    folder, tensors = tmp_path / "folder", krea2_checkpoint(pipeline)
    pipeline.save_pretrained(folder)
    for name, flavor, variant, noted in (
        ("k.safetensors", None, "raw", True),
        ("k_turbo.safetensors", None, "turbo", False),
        ("k.safetensors", "turbo", "turbo", False),
        ("k_turbo.safetensors", "base", "raw", False),
    ):
        path = write(tensors, tmp_path / name)
        model = ModelSection.model_validate({"path": str(path), "text_encoders": str(folder), "flavor": flavor})
        found = find_base(model)
        assert (bool(found.note), FAMILY.describe(found.folder).variant) == (noted, variant)


def test_every_name_is_that_of_diffusers_converter(pipeline: Any) -> None:
    state = pipeline.transformer.state_dict()
    back = convert_krea2_transformer_checkpoint_to_diffusers(krea2_original(pipeline.transformer))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], weight) for name, weight in state.items())


def test_the_published_transformer_is_recognized_by_its_shapes(pipeline: Any, tmp_path: Path) -> None:
    published = public_architecture("krea2").denoiser
    with torch.device("meta"):
        model = FAMILY.denoiser.make(published)
        tensors = krea2_original(model)
    part = denoiser_part(recognize(empty_file(tmp_path / "model.safetensors", tensors, "BF16")).denoiser)
    assert {name: part.config[name] for name in published} == dict(published)
    assert part.places.keys() == model.state_dict().keys()
    text = write(dict(pipeline.text_encoder.state_dict()), tmp_path / "text.safetensors")
    assert kind_of_file(Stored.of(text, read_tensor_header(text), "")) == "qwen3_vl"
    blind = {name: each for name, each in pipeline.text_encoder.state_dict().items() if "visual." not in name}
    text = write(blind, tmp_path / "blind.safetensors")
    assert kind_of_file(Stored.of(text, read_tensor_header(text), "")) == "qwen3_vl", "by the names of its layers"
