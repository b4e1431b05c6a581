"""An Anima checkpoint equals its folder, alone or with its text encoder and VAE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_cosmos_transformer_checkpoint_to_diffusers

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.anima import conditioner_part, denoiser_part
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.lay_out import lacking_parts, lay_out
from lora_trainer.models.single.recognize import recognize
from lora_trainer.run.bases.find import find_base
from tests.models.single.originals import anima_checkpoint, anima_original, write
from tests.models.single.test_published import empty_file
from tests.models.single.tiny import tiny_anima

CPU = torch.device("cpu")
FAMILY = FAMILIES["anima"]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return tiny_anima()


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "bare"])
def test_a_checkpoint_equals_its_folder(pipeline: Any, bare: bool, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", write(anima_checkpoint(pipeline, bare=bare), tmp_path / "anima.safetensors")
    pipeline.save_pretrained(folder)
    tokenizers = {"tokenizer", "t5_tokenizer"}
    assert recognize(file).family == "anima"
    assert lacking_parts(recognize(file)) == tokenizers | ({"text_encoder"} if bare else set())
    named = {"path": str(file), "text_encoders": str(folder), **({"vae": str(folder / "vae")} if bare else {})}
    laid_out = find_base(ModelSection.model_validate(named)).folder
    assert FAMILY.describe(laid_out).largest_side == FAMILY.describe(folder).largest_side
    assert FAMILY.denoiser.make_process(laid_out).times == FAMILY.denoiser.make_process(folder).times
    one, other = (FAMILY.denoiser.load(each, torch.float32, CPU) for each in (laid_out, folder))
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())
    read, expected = (FAMILY.load_encoders(each, torch.float32, CPU) for each in (laid_out, folder))
    assert torch.equal(
        read.encode_text(["a red ring", ""])["embeds"], expected.encode_text(["a red ring", ""])["embeds"]
    )


def test_a_folder_with_another_text_encoder_is_one_of_the_same_family(pipeline: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    pipeline.save_pretrained(folder)
    laid_out = lay_out(folder, {"vae": folder / "vae"})
    noisy, same = (
        FAMILY.load_encoders(each, torch.float32, CPU).encode_text(["a ring"]) for each in (laid_out, folder)
    )
    assert torch.equal(noisy["embeds"], same["embeds"])


def test_every_name_is_that_of_diffusers_converter(pipeline: Any) -> None:
    state = pipeline.transformer.state_dict()
    names = {name: each for name, each in anima_original(pipeline).items() if not name.startswith("llm_adapter.")}
    back = convert_cosmos_transformer_checkpoint_to_diffusers({f"net.{name}": each for name, each in names.items()})
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], weight) for name, weight in state.items())


def test_the_published_model_is_recognized_by_its_shapes(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from diffusers import AnimaTextConditioner

    published = public_architecture("anima").denoiser
    with torch.device("meta"):
        model = SimpleNamespace(transformer=FAMILY.denoiser.make(published), text_conditioner=AnimaTextConditioner())
        tensors = {f"net.{name}": each for name, each in anima_original(model).items()}
    found = recognize(empty_file(tmp_path / "model.safetensors", tensors, "BF16")).denoiser
    part, conditioner = denoiser_part(found), conditioner_part(found)
    assert {name: part.config[name] for name in published} == dict(published)
    assert part.places.keys() == model.transformer.state_dict().keys()
    usual = dict(model.text_conditioner.config)
    assert {name: value for name, value in conditioner.config.items() if usual.get(name) != value} == {
        "_class_name": "AnimaTextConditioner"
    }
    assert conditioner.places.keys() == model.text_conditioner.state_dict().keys()
