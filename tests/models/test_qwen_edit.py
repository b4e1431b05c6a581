"""Qwen-Image-Edit and Edit-Plus from files: prompts with control images, predictions and images of diffusers' pipelines.

transformers' Qwen2_5_VLProcessor needs torchvision, so a substitute does what it does: it repeats the place of each image as often
as the image has tokens. diffusers 0.42.1 does not pass on which tokens are of images, without which transformers 5 numbers
them in a row; the pipelines here do, as its pull request 14189.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from transformers import BatchFeature, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLImageProcessorPil

from lora_trainer.core.conditioning import EditCaption
from lora_trainer.core.errors import UsageError
from lora_trainer.evaluation.recipe import Drawing, ImageRequest
from lora_trainer.evaluation.sample import draw, load_controls, read_rows
from lora_trainer.models.detection import detect_family
from lora_trainer.models.encoders import offloaded_text
from lora_trainer.models.families import FAMILIES, qwen_image
from tests.recipes.recipe import save_tiny_model

CPU = torch.device("cpu")
FAMILY = FAMILIES["qwen_image"]
KINDS = {"edit": diffusers.QwenImageEditPipeline, "edit-plus": diffusers.QwenImageEditPlusPipeline}
AREA = 64 * 64  # of control images here, in place of a million pixels


class Processor:
    """What transformers' `Qwen2_5_VLProcessor` does with texts and images."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> BatchFeature:
        texts, found = list(text), {}
        if images is not None:
            found = self.image_processor(images=images, return_tensors=return_tensors)
            counts = iter(int(grid.prod()) // 4 for grid in found["image_grid_thw"])
            for index, each in enumerate(texts):
                parts = each.split("<|image_pad|>")
                texts[index] = parts[0] + "".join("<|image_pad|>" * next(counts) + part for part in parts[1:])
        tokens = self.tokenizer(texts, padding=padding, return_tensors=return_tensors)
        return BatchFeature({**tokens, **found})


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), f"qwen_image-{request.param}")
    # Otherwise neither text nor control images change a pixel of so small a model.
    transformer = diffusers.QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    with torch.no_grad():
        for name, weight in transformer.named_parameters():
            weight.mul_(6.0 if any(part in name for part in ("to_v", "to_out", "to_add_out", "add_v")) else 1.0)
    transformer.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture
