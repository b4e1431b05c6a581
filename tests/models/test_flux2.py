"""FLUX.2 klein from files: latents, text embeddings and predictions of its pipeline, and original key names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from PIL import Image

from lora_trainer.core.errors import UsageError
from lora_trainer.diffusion.timesteps import Shift
from lora_trainer.lora_format.kohya import kohya_tensors
from lora_trainer.lora_format.layouts import Names
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.models.autoencoder import image_decoder, image_encoder, load_vae
from lora_trainer.models.detection import detect_family
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import TextOptions
from tests.lora_format.tiny import FLUX2_WIDTH, random_lora, tiny_pipeline, tiny_transformer
from tests.models.single.originals import flux2_original

CPU = torch.device("cpu")
FAMILY = FAMILIES["flux2"]
CAPTIONS = ["a red ring on a blue background", "ring " * 300]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder / "tokens", "flux2").save_pretrained(folder / "base", safe_serialization=True)
    return folder / "base"


@pytest.fixture(scope="module")
def pipeline(model: Path) -> Any:
    return Flux2KleinPipeline.from_pretrained(model, local_files_only=True)


def changed(model: Path, target: Path, file: str, **values: object) -> Path:
    copy = Path(shutil.copytree(model, target / "copy"))
    config = json.loads((copy / file).read_text("utf-8"))
    (copy / file).write_text(json.dumps(config | values), encoding="utf-8")
    return copy


def test_the_family_is_recognized_by_its_pipeline_and_described(model, tmp_path):
    assert detect_family(model) == "flux2"
    facts = FAMILY.describe(model)
    assert (facts.prediction, facts.downscale, facts.pixel_step, facts.latent_channels) == ("flow", 8, 16, 32)
    assert (facts.variant, facts.distilled_from, facts.caption_tokens) == ("klein-base", "", 512)
    assert facts.most_controls == 4
    assert FAMILY.pipeline.sampling_defaults(model).steps == 50
    assert FAMILY.denoiser.make_process(model).times.shift == Shift(3.0, by_size=True)
    distilled = changed(model, tmp_path, "model_index.json", is_distilled=True)
    facts = FAMILY.describe(distilled)
    assert (facts.variant, facts.distilled_from) == ("klein", "FLUX.2-klein-base")
    defaults = FAMILY.pipeline.sampling_defaults(distilled)
    assert (defaults.steps, defaults.guided, defaults.negative) == (4, False, False)


@pytest.mark.parametrize(("width", "size"), [(2560, "4b"), (4096, "9b")])
def test_the_two_sizes_are_distinguished(model, tmp_path, width, size):
    other = changed(model, tmp_path, "transformer/config.json", joint_attention_dim=3 * width)
    qwen = other / "text_encoder" / "config.json"
    qwen.write_text(json.dumps(json.loads(qwen.read_text("utf-8")) | {"hidden_size": width}), encoding="utf-8")
    assert FAMILY.describe(other).variant == f"klein-base-{size}"


@pytest.mark.parametrize(
    ("file", "values", "match"),
    [
        ("transformer/config.json", {"guidance_embeds": True}, "other inputs"),
        ("transformer/config.json", {"in_channels": 256}, "other inputs"),
        ("transformer/config.json", {"joint_attention_dim": 64}, "text 64 wide"),
        ("vae/config.json", {"_class_name": "AutoencoderKL"}, "not an AutoencoderKLFlux2"),
        ("text_encoder/config.json", {"num_hidden_layers": 20}, "has 20 layers"),
        (
            "text_encoder/config.json",
            {"num_hidden_layers": None},
            "num_hidden_layers is None; it must be a whole number",
        ),
        ("text_encoder/config.json", {"hidden_size": "32"}, "hidden_size is '32'; it must be a whole number"),
    ],
)
def test_a_folder_of_another_kind_is_refused(model, tmp_path, file, values, match):
    with pytest.raises(UsageError, match=match):
        FAMILY.describe(changed(model, tmp_path, file, **values))


def test_clip_options_are_refused(model):
    with pytest.raises(UsageError, match=r"FLUX\.2 has no CLIP"):
        FAMILY.reading(TextOptions(clip_skip=2)).describe(model)


def test_text_is_encoded_as_the_pipeline_does_by_a_part_of_the_layers(model, pipeline):
    encoded = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(CAPTIONS)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(list(CAPTIONS))
    assert encoded["embeds"].shape == (2, 512, 3 * FLUX2_WIDTH)
    assert torch.equal(encoded["embeds"], theirs)
    assert len(FAMILY.text.load(model, torch.float32, CPU).encoders["text_encoder"].layers) == 27


def test_latents_are_normalized_by_the_vaes_statistics_as_in_the_pipeline(model, pipeline):
    pixels = torch.rand(1, 3, 64, 96, generator=torch.manual_seed(0)) * 2 - 1
    mean, spread = FAMILY.load_encoders(model, torch.float32, CPU).encode_image(pixels)
    with torch.no_grad():
        theirs = pipeline._encode_vae_image(pixels, None)
        posterior = pipeline.vae.encode(pixels).latent_dist
        decoded = pipeline.vae.decode(posterior.mean).sample
    assert mean.shape == (1, 32, 8, 12)
    assert torch.allclose(pipeline._patchify_latents(mean), theirs, atol=1e-6)
    scales = torch.rsqrt(pipeline.vae.bn.running_var + pipeline.vae.config.batch_norm_eps)[:, None, None]
    assert torch.allclose(
        pipeline._patchify_latents(spread), pipeline._patchify_latents(posterior.std) * scales, atol=1e-6
    )
    assert torch.allclose(image_decoder(load_vae(model, torch.float32, CPU), CPU)(mean), decoded, atol=1e-5)


@pytest.mark.parametrize("size", [(64, 64), (96, 48)])
def test_the_denoiser_gets_the_same_inputs_as_in_the_pipeline(model, size):
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    calls: list[dict[str, Any]] = []
    targets: list[torch.Tensor] = []
    pipeline.transformer.register_forward_pre_hook(lambda _, args, named: calls.append(named), with_kwargs=True)
    pipeline.transformer.register_forward_hook(lambda _, args, answer: targets.append(answer[0]))
    arguments = {"num_inference_steps": 3, "guidance_scale": 1.0, "output_type": "latent"}
    pipeline(prompt="a ring", width=size[0], height=size[1], generator=torch.manual_seed(0), **arguments)
    cond = FAMILY.load_encoders(model, torch.float32, CPU).encode_text(["a ring"])
    transformer = FAMILY.denoiser.load(model, torch.float32, CPU)
    rows, columns = size[1] // 16, size[0] // 16
    seen: list[dict[str, Any]] = []
    transformer.register_forward_pre_hook(
        lambda module, args, named: seen.append(
            dict(zip(("hidden", "text", "time", "places", "words"), args, strict=True))
        ),
        with_kwargs=True,
    )
    times = [float(call["timestep"][0]) for call in calls]
    assert times[0] == 1 > times[1] > times[2] > 0
    for call, target in zip(calls, targets, strict=True):
        patches = call["hidden_states"].transpose(1, 2).unflatten(2, (rows, columns))
        noisy = pipeline._unpatchify_latents(patches)
        expected = pipeline._unpatchify_latents(target.transpose(1, 2).unflatten(2, (rows, columns)))
        with torch.no_grad():
            ours = FAMILY.denoiser.predict(transformer, noisy, 1000 * call["timestep"] - 1, cond, torch.zeros(1, 6))
        assert torch.equal(seen[-1]["hidden"], call["hidden_states"])
        assert torch.equal(seen[-1]["places"], call["img_ids"][0])
        assert torch.equal(seen[-1]["words"], call["txt_ids"][0])
        assert torch.equal(seen[-1]["text"], call["encoder_hidden_states"])
        assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("sizes", [((64, 80),), ((96, 64), (64, 64))])
def test_control_images_are_read_as_in_the_pipeline(model, sizes):
    """At every step, of other sizes than the image; and drawn from latents as from the images themselves."""
    pipeline = FAMILY.pipeline.make(model, torch.float32, CPU)
    steps, step = [], pipeline.scheduler.step

    def watch(velocity, t, latents, **rest):
        steps.append((velocity, t, latents))
        return step(velocity, t, latents, **rest)

    pipeline.scheduler.step = watch
    noise = np.random.default_rng(0)
    images = [noise.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]
    encode = image_encoder(pipeline.vae, CPU)
    controls = [encode(torch.from_numpy(each)[None].permute(0, 3, 1, 2) / 127.5 - 1.0)[0] for each in images]
    text = {"embeds": torch.randn(1, 8, 3 * FLUX2_WIDTH, generator=torch.manual_seed(0))}
    arguments = {"width": 64, "height": 64, "num_inference_steps": 3, "output_type": "latent", "guidance_scale": 4.0}
    arguments |= FAMILY.pipeline.prompted(text, {"embeds": text["embeds"] / 2})
    theirs = pipeline(image=[Image.fromarray(each) for each in images], generator=torch.manual_seed(1), **arguments)
    for velocity, t, latents in steps:
        noisy, wanted = (
            pipeline._unpatchify_latents(each.transpose(1, 2).unflatten(2, (4, 4))) for each in (latents, velocity)
        )
        named = {f"control_{number}": each for number, each in enumerate(controls)}
        with torch.no_grad():
            answers = [
                FAMILY.denoiser.predict(
                    pipeline.transformer, noisy, t.expand(1) - 1, {"embeds": embeds, **named}, torch.zeros(1, 6)
                )
                for embeds in (text["embeds"], text["embeds"] / 2)
            ]
        assert torch.allclose(answers[1] + 4 * (answers[0] - answers[1]), wanted, atol=1e-5)
    passed = FAMILY.pipeline.with_controls(pipeline, (64, 64), controls)
    ours = pipeline(**passed, generator=torch.manual_seed(1), **arguments)
    assert torch.allclose(ours.images, theirs.images, atol=1e-5)
    # Two samples with control images of their own, which the pipeline by itself would not take.
    others = [each.flip(3) for each in controls]
    two = [torch.cat(pair) for pair in zip(controls, others, strict=True)]
    arguments |= FAMILY.pipeline.prompted(
        {"embeds": text["embeds"].expand(2, -1, -1)}, {"embeds": text["embeds"].expand(2, -1, -1) / 2}
    )
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    both = pipeline(**FAMILY.pipeline.with_controls(pipeline, (64, 64), two), generator=seeds, **arguments).images
    assert torch.allclose(both[:1], theirs.images, atol=1e-5)
    assert not torch.allclose(both[1:], theirs.images, atol=1e-3)
    assert FAMILY.pipeline.with_controls(pipeline, (64, 64), []) == {}


def test_times_are_exact_in_half_precision(model):
    """The module alone would round 997 of 1000 timesteps to 996."""
    transformer = FAMILY.denoiser.load(model, torch.bfloat16, CPU)
    embedded: list[torch.Tensor] = []
    transformer.time_guidance_embed.time_proj.register_forward_hook(lambda _, given, answer: embedded.append(given[0]))
    cond = {"embeds": torch.zeros(1, 4, 3 * FLUX2_WIDTH, dtype=torch.bfloat16)}
    noisy = torch.zeros(1, 32, 4, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        FAMILY.denoiser.predict(transformer, noisy, torch.tensor([996]), cond, torch.zeros(1, 6))
    assert [each.tolist() for each in embedded] == [[997.0]]


def test_the_layout_has_every_module_as_in_diffusers_converter():
    """Each weight with its original key, fused and swapped as in the original, survives diffusers' conversion."""
    transformer = tiny_transformer("flux2")
    weights, original = transformer.state_dict(), flux2_original(transformer)
    assert {"double_blocks.0.img_attn.qkv.weight", "single_blocks.1.norm.key_norm.scale"} <= original.keys()
    back = convert_flux2_transformer_checkpoint_to_diffusers(original)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


def test_diffusers_reads_every_layer_of_the_kohya_format():
    """Fused in the file, and split again by the loader; alpha differs from the rank."""
    denoiser = tiny_transformer("flux2")
    endings = ("to_q", "to_v", "add_k_proj", "to_out.0", "to_add_out", "to_qkv_mlp_proj", "attn.to_out", "linear_in")
    plain = random_lora(denoiser, rank=4, alpha=2.0, endings=endings)
    ours = {f"transformer.{name.partition('.')[2]}": pair for name, pair in plain.modules.items()}
    names = Names("flux2", "transformer", FAMILY.lora_files.prefixes, FAMILY.lora_files.layout)
    tensors, _ = kohya_tensors(LoraWeights(ours), names)
    assert "lora_unet_single_blocks_1_linear1.lora_down.weight" in tensors
    read = Flux2KleinPipeline.lora_state_dict(dict(tensors))
    if isinstance(read, tuple):
        read = read[0]
    for name, pair in ours.items():
        change = read[f"{name}.lora_B.weight"] @ read[f"{name}.lora_A.weight"]
        assert torch.allclose(change, pair.up @ pair.down * 0.5, atol=1e-6)
