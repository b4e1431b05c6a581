"""A Z-Image checkpoint equals its folder, alone or with its text encoder and VAE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.config.layers import Layer
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import UsageError
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.z_image import denoiser_part
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.lay_out import lacking_parts, lay_out
from lora_trainer.models.single.recognize import recognize
from lora_trainer.run.bases.find import find_base
from lora_trainer.run.settings import settle
from tests.models.single.originals import write, z_image_checkpoint, z_image_original
from tests.models.single.test_published import empty_file
from tests.models.single.tiny import tiny_z_image

CPU = torch.device("cpu")
FAMILY = FAMILIES["z_image"]


@pytest.fixture
def pipeline(tmp_path: Path) -> Any:
    tiny = tiny_z_image(tmp_path / "words")
    tiny.save_pretrained(tmp_path / "folder")
    return tiny


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "bare"])
def test_a_checkpoint_equals_its_folder(pipeline: Any, bare: bool, tmp_path: Path) -> None:
    folder, tensors = tmp_path / "folder", z_image_checkpoint(pipeline, bare=bare)
    parts: dict[str, Path | None] = {"tokenizer": folder / "tokenizer"}
    if bare:
        parts |= {"text_encoder": folder / "text_encoder", "vae": folder / "vae"}
    file = write(tensors, tmp_path / "model.safetensors")
    assert recognize(file).family == "z_image"
    assert lacking_parts(recognize(file)) == ({"text_encoder", "tokenizer"} if bare else {"tokenizer"})
    section = ModelSection(path=str(file), text_encoders=str(folder), vae=str(folder / "vae"))
    messages: list[str] = []
    settle([], [Layer("--model", {"model": section.model_dump(exclude_none=True)})], say=messages.append)
    assert [("Turbo" in line, file.name in line) for line in messages] == [(True, True)]
    laid_out = lay_out(file, parts)
    assert FAMILY.describe(laid_out).variant == "turbo"
    ours, theirs = (FAMILY.denoiser.load(each, torch.float32, CPU) for each in (laid_out, folder))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in ours.state_dict().items())
    read, expected = (FAMILY.load_encoders(each, torch.float32, CPU) for each in (folder, laid_out))
    cond, same = (each.encode_text(["a red ring", ""]) for each in (read, expected))
    assert all(torch.equal(cond[name], same[name]) for name in cond)
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    assert torch.equal(read.encode_image(pixels)[0], expected.encode_image(pixels)[0])
    noisy, t = torch.randn(2, 16, 8, 8), torch.tensor([3, 900])
    with torch.no_grad():
        first, second = (FAMILY.denoiser.predict(each, noisy, t, cond, torch.zeros(2, 6)) for each in (ours, theirs))
    assert torch.equal(first, second)


def test_without_the_language_model_all_missing_parts_are_reported_at_once(pipeline: Any, tmp_path: Path) -> None:
    file = write(z_image_original(pipeline.transformer), tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as refused:
        lay_out(file)
    messages = " ".join(problem.message for problem in refused.value.problems)
    assert all(part in messages for part in ("text_encoder", "VAE", "Qwen3 lacks its tokenizer"))


def test_base_and_turbo_are_distinguished_by_the_setting_or_the_name(pipeline: Any, tmp_path: Path) -> None:
    """Published schedulers: shift 6 and 3."""
    folder, tensors = tmp_path / "folder", z_image_checkpoint(pipeline)
    for name, variant, shift, noted in (
        ("z.safetensors", None, 3.0, True),
        ("z_turbo.safetensors", None, 3.0, False),
        ("z.safetensors", "turbo", 3.0, False),
        ("z_turbo.safetensors", "base", 6.0, False),
    ):
        path = write(tensors, tmp_path / name)
        model = ModelSection.model_validate({"path": str(path), "text_encoders": str(folder), "flavor": variant})
        found = find_base(model)
        assert bool(found.note) == noted
        assert FAMILY.denoiser.make_process(found.folder).times.shift.factor == shift
        assert FAMILY.describe(found.folder).variant == ("base" if shift == 6 else "turbo")
    for path, words in ((folder, "with a scheduler of its own"), (flux_file(tmp_path), "already decide it")):
        with pytest.raises(UsageError, match=words):
            find_base(ModelSection(path=str(path), flavor="base"))


def flux_file(folder: Path) -> Path:
    names = ("double_blocks.0.img_attn.qkv", "img_in", "txt_in", "vector_in.in_layer")
    return write({f"{name}.weight": torch.ones(64, 64) for name in names}, folder / "flux.safetensors")


def test_the_published_transformer_is_recognized_by_its_shapes(tmp_path: Path) -> None:
    with torch.device("meta"):
        tensors = z_image_original(FAMILY.denoiser.make(public_architecture("z_image").denoiser))
    part = denoiser_part(recognize(empty_file(tmp_path / "model.safetensors", tensors, "BF16")).denoiser)
    published = public_architecture("z_image").denoiser
    assert {name: part.config[name] for name in published} == dict(published)
    assert sum(tensor.numel() for name, tensor in tensors.items() if name != "norm_final.weight") == 6_154_908_736
