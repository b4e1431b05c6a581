"""Qwen-Image from files: text embeddings, predictions and images of its pipeline, names in LoRA files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline

from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.core.errors import UsageError
from lora_trainer.diffusion.timesteps import Shift
from lora_trainer.evaluation.recipe import Drawing, ImageRequest
from lora_trainer.evaluation.sample import draw
from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.models.autoencoder import decode_in_tiles, drawing_vae, image_decoder
from lora_trainer.models.detection import detect_family
from lora_trainer.models.drawing import read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import TextOptions
from lora_trainer.models.lora_names import names_of
from lora_trainer.models.qwen_text import read_template
from tests.lora_format.tiny import qwen_tokenizer, random_lora, tiny_pipeline, tiny_transformer

CPU = torch.device("cpu")
FAMILY = FAMILIES["qwen_image"]
CAPTIONS = ["a red ring on a blue background", "", "ring " * 300]
STREAM = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "img_mod.1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder / "tokens", "qwen_image").save_pretrained(folder / "qwen", safe_serialization=True)
    return folder / "qwen"


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    """diffusers' own, with the whole text encoder."""
    pipeline = QwenImagePipeline.from_pretrained(model, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_the_family_is_recognized_by_its_pipeline_and_described(model):
    assert detect_family(model) == "qwen_image"
    facts = FAMILY.describe(model)
    assert (facts.prediction, facts.pixel_step, facts.latent_channels, facts.caption_tokens) == ("flow", 16, 16, 512)
    assert FAMILY.denoiser.make_process(model).times.shift == Shift(1.0, True, (256, 8192), (0.5, 0.9))


def test_text_is_encoded_as_the_pipeline_does_without_the_half_that_sees_images(model, theirs):
    encoded = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    with torch.no_grad():
        expected, mask = theirs.encode_prompt(list(CAPTIONS), max_sequence_length=512)
    assert encoded["embeds"].shape[1] == 512
    assert encoded["padding"].dtype == torch.bool
    assert mask is None or torch.equal(encoded["padding"], ~mask.bool())
    assert torch.allclose(encoded["embeds"], expected, atol=1e-5)
    assert int(encoded["padding"][2].sum()) == 0, "what is longer is cut"


def test_prompt_weights_do_not_apply_to_the_template():
    tokenizer = qwen_tokenizer()
    plain, here = read_template(tokenizer, ["a red ring"], 300, CPU)
    weighed, same = read_template(tokenizer, [(("a ", 1.0), ("red ring", 2.0))], 300, CPU)
    assert torch.equal(weighed.ids, plain.ids)
    assert torch.equal(here, same)
    heavy = weighed.ids[0][34:][weighed.weights[0] == 2.0]
    assert tokenizer.decode(heavy) == "red ring"


@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_the_denoiser_gets_the_same_inputs_as_in_the_pipeline(model, theirs, size):
    calls: list[dict[str, Any]] = []
    watched = theirs.transformer.register_forward_hook(
        lambda module, args, named, output: calls.append({**named, "output": output[0]}), with_kwargs=True
    )
    arguments = {"num_inference_steps": 3, "output_type": "latent", "true_cfg_scale": 1.0}
    theirs("a ring", width=size[0], height=size[1], generator=torch.manual_seed(0), **arguments)
    watched.remove()
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(["a ring"])
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    assert [float(calls[place]["timestep"]) for place in (0, -1)] == pytest.approx([1.0, 0.02], abs=1e-6)
    for call in calls:
        tokens, rows, columns = call["hidden_states"], size[1] // 16, size[0] // 16
        noisy = tokens.view(1, rows, columns, 16, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, 16, 2 * rows, 2 * columns)
        seen: list[torch.Tensor] = []
        hook = transformer.register_forward_hook(lambda module, args, output: seen.append(output[0]))  # noqa: B023
        with torch.no_grad():
            FAMILY.denoiser.predict(transformer, noisy, call["timestep"] * 1000 - 1, cond, torch.zeros(1, 6))
        hook.remove()
        assert torch.allclose(seen[0], call["output"], atol=1e-5)


def test_captions_of_different_lengths_do_not_affect_each_other(model):
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    noisy, t = torch.randn(3, 16, 8, 12, generator=torch.manual_seed(0)), torch.tensor([10, 500, 999])
    with torch.no_grad():
        together = FAMILY.denoiser.predict(transformer, noisy, t, cond, torch.zeros(3, 6))
        for row in range(3):
            own = {name: value[row : row + 1] for name, value in cond.items()}
            alone = FAMILY.denoiser.predict(transformer, noisy[row : row + 1], t[row : row + 1], own, torch.zeros(1, 6))
            assert torch.allclose(together[row : row + 1], alone, atol=1e-5)


def test_images_are_the_pipelines_own(model, theirs):
    """With guidance, whose norm the pipeline keeps, and an empty negative prompt."""
    prompts = ["a red ring", "a blue ring on a green background"]
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in (3, 4)]
    sizes: dict[str, Any] = {"width": 64, "height": 48, "num_inference_steps": 3}
    expected = theirs(
        prompts, negative_prompt=["", ""], true_cfg_scale=4.0, generator=generators, output_type="pt", **sizes
    ).images
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    read = read_prompts(pipeline, FAMILY, [*prompts, ""])
    rows = [ImageRequest(prompt, seed) for prompt, seed in zip(prompts, (3, 4), strict=True)]
    drawing = Drawing(steps=3, guidance=4.0, size=(64, 48), negative="", strengths=(1.0,))
    for image, other in zip(draw(pipeline, FAMILY, read, rows, drawing), expected, strict=True):
        ours = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(48, 64, 3).permute(2, 0, 1)
        assert (ours.float() / 255 - other).abs().max() <= 1 / 255


