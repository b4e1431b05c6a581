"""A Chroma checkpoint equals its folder, alone or with its text encoder and VAE in files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.chroma import denoiser_part
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.recognize import recognize
from lora_trainer.run.bases.find import find_base
from tests.models.single.originals import chroma_checkpoint, chroma_original, vae_original, write
from tests.models.single.test_published import empty_file
from tests.models.single.tiny import tiny_chroma

CPU = torch.device("cpu")
FAMILY = FAMILIES["chroma"]


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "bare"])
def test_a_checkpoint_equals_its_folder(bare: bool, tmp_path: Path) -> None:
    pipeline, folder = tiny_chroma(tmp_path / "words"), tmp_path / "folder"
    pipeline.save_pretrained(folder)
    model: dict[str, str] = {"text_encoders": str(folder)}
    if bare:
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "tokenizer").symlink_to(folder / "tokenizer")
        texts = {name: each.clone() for name, each in pipeline.text_encoder.state_dict().items()}
        write(texts, tmp_path / "texts" / "t5xxl.safetensors")
        vae = write(vae_original(pipeline.vae), tmp_path / "ae.safetensors")
        model = {"vae": str(vae), "text_encoders": str(tmp_path / "texts")}
    file = write(chroma_checkpoint(pipeline, bare=bare), tmp_path / "model.safetensors")
    assert recognize(file).family == "chroma"
    found = find_base(ModelSection(path=str(file), **model)).folder
    assert FAMILY.describe(found).caption_tokens == 512
    ours, theirs = (FAMILY.denoiser.load(each, torch.float32, CPU) for each in (found, folder))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in ours.state_dict().items())
    read, expected = (FAMILY.load_encoders(each, torch.float32, CPU) for each in (folder, found))
    cond, same = (each.encode_text(["a red ring", ""]) for each in (read, expected))
    assert all(torch.equal(cond[name], same[name]) for name in cond)
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    assert torch.equal(read.encode_image(pixels)[0], expected.encode_image(pixels)[0])
    noisy, t = torch.randn(2, 16, 8, 8), torch.tensor([3, 900])
    with torch.no_grad():
        first, second = (FAMILY.denoiser.predict(each, noisy, t, cond, torch.zeros(2, 6)) for each in (ours, theirs))
    assert torch.equal(first, second)


def test_the_published_transformer_is_recognized_by_its_shapes(tmp_path: Path) -> None:
    published = public_architecture("chroma").denoiser
    with torch.device("meta"):
        tensors = chroma_original(FAMILY.denoiser.make(published))
    part = denoiser_part(recognize(empty_file(tmp_path / "model.safetensors", tensors, "BF16")).denoiser)
    assert {name: part.config[name] for name in published} == dict(published)
    assert sum(tensor.numel() for tensor in tensors.values()) == 8_899_983_424
