"""A Qwen-Image checkpoint equals its folder, alone or with its text encoder and VAE, in one file or three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.conditioning import EditCaption
from lora_trainer.core.errors import UsageError
from lora_trainer.core.families import families
from lora_trainer.core.tensorfile import read_tensor_header
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.families.qwen_image import denoiser_part
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.fitting import check_vae
from lora_trainer.models.single.lay_out import lacking_parts, lay_out, vae_of_file
from lora_trainer.models.single.recognize import recognize
from lora_trainer.models.single.stored import Stored
from lora_trainer.models.single.texts import kind_of_file, text_part
from lora_trainer.run.bases.find import find_base
from tests.models.single.originals import qwen_image_checkpoint, video_vae_original, write
from tests.models.single.test_published import empty_file
from tests.models.single.tiny import tiny_qwen_image

CPU = torch.device("cpu")
FAMILY = FAMILIES["qwen_image"]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return tiny_qwen_image()


def same_as(ours: Path, theirs: Path) -> None:
    """Weights, text embeddings, latents and predictions of two folders."""
    one, other = (FAMILY.denoiser.load(each, torch.float32, CPU) for each in (ours, theirs))
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())
    read, expected = (FAMILY.load_encoders(each, torch.float32, CPU) for each in (ours, theirs))
    cond, same = (each.encode_text(["a red ring", ""]) for each in (read, expected))
    assert all(torch.equal(cond[name], same[name]) for name in cond)
    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    assert torch.equal(read.encode_image(pixels)[0], expected.encode_image(pixels)[0])
    noisy, t = torch.randn(2, 16, 8, 8), torch.tensor([3, 900])
    with torch.no_grad():
        first, second = (FAMILY.denoiser.predict(each, noisy, t, cond, torch.zeros(2, 6)) for each in (one, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("bare", [False, True], ids=["whole", "bare"])
def test_a_checkpoint_equals_its_folder(pipeline: Any, bare: bool, tmp_path: Path) -> None:
    folder, tensors = tmp_path / "folder", qwen_image_checkpoint(pipeline, bare=bare)
    pipeline.save_pretrained(folder)
    parts: dict[str, Path | None] = {"tokenizer": folder / "tokenizer"}
    if bare:
        parts |= {"text_encoder": folder / "text_encoder", "vae": folder / "vae"}
    file = write(tensors, tmp_path / "qwen_image.safetensors")
    assert recognize(file).family == "qwen_image"
    assert lacking_parts(recognize(file)) == ({"text_encoder", "tokenizer"} if bare else {"tokenizer"})
    laid_out = lay_out(file, parts)
    facts, others = FAMILY.describe(laid_out), FAMILY.describe(folder)
    assert (facts.latent_channels, facts.downscale) == (others.latent_channels, others.downscale) == (16, 8)
    assert FAMILY.denoiser.make_process(laid_out).times == FAMILY.denoiser.make_process(folder).times
    same_as(laid_out, folder)


def test_three_files_as_comfyui_keeps_them_equal_a_folder(pipeline: Any, tmp_path: Path) -> None:
    """Found by the settings; a tokenizer without tokenizer.json is enough."""
    folder, parts = tmp_path / "folder", qwen_image_checkpoint(pipeline)
    pipeline.save_pretrained(folder)
    beginnings = {"model.diffusion_model.": "qwen_image", "text_encoders.qwen25_7b.transformer.": "qwen_2.5_vl_7b"}
    beginnings["vae."] = "qwen_image_vae"
    files = {
        name: write(
            {key.removeprefix(beginning): each for key, each in parts.items() if key.startswith(beginning)},
            tmp_path / ("texts" if "vl" in name else "models") / f"{name}.safetensors",
        )
        for beginning, name in beginnings.items()
        if (tmp_path / ("texts" if "vl" in name else "models")).mkdir(exist_ok=True) is None
    }
    (folder / "tokenizer").rename(tmp_path / "texts" / "tokenizer")
    section = ModelSection(
        path=str(files["qwen_image"]), vae=str(files["qwen_image_vae"]), text_encoders=str(tmp_path / "texts")
    )
    found = find_base(section).folder
    (tmp_path / "texts" / "tokenizer").rename(folder / "tokenizer")
    same_as(found, folder)


def test_a_model_that_makes_layers_is_refused(pipeline: Any, tmp_path: Path) -> None:
    extra = {"time_text_embed.addition_t_embedding.weight": torch.ones(2, 2)}
    with pytest.raises(UsageError, match="makes images in layers"):
        recognize(write(qwen_image_checkpoint(pipeline, bare=True) | extra, tmp_path / "model.safetensors"))


@pytest.mark.parametrize(("edit", "files"), [("edit", 1), ("edit-2509", 3), ("edit-2511", 1), ("edit-2511", 3)])
def test_an_edit_model_equals_its_folder(edit: str, files: int, tmp_path: Path) -> None:
    """In one file, or in three as ComfyUI keeps them, whose text encoder has the half that sees images."""
    pipeline = tiny_qwen_image(edit)
    folder, tensors = tmp_path / "folder", qwen_image_checkpoint(pipeline)
    pipeline.save_pretrained(folder)
    named = tmp_path / f"qwen_image_{edit.replace('-', '_')}_bf16.safetensors"
    parts: dict[str, Path | None] = {"tokenizer": folder / "tokenizer"}
    if files == 1:
        write(tensors, named)
    else:
        beginnings = {
            "text_encoder": "text_encoders.qwen25_7b.transformer.",
            "vae": "vae.",
            "": "model.diffusion_model.",
        }
        for part, begin in beginnings.items():
            own = {key.removeprefix(begin): each for key, each in tensors.items() if key.startswith(begin)}
            place = write(own, tmp_path / f"{part}.safetensors" if part else named)
            parts |= {part: place} if part else {}
    assert (recognize(named).variant, recognize(named).note != "") == (edit, edit == "edit")
    laid_out = lay_out(named, parts)
    ours, theirs = FAMILY.describe(laid_out), FAMILY.describe(folder)
    shown = [(each.variant, each.most_controls, each.control_tokens) for each in (ours, theirs)]
    assert shown[0] == shown[1] == (("edit", 1, 1369) if edit == "edit" else ("edit-plus", 3, 196))
    same_as(laid_out, folder)
    # The control images as the text encoder sees them, and a prediction with their tokens beside the noisy image's.
    torch.manual_seed(1)
    pixels = torch.rand(3, 64, 96) * 2 - 1
    caption = EditCaption("make it snow", (pixels,))
    read, expected = (
        FAMILY.load_encoders(each, torch.float32, CPU).encode_text([caption]) for each in (laid_out, folder)
    )
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    cond = {**read, "control_0": torch.randn(1, 16, 8, 12)}
    noisy, t = torch.randn(1, 16, 8, 12), torch.tensor([500])
    models = [FAMILY.denoiser.load(each, torch.float32, CPU) for each in (laid_out, folder)]
    assert [each.zero_cond_t for each in models] == [edit == "edit-2511"] * 2
    with torch.no_grad():
        first, second = (FAMILY.denoiser.predict(each, noisy, t, cond, torch.zeros(1, 6)) for each in models)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "mark", "variant", "is_noted"),
    [
        ("qwen_image_bf16", False, "base", False),
        ("Qwen-Image-2512-Q4", False, "base", False),
        ("my_merge", False, "base", True),
        ("Qwen_Image_Edit-Q8_0", False, "edit", True),
        ("Qwen-Image-Edit-2509-merge", False, "edit-2509", False),
        ("qwen_image_edit_2511_fp8mixed", True, "edit-2511", False),
        ("my_merge", True, "edit-2511", False),
    ],
)
def test_the_name_and_a_mark_decide_which_edit_model_it_is(
    pipeline: Any, name: str, mark: bool, variant: str, is_noted: bool, tmp_path: Path
) -> None:
    tensors = qwen_image_checkpoint(pipeline, bare=True)
    file = write(
        tensors | ({"__index_timestep_zero__": torch.zeros(())} if mark else {}), tmp_path / f"{name}.safetensors"
    )
    found = recognize(file)
    assert (found.variant, found.note != "") == (variant, is_noted)
    if mark:
        with pytest.raises(UsageError, match=r"the keys of .* already decide it"):
            recognize(file, "edit")
        assert recognize(file, "edit-2511").variant == "edit-2511"
    else:
        assert recognize(file, "edit-2509").variant == "edit-2509"
        assert recognize(file, "edit-2509").note == ""


def test_an_edit_model_needs_the_half_of_the_text_encoder_that_sees(tmp_path: Path) -> None:
    pipeline = tiny_qwen_image("edit")
    tensors = {name: each for name, each in qwen_image_checkpoint(pipeline).items() if ".visual." not in name}
    pipeline.save_pretrained(tmp_path / "folder")
    file = write(tensors, tmp_path / "qwen_image_edit_2509.safetensors")
    with pytest.raises(UsageError, match="without the half that sees images"):
        lay_out(file, {"tokenizer": tmp_path / "folder" / "tokenizer"})


def test_an_edit_folder_with_another_vae_still_sees_control_images(tmp_path: Path) -> None:
    pipeline = tiny_qwen_image("edit")
    pipeline.save_pretrained(tmp_path / "folder")
    found = lay_out(tmp_path / "folder", {"vae": tmp_path / "folder" / "vae"})
    assert FAMILY.describe(found).control_tokens == 1369


def test_the_vae_has_every_tensor_as_in_diffusers_converter(pipeline: Any, tmp_path: Path) -> None:
    original, state = video_vae_original(pipeline.vae), pipeline.vae.state_dict()
    theirs = convert_wan_vae_to_diffusers(dict(original))
    assert theirs.keys() == state.keys()
    published = {**pipeline.vae.config}
    for tensors in (original, state):
        part = vae_of_file(write(dict(tensors), tmp_path / "vae.safetensors"), published)
        assert {name: each.key for name, each in part.places.items()}.keys() == state.keys()
        assert all(torch.equal(tensors[place.key], state[name]) for name, place in part.places.items())
        assert {key: part.config[key] for key in published if not key.startswith("_")} == {
            key: value for key, value in published.items() if not key.startswith("_")
        }


def test_a_vae_of_another_kind_does_not_fit(pipeline: Any, tmp_path: Path) -> None:
    own = {**pipeline.vae.config, "_class_name": "AutoencoderKLQwenImage"}
    for other, words in (
        ({"_class_name": "AutoencoderKL", "latent_channels": 16}, "the class AutoencoderKL,"),
        ({**own, "latents_mean": [0.0] * 16}, "a mean of"),
        ({**own, "dim_mult": [*own["dim_mult"], 4]}, "times smaller, and the model's own"),
    ):
        with pytest.raises(UsageError, match=words):
            check_vae(own, other, tmp_path)
    check_vae(own, own, tmp_path)


def test_the_published_parts_are_recognized_by_their_shapes(tmp_path: Path) -> None:
    published = public_architecture("qwen_image").denoiser
    with torch.device("meta"):
        tensors = FAMILY.denoiser.make(published).state_dict()
        vae = AutoencoderKLQwenImage()
        config = Qwen2_5_VLTextConfig(
            hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, vocab_size=152064
        )
        config.num_attention_heads, config.num_key_value_heads = 28, 4
        text = Qwen2_5_VLTextModel(config).state_dict()
    part = denoiser_part(recognize(empty_file(tmp_path / "model.safetensors", tensors, "BF16")).denoiser)
    assert {name: part.config[name] for name in published} == dict(published)
    assert part.places.keys() == tensors.keys()
    file = empty_file(tmp_path / "vae.safetensors", video_vae_original(vae))
    ours = vae_of_file(file, {}).config
    assert {key: vae.config[key] for key in ours if not key.startswith("_")} == {
        key: value for key, value in ours.items() if not key.startswith("_")
    }
    named = {f"model.{name}": each for name, each in text.items()} | {"lm_head.weight": text["embed_tokens.weight"]}
    file = empty_file(tmp_path / "text.safetensors", named, "BF16")
    stored = Stored.of(file, read_tensor_header(file), "")
    assert kind_of_file(stored) == "qwen2_5_vl"
    found = text_part("qwen2_5_vl", stored)
    assert found.places.keys() == text.keys()
    made = {
        key: getattr(config, key) for key in found.config["text_config"] if key not in ("model_type", "rope_parameters")
    }
    assert {key: found.config["text_config"][key] for key in made} == made | {
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-06,  # published, unlike the class's own defaults
    }
    counts = families()["qwen_image"]["phases"]
    assert sum(tensor.numel() for tensor in text.values()) == counts["text_encoders"][0]
    assert sum(tensor.numel() for tensor in vae.state_dict().values()) == counts["autoencoder"]