def test_latents_are_scaled_as_the_pipeline_unscales_them(model, theirs):
    pixels = torch.rand(2, 3, 64, 48, generator=torch.manual_seed(0)) * 2 - 1
    mean, spread = FAMILY.load_encoders(model, torch.float32, CPU).encode_image(pixels)
    config = theirs.vae.config
    with torch.no_grad():
        posterior = theirs.vae.encode(pixels[:, :, None]).latent_dist
    deviation, shift = (
        torch.tensor(values)[None, :, None, None] for values in (config.latents_std, config.latents_mean)
    )
    assert torch.allclose(mean * deviation + shift, posterior.mean[:, :, 0], atol=1e-5)
    assert torch.allclose(spread * deviation, posterior.std[:, :, 0], atol=1e-5)
    vae = drawing_vae(model, torch.float32, CPU)
    whole = image_decoder(vae, CPU)(mean)
    with torch.no_grad():
        assert torch.allclose(whole, theirs.vae.decode(posterior.mean).sample[:, :, 0], atol=1e-5)
    decode_in_tiles(vae, 32)
    assert image_decoder(vae, CPU)(mean).shape == whole.shape


def test_layers_that_nothing_reads_are_not_trained(model):
    """Of the last block, whose text is dropped; everything else has a gradient."""
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU).requires_grad_(True)
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS[:1])
    noisy = torch.randn(1, 16, 8, 8, generator=torch.manual_seed(0))
    FAMILY.denoiser.predict(transformer, noisy, torch.tensor([500]), cond, torch.zeros(1, 6)).square().mean().backward()
    targets = target_modules(transformer, FAMILY.denoiser, "attention+ff")
    learning = {
        name
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and module.weight.grad is not None and module.weight.grad.any()
    }
    assert len(targets) == 2 * 12 - 4
    assert set(targets) <= learning
    assert not learning & set(FAMILY.denoiser.unread(transformer))


@pytest.mark.parametrize("form", ["kohya", "original", "original, kohya's halves", "diffusers"])
def test_diffusers_reads_every_form(form):
    """Alpha differs from the rank where the form has keys for it; also as ai-toolkit and musubi-tuner name layers."""
    endings = (*STREAM, "img_mlp.net.2", "txt_mlp.net.0.proj")
    plain = random_lora(tiny_transformer("qwen_image"), endings=endings, component="transformer", alpha=2.0)
    if form == "kohya":
        tensors, _ = kohya_tensors(plain, names_of(FAMILY))
        assert "lora_unet_transformer_blocks_0_attn_to_out_0.lora_down.weight" in tensors
    else:
        prefix = "transformer" if form == "diffusers" else "diffusion_model"
        down, up = ("lora_down", "lora_up") if form.endswith("halves") else ("lora_A", "lora_B")
        tensors = {}
        for module, pair in plain.modules.items():
            name = f"{prefix}.{module.partition('.')[2]}"
            tensors |= {f"{name}.{down}.weight": pair.down, f"{name}.{up}.weight": pair.up * pair.scale}
            if form.endswith("halves"):
                tensors |= {f"{name}.{up}.weight": pair.up, f"{name}.alpha": torch.tensor(pair.alpha)}
    read = QwenImagePipeline.lora_state_dict(dict(tensors))
    assert f"diffusers: {form}" in (*FAMILY.lora_files.readers, "diffusers: diffusers")
    assert len(read) == 2 * len(plain.modules)
    for name, pair in plain.modules.items():
        change = read[f"{name}.lora_B.weight"] @ read[f"{name}.lora_A.weight"]
        assert torch.allclose(change, pair.up @ pair.down * pair.scale, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        ("model_index.json", {"_class_name": "QwenImageLayeredPipeline"}, "in layers .*cannot be trained yet"),
        ("transformer/config.json", {"zero_cond_t": True}, "edits images"),
        ("transformer/config.json", {"joint_attention_dim": 32}, "text 32 wide"),
        ("scheduler/scheduler_config.json", {"shift_terminal": 2}, "shift_terminal is 2"),
        ("vae/config.json", {"latents_std": [0.0] * 16}, "latents_std has 0 usable numbers"),
        ("vae/config.json", {"_class_name": "AutoencoderKL"}, "not an AutoencoderKLQwenImage"),
    ],
)
def test_other_models_are_refused_by_name(model, tmp_path, path, changes, words):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / path).read_text("utf-8"))
    (other / path).write_text(json.dumps({**config, **changes}), encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        FAMILIES[detect_family(other)].describe(other)


def test_text_options_that_the_pipeline_cannot_follow_are_refused(model):
    reading = FAMILY.reading(TextOptions(t5_tokens=2000))
    with pytest.raises(UsageError, match="at most 1024 tokens"):
        reading.describe(model)
    with pytest.raises(UsageError, match="Qwen-Image has no CLIP"):
        FAMILY.reading(TextOptions(clip_skip=2)).describe(model)
    assert FAMILY.reading(TextOptions(t5_tokens=300)).describe(model).caption_tokens == 300
