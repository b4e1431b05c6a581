"""The family seam on a tiny model: facts, LoRA targets, attention, checkpointing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.core.errors import UsageError
from lora_trainer.evaluation.loading import heard
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import TextOptions
from lora_trainer.models.memory.checkpointing import checkpoint_blocks, checkpointable_blocks
from lora_trainer.models.memory.phases import count_of
from lora_trainer.models.published import public_architecture
from tests.families.own import own_families
from tests.lora_format.tiny import tiny_pipeline

CPU = torch.device("cpu")
SD15 = FAMILIES["sd15"]
PARAMETERS = {
    "sd15": 860,
    "sd2": 866,
    "sdxl": 2567,
    "sd3": 2243,
    "flux": 11901,
    "flux2": 3876,
    "chroma": 8900,
    "z_image": 6155,
    "qwen_image": 20430,
    "qwen_image21": 7115,
    "krea2": 12820,
    "anima": 1956,
    **{name: own.MILLIONS for name, own in own_families().items()},
}  # millions, as published


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder / "tokens").save_pretrained(folder / "sd", safe_serialization=True)
    return folder / "sd"


def copied(model: Path, target: Path) -> Path:
    import shutil

    return Path(shutil.copytree(model, target / "copy"))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_facts_come_from_the_configs(model):
    facts = SD15.describe(model)
    assert (facts.resolution, facts.downscale, facts.pixel_step, facts.latent_channels) == (64, 8, 16, 4)
    assert facts.prediction == "epsilon"
    assert facts.caption_tokens == 77


def test_encoders_return_scaled_latents_and_text_embeddings(model):
    encoders = SD15.load_encoders(model, torch.float32, CPU)
    mean, spread = encoders.encode_image(torch.zeros(2, 3, 64, 48))
    assert mean.shape == spread.shape == (2, 4, 8, 6)
    text = encoders.encode_text(["a cat", ""])
    assert text["embeds"].shape == (2, 77, 32)
    assert not torch.equal(text["embeds"][0], text["embeds"][1])
    assert (encoders.image_key, encoders.text_key) == SD15.encoder_keys(model, torch.float32)


def test_encoder_keys_depend_on_weights_and_precision(model, tmp_path):
    other = copied(model, tmp_path)
    assert SD15.encoder_keys(model, torch.float32) == SD15.encoder_keys(other, torch.float32)
    assert SD15.encoder_keys(model, torch.float32) != SD15.encoder_keys(model, torch.float16)
    weights = other / "vae" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    image, text = SD15.encoder_keys(other, torch.float32)
    assert image != SD15.encoder_keys(model, torch.float32)[0]
    assert text == SD15.encoder_keys(model, torch.float32)[1]


ONE_ENCODER, TWO_ENCODERS = "adeced5b477616af18d45624a9ade9fe", "21f76545227359af4ad2fb55f6bab4c1"
TEXT_KEYS = {
    "sd15": f"{ONE_ENCODER}-torch.float16",
    "sd2": f"{ONE_ENCODER}-torch.float16",
    "sdxl": f"{TWO_ENCODERS}-torch.float16",
    "sd3": "0bcaad9affd9d07531e128364d9102f6-torch.float16",
    "flux": f"{TWO_ENCODERS}-torch.float16-256",
    "flux2": f"{ONE_ENCODER}-torch.float16-(9, 18, 27)",
    "chroma": f"{ONE_ENCODER}-torch.float16-masked",
    "z_image": f"{ONE_ENCODER}-torch.float16",
    "qwen_image": f"{ONE_ENCODER}-torch.float16",
    "qwen_image21": f"{ONE_ENCODER}-torch.float16-before norm",
    "krea2": f"{ONE_ENCODER}-torch.float16",
    "anima": "3e49a293ebac8d821c4f052786b25819-torch.float16",
    **{name: own.TEXT_KEY for name, own in own_families().items()},
}


def test_encoder_keys_stay_those_of_caches_and_checkpoints_on_disk(tmp_path):
    """Another string for the same weights would encode every cached image and caption again."""
    (tmp_path / "model_index.json").write_text('{"text_encoder_3": ["transformers", "T5EncoderModel"]}')
    for name in (
        "vae",
        "transformer",
        *(f"{kind}{n}" for kind in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")),
        *("text_conditioner", "t5_tokenizer"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    image = "c44f95c7b37ecbb653ab5e7e12cf0398"
    for name, family in FAMILIES.items():
        upcast = "torch.float16" if name in ("sd15", "sd2") else "torch.float32"
        assert family.encoder_keys(tmp_path, torch.float16) == (f"{image}-{upcast}", TEXT_KEYS[name])
        short = family.reading(TextOptions(t5_tokens=40)).encoder_keys(tmp_path, torch.bfloat16)
        text = TEXT_KEYS[name].replace("float16", "bfloat16")
        assert short == (f"{image}-torch.bfloat16", f"{text}-439f78cb1f311017")


def test_unsupported_models_are_refused_with_the_reason(model, tmp_path):
    other = copied(model, tmp_path)
    edit(other / "model_index.json", _class_name="PixArtAlphaPipeline")
    with pytest.raises(UsageError, match="PixArtAlphaPipeline"):
        detect_family(other)
    edit(other / "unet" / "config.json", cross_attention_dim=1024)
    with pytest.raises(UsageError, match=r"2\.x"):
        SD15.describe(other)
    with pytest.raises(UsageError, match=r"no Stable Diffusion 2\.x"):
        FAMILIES["sd2"].describe(model)
    with pytest.raises(UsageError, match="text_encoder_2"):
        FAMILIES["sdxl"].describe(model)
    edit(other / "unet" / "config.json", cross_attention_dim=32, in_channels=9)
    with pytest.raises(UsageError, match="inpainting"):
        SD15.describe(other)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rescale_betas_zero_snr", True),
        ("trained_betas", [0.1, 0.2]),
        ("beta_schedule", "squaredcos_cap_v2"),
        ("prediction_type", "sample"),
        ("_class_name", "EDMEulerScheduler"),
    ],
)
def test_unsupported_noise_schedules_are_refused_by_name(model, tmp_path, key, value):
    other = copied(model, tmp_path)
    edit(other / "scheduler" / "scheduler_config.json", **{key: value})
    named = value if isinstance(value, str) else key
    for read in (SD15.describe, SD15.denoiser.make_process):
        with pytest.raises(UsageError, match=named):
            read(other)


@pytest.mark.parametrize("source", ["EulerDiscreteScheduler", "PNDMScheduler", "UniPCMultistepScheduler"])
def test_images_are_generated_on_the_trained_schedule_with_any_scheduler(model, tmp_path, source):
    import diffusers

    other = copied(model, tmp_path)
    scheduler = getattr(diffusers, source)(
        beta_start=0.001, beta_end=0.01, beta_schedule="linear", prediction_type="v_prediction"
    )
    scheduler.save_pretrained(other / "scheduler")
    edit(other / "model_index.json", scheduler=["diffusers", source])
    with heard() as messages:
        drawn = SD15.pipeline.make(other, torch.float32, CPU).scheduler
    assert [line for line in messages if "scheduler" in line.lower()] == []
    config = drawn.config
    assert (config.clip_sample, config.set_alpha_to_one, config.steps_offset) == (False, False, 1)
    process = SD15.denoiser.make_process(other)
    assert config.prediction_type == process.prediction == "v_prediction"
    assert torch.allclose(drawn.alphas_cumprod, process.alphas_cumprod)


@pytest.mark.parametrize("limit", [None, int(1e30), 500])
def test_a_tokenizer_without_a_limit_takes_that_of_the_text_encoder(model, tmp_path, limit):
    other = copied(model, tmp_path)
    path = other / "tokenizer" / "tokenizer_config.json"
    edit(path, model_max_length=limit)
    if limit is None:
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "model_max_length"}))
    assert SD15.describe(other).caption_tokens == 77
    encoders = SD15.load_encoders(other, torch.float32, CPU)
    assert encoders.encode_text(["cat " * 200])["embeds"].shape == (1, 77, 32)
    pipeline = SD15.pipeline.make(other, torch.float32, CPU)
    assert pipeline.tokenizer.model_max_length == 77
    assert pipeline.encode_prompt("cat " * 200, CPU, 1, False)[0].shape == (1, 77, 32)


def test_parts_may_differ_in_flavor_and_the_safety_checker_may_be_absent(model, tmp_path):
    other = copied(model, tmp_path)
    (other / "text_encoder" / "model.safetensors").rename(other / "text_encoder" / "model.fp16.safetensors")
    edit(
        other / "model_index.json",
        feature_extractor=["transformers", "CLIPImageProcessor"],
        safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipelines = [SD15.pipeline.make(folder, torch.float32, CPU) for folder in (model, other)]
    assert not [str(warning.message) for warning in caught if "dtype" in str(warning.message)]
    drawn = [
        pipeline("a cat", num_inference_steps=2, generator=torch.manual_seed(0), output_type="np").images
        for pipeline in pipelines
    ]
    assert (drawn[0] == drawn[1]).all()


def test_all_damaged_weights_are_named_at_once(model, tmp_path):
    other = copied(model, tmp_path)
    for component in ("unet", "vae"):
        path = other / component / "diffusion_pytorch_model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    (other / "text_encoder" / "model.safetensors").rename(other / "text_encoder" / "pytorch_model.bin")
    with pytest.raises(UsageError) as caught:
        SD15.describe(other)
    assert len(caught.value.problems) == 3
    assert "promises" in str(caught.value)
    assert "pickle" in str(caught.value)


def test_target_modules_are_named_sets_or_patterns(model):
    unet = SD15.denoiser.load(model, torch.float32, CPU)
    attention_only = target_modules(unet, SD15.denoiser, "attention")
    with_ff = target_modules(unet, SD15.denoiser, "attention+ff")
    assert attention_only
    assert all(".attn" in name for name in attention_only)
    assert set(attention_only) < set(with_ff)
    assert target_modules(unet, SD15.denoiser, ("*.attn2.to_k",)) == [
        n for n in attention_only if n.endswith("attn2.to_k")
    ]
    with pytest.raises(UsageError, match="matches none"):
        target_modules(unet, SD15.denoiser, ("*.attn3.*", "nothing"))


def test_injection_is_repeatable_and_silent(model):
    unets = [SD15.denoiser.load(model, torch.float32, CPU).eval() for _ in range(2)]
    inputs = (torch.randn(1, 4, 8, 8), torch.tensor([10]), {"embeds": torch.randn(1, 77, 32)}, torch.zeros(1, 6))
    with torch.no_grad():
        before = SD15.denoiser.predict(unets[0], *inputs)
    drawn = torch.get_rng_state()
    found = [
        inject_lora(unet, target_modules(unet, SD15.denoiser, "attention"), AdapterOptions(4, 8.0), 5) for unet in unets
    ]
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    downs = [parameter for name, parameter in found[0].items() if ".lora_A." in name]
    ups = [parameter for name, parameter in found[0].items() if ".lora_B." in name]
    assert len(downs) == len(ups) == len(found[0]) // 2 > 0
    assert all(down.shape[0] == up.shape[1] == 4 for down, up in zip(downs, ups, strict=True))
    with torch.no_grad():
        assert torch.equal(SD15.denoiser.predict(unets[0], *inputs), before)
        for up in ups:
            up += 0.1
        assert not torch.equal(SD15.denoiser.predict(unets[0], *inputs), before)


def test_checkpointing_counts_blocks_and_keeps_the_prediction(model):
    unet = SD15.denoiser.load(model, torch.float32, CPU).train()
    blocks = checkpointable_blocks(unet)
    for count in (0, 2, len(blocks)):
        checkpoint_blocks(unet, count)
        assert sum(bool(block.gradient_checkpointing) for block in blocks) == count
    counts = [count_of(setting, 7) for setting in (False, 0, "auto", True, 1, 3, 99)]
    assert str(counts) == "[0, 0, 0, 7, 1, 3, 7]", "numbers, as they are said"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_public_architecture_builds_without_weights(name):
    published = public_architecture(name)
    with torch.device("meta"):
        denoiser = FAMILIES[name].denoiser.make(published.denoiser)
    assert round(sum(parameter.numel() for parameter in denoiser.parameters()) / 1e6) == PARAMETERS[name]
    assert published.facts.family == name