def theirs(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """diffusers' own pipeline, which makes control images of `AREA` pixels."""
    kind = kind_of(model)
    encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(model / "text_encoder").eval()
    place = encoder.config.image_token_id

    def with_types(_: Any, places: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return places, {**named, "mm_token_type_ids": (named["input_ids"] == place).int()}

    encoder.register_forward_pre_hook(with_types, with_kwargs=True)
    pipeline = KINDS[kind](
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(model / "scheduler"),
        vae=diffusers.AutoencoderKLQwenImage.from_pretrained(model / "vae"),
        text_encoder=encoder,
        tokenizer=Qwen2Tokenizer.from_pretrained(model / "tokenizer"),
        processor=Processor(model),
        transformer=diffusers.QwenImageTransformer2DModel.from_pretrained(model / "transformer"),
    )
    pipeline.set_progress_bar_config(disable=True)
    code = __import__(type(pipeline).__module__, fromlist=["calculate_dimensions"])
    own = code.calculate_dimensions
    if kind == "edit":
        monkeypatch.setattr(code, "calculate_dimensions", lambda _, ratio: own(AREA, ratio))
        monkeypatch.setitem(qwen_image.SEEN_PIXELS, qwen_image.EDIT, AREA)
    else:
        monkeypatch.setattr(code, "VAE_IMAGE_SIZE", AREA)
    return pipeline


def kind_of(model: Path) -> str:
    return FAMILY.describe(model).variant


def controls_for(model: Path, folder: Path) -> list[Path]:
    """One control image, or two for Edit-Plus."""
    files = []
    for number in range(1 if kind_of(model) == "edit" else 2):
        image = Image.effect_mandelbrot((64, 64), (-2 + number, -1.5, 1, 1.5), 60).convert("L")
        files.append(folder / f"control{number}.png")
        Image.merge("RGB", (image, image.rotate(90), Image.new("L", image.size, 40 * number))).save(files[-1])
    return files


def as_pixels(image: Image.Image) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    return flat.permute(2, 0, 1).float() / 127.5 - 1.0


def test_edit_models_are_recognized_by_their_pipeline(model):
    facts, kind = FAMILY.describe(model), kind_of(model)
    assert detect_family(model) == "qwen_image"
    assert (facts.most_controls, facts.control_tokens) == {"edit": (1, 37**2), "edit-plus": (3, 14**2)}[kind]
    assert FAMILY.denoiser.load(model, torch.float32, CPU).zero_cond_t == (kind == "edit-plus")


@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_prompts_are_encoded_as_the_pipeline_does(model, theirs, size):
    """Captions of different lengths in one batch, with the images that the text encoder sees."""
    images = [Image.effect_noise(size, 90).convert("RGB") for _ in range(1 if kind_of(model) == "edit" else 3)]
    captions = ["a red ring on a blue background", "", "ring " * 40]
    controls = tuple(map(as_pixels, images))
    encoded = FAMILY.load_encoders(model, torch.float32, CPU).encode_text([EditCaption(c, controls) for c in captions])
    area = AREA if kind_of(model) == "edit" else 384 * 384
    seen = [image.resize(qwen_image_size(area, size), Image.Resampling.LANCZOS) for image in images]
    for row, caption in enumerate(captions):
        with torch.no_grad():
            expected, _ = theirs.encode_prompt([caption], image=seen if len(seen) > 1 else seen[0])
        length = expected.shape[1]
        assert torch.allclose(encoded["embeds"][row : row + 1, :length], expected, atol=1e-5)
        assert encoded["padding"].dtype == torch.bool
        assert encoded["padding"][row].tolist() == [place >= length for place in range(encoded["padding"].shape[1])]
    other = [EditCaption(captions[0], tuple(each.flip(1) for each in controls))]
    changed = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(other)
    assert not torch.allclose(changed["embeds"][0], encoded["embeds"][0], atol=1e-3)


def qwen_image_size(area: int, size: tuple[int, int]) -> tuple[int, int]:
    width = (area * size[0] / size[1]) ** 0.5
    return round(width / 32) * 32, round(width * size[1] / size[0] / 32) * 32


def test_prompts_without_images_and_layer_by_layer(model, theirs):
    """As the pipeline of several images encodes them, where there is none; offloaded encoders give the same."""
    encode = FAMILY.load_encoders(model, torch.float32, CPU).encode_text
    plain = encode(["a red ring"])
    if kind_of(model) == "edit-plus":
        with torch.no_grad():
            expected, _ = theirs.encode_prompt(["a red ring"], image=None)
        assert torch.allclose(plain["embeds"][:, : expected.shape[1]], expected, atol=1e-5)
    seen = [EditCaption((("a ", 1.0), ("ring", 2.0)), (torch.zeros(3, 64, 64),))]
    whole, offloaded = encode(seen), offloaded_text(FAMILY.text, model, torch.float32, CPU)(seen)
    assert torch.equal(whole["embeds"], offloaded["embeds"])
    assert not torch.equal(whole["embeds"], encode([EditCaption("a ring", seen[0].controls)])["embeds"])


@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_the_denoiser_gets_the_same_inputs_as_in_the_pipeline(model, theirs, tmp_path, size):
    calls: list[dict[str, Any]] = []
    theirs.transformer.register_forward_hook(
        lambda module, args, named, output: calls.append({**named, "output": output[0]}), with_kwargs=True
    )
    images = [Image.open(file).convert("RGB") for file in controls_for(model, tmp_path)]
    arguments = {"num_inference_steps": 3, "output_type": "latent", "true_cfg_scale": 1.0}
    theirs(images if len(images) > 1 else images[0], "a ring", width=size[0], height=size[1], **arguments)
    prompt = [EditCaption("a ring", tuple(map(as_pixels, images)))]
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(prompt)
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    encode = FAMILY.load_encoders(model, torch.float32, CPU).encode_image
    controls = {f"control_{number}": encode(as_pixels(each)[None])[0] for number, each in enumerate(images)}
    rows, columns = size[1] // 16, size[0] // 16
    assert len(calls) == 3
    for call in calls:
        tokens = call["hidden_states"][:, : rows * columns]
        noisy = tokens.view(1, rows, columns, 16, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, 16, 2 * rows, 2 * columns)
        with torch.no_grad():
            found = FAMILY.denoiser.predict(
                transformer, noisy, call["timestep"] * 1000 - 1, {**cond, **controls}, torch.zeros(1, 6)
            )
        wanted = qwen_image.unpacked(call["output"][:, : rows * columns], noisy)
        assert torch.allclose(found, wanted, atol=1e-4)
        with torch.no_grad():
            without = FAMILY.denoiser.predict(transformer, noisy, call["timestep"] * 1000 - 1, cond, torch.zeros(1, 6))
        assert not torch.allclose(found, without, atol=1e-2)


def test_images_are_the_pipelines_own(model, theirs, tmp_path):
    """With guidance and an empty negative prompt, which sees the control images, too. One pipeline draws several rows."""
    files = controls_for(model, tmp_path)
    images = [Image.open(file).convert("RGB") for file in files]
    named = tuple(map(str, files))
    rows = [ImageRequest("a red ring", 3, named), ImageRequest("a blue ring", 4, named[::-1])]
    drawing = Drawing(steps=3, guidance=4.0, size=(64, 64), negative="", strengths=(1.0,))
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    assert type(pipeline) is type(theirs)
    read = read_rows(pipeline, FAMILY, rows, drawing)
    drawn = list(draw(pipeline, FAMILY, read, rows, drawing))
    for image, row, chosen in zip(drawn, rows, (images, images[::-1]), strict=True):
        expected = theirs(
            chosen if len(chosen) > 1 else chosen[0],
            row.prompt,
            negative_prompt="",
            true_cfg_scale=4.0,
            generator=torch.Generator("cpu").manual_seed(row.seed),
            width=64,
            height=64,
            num_inference_steps=3,
        ).images[0]
        assert (as_pixels(image) - as_pixels(expected)).abs().max() <= 2 / 255 + 1e-6  # pixels reach from -1 to 1
    # Without a control image it is drawn from the prompt alone; the one before left nothing behind.
    bare = [ImageRequest("a red ring", 3)]
    alone = next(draw(pipeline, FAMILY, read_rows(pipeline, FAMILY, bare, drawing), bare, drawing))
    assert (as_pixels(alone) - as_pixels(drawn[0])).abs().max() > 4 / 255
    with torch.no_grad():
        shapes = load_controls(rows[:1], (48, 64))
    assert [each.shape for each in shapes] == [(1, 3, 64, 48)] * len(files)


def test_prompts_longer_than_the_pipeline_encodes_itself_are_passed():
    """A control image of a million pixels is 1369 tokens; the pipeline refuses to encode more than 1024, of text alone."""
    long = {"embeds": torch.zeros(1, 1881, 4), "padding": torch.zeros(1, 1881, dtype=torch.bool)}
    arguments = FAMILY.pipeline.prompted(long, None)
    assert arguments["max_sequence_length"] == 1024
    assert arguments["prompt_embeds"].shape == (1, 1881, 4)


def test_a_folder_without_the_settings_for_images_is_refused(model, tmp_path):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "processor/preprocessor_config.json").unlink()
    with pytest.raises(UsageError, match="the text encoder of an edit model sees the control images"):
        FAMILY.describe(other)


def test_the_kind_and_the_settings_for_images_are_in_the_name_of_text_embeddings(model, tmp_path):
    """Both kinds may have the same weights and read captions differently."""
    keys = {FAMILY.encoder_keys(model, torch.float32)[1]}
    other = Path(shutil.copytree(model, tmp_path / "other"))
    settings = json.loads((other / "processor/preprocessor_config.json").read_text("utf-8"))
    settings["image_mean"] = [0.5, 0.5, 0.5]
    (other / "processor/preprocessor_config.json").write_text(json.dumps(settings), "utf-8")
    keys.add(FAMILY.encoder_keys(other, torch.float32)[1])
    index = json.loads((other / "model_index.json").read_text("utf-8"))
    kind = {"edit": qwen_image.PLUS, "edit-plus": qwen_image.EDIT}[kind_of(model)]
    (other / "model_index.json").write_text(json.dumps({**index, "_class_name": kind}), "utf-8")
    keys.add(FAMILY.encoder_keys(other, torch.float32)[1])
    assert len(keys) == 3
