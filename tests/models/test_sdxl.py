"""SDXL: two text encoders, sizes as time ids, a VAE that overflows fp16, zero-terminal-SNR schedules."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionXLPipeline

from lora_trainer.core.errors import UsageError
from lora_trainer.data.loader import size_row
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import Framing, views_of
from lora_trainer.evaluation.drift import base_visits, drift
from lora_trainer.evaluation.recipe import Drawing, ImageRequest
from lora_trainer.evaluation.sample import draw
from lora_trainer.models.drawing import prompted, read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.training.micro_batch import MicroBatch
from tests.lora_format.tiny import UNETS, tiny_pipeline

CPU = torch.device("cpu")
SDXL = FAMILIES["sdxl"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdxl")
    tiny_pipeline(folder / "tokens", "sdxl").save_pretrained(folder / "model", safe_serialization=True)
    return folder / "model"


@pytest.fixture
def velocity(model: Path, tmp_path: Path) -> Path:
    """The same model with v-prediction and zero terminal SNR."""
    other = Path(shutil.copytree(model, tmp_path / "velocity"))
    edit(other / "scheduler" / "scheduler_config.json", prediction_type="v_prediction", rescale_betas_zero_snr=True)
    return other


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def test_text_is_encoded_as_diffusers_does(model):
    encoded = SDXL.load_encoders(model, torch.float32, CPU).encode_text(["a red ring", ""])
    pipeline = DiffusionPipeline.from_pretrained(model, local_files_only=True)
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(["a red ring", ""], device=CPU, do_classifier_free_guidance=False)
    assert torch.equal(encoded["embeds"], embeds)
    assert torch.equal(encoded["pooled"], pooled)
    shapes = {name: tuple(value.shape[1:]) for name, value in encoded.items()}
    assert shapes == SDXL.text.cond_shapes(UNETS["sdxl"]) == {"embeds": (77, 56), "pooled": (16,)}


@pytest.mark.slow
def test_an_empty_negative_prompt_is_the_encoded_one_of_dropped_captions_not_zeros(model):
    """Images equal those of diffusers' pipeline with `force_zeros_for_empty_prompt` off, to 1/255."""
    empty = SDXL.load_encoders(model, torch.float32, CPU).encode_text([""])
    assert all(bool(value.any()) for value in empty.values())
    pipeline = SDXL.pipeline.make(model, torch.float32, CPU)
    read = read_prompts(pipeline, SDXL, ["a ring", ""])
    assert torch.equal(prompted(SDXL, read, ["a ring"], "")["negative_prompt_embeds"], empty["embeds"])
    drawing = Drawing(steps=2, size=(64, 64))
    (ours,) = draw(pipeline, SDXL, read, [ImageRequest("a ring", 3)], drawing)
    size = {"width": 64, "height": 64}
    theirs = {}
    for zeros in (False, True):
        whole = StableDiffusionXLPipeline.from_pretrained(
            model, local_files_only=True, force_zeros_for_empty_prompt=zeros, scheduler=pipeline.scheduler
        )
        seeded = torch.Generator("cpu").manual_seed(3)
        images = whole("a ring", generator=[seeded], num_inference_steps=2, guidance_scale=7.5, **size).images
        theirs[zeros] = np.asarray(images[0], int)
    assert np.abs(np.asarray(ours, int) - theirs[False]).max() <= 1
    assert not np.array_equal(theirs[False], theirs[True])


def test_time_ids_equal_those_of_diffusers(model):
    """An image of 3:1 in a bucket of at most 2:1 loses its left and right."""
    sample = Sample(Path("wide.png"), "", width=300, height=100, content="0" * 64)
    view = views_of(sample, Framing((64,), 16))[0]
    fit = view.fit
    assert fit.left > 0
    pipeline = DiffusionPipeline.from_pretrained(model, local_files_only=True)
    theirs = pipeline._get_add_time_ids(
        original_size=(100, 300),  # height, width
        crops_coords_top_left=(fit.top, fit.left),
        target_size=(fit.bucket.height, fit.bucket.width),
        dtype=torch.float32,
        text_encoder_projection_dim=16,
    )
    assert torch.equal(torch.tensor([size_row(sample, view)]), theirs)


def test_the_denoiser_gets_the_same_inputs_as_in_diffusers(model):
    unet = SDXL.denoiser.load(model, torch.float32, CPU)
    seen: list[dict[str, torch.Tensor]] = []
    pipeline = SDXL.pipeline.make(model, torch.float32, CPU)
    pipeline.unet.register_forward_pre_hook(
        lambda _, args, given: seen.append(given | {"args": args}), with_kwargs=True
    )
    drawn = pipeline(
        "a ring", num_inference_steps=2, generator=torch.manual_seed(0), output_type="pt", guidance_scale=1.0
    )
    assert drawn.images.isfinite().all()
    given, (noisy, t) = seen[0], seen[0]["args"]
    cond = SDXL.load_encoders(model, torch.float32, CPU).encode_text(["a ring"])
    sizes = torch.tensor([[64.0, 64, 0, 0, 64, 64]])
    assert torch.equal(given["added_cond_kwargs"]["time_ids"], sizes)
    with torch.no_grad():
        ours = SDXL.denoiser.predict(unet, noisy, t[None], cond, sizes)
        theirs = unet(noisy, t, given["encoder_hidden_states"], added_cond_kwargs=given["added_cond_kwargs"]).sample
    assert torch.equal(ours, theirs)


def test_time_ids_are_exact_in_any_precision(model):
    rows = torch.tensor([[3001.0, 1023, 7, 1, 1024, 1008]])
    one = torch.zeros(1, 4, 8, 8)
    micro = MicroBatch(one, one, one, torch.tensor([5]), {"embeds": torch.zeros(1, 77, 56)}, rows, torch.ones(1))
    moved = micro.to(CPU, torch.bfloat16)
    assert torch.equal(moved.sizes, rows)
    unet = SDXL.denoiser.load(model, torch.bfloat16, CPU)
    cond = {"embeds": moved.cond["embeds"], "pooled": torch.zeros(1, 16, dtype=torch.bfloat16)}
    with torch.no_grad():
        assert SDXL.denoiser.predict(unet, one.bfloat16(), moved.t, cond, moved.sizes).dtype == torch.bfloat16


def overflowing(model: Path, target: Path) -> Path:
    """The same model with a VAE whose first activations are beyond fp16's largest number."""
    other = Path(shutil.copytree(model, target / "overflowing"))
    vae = SDXL.pipeline.make(model, torch.float32, CPU).vae
    with torch.no_grad():
        vae.encoder.conv_in.weight.mul_(1e7)
        vae.decoder.conv_in.weight.mul_(1e7)
    vae.save_pretrained(other / "vae", safe_serialization=True)
    return other


@pytest.mark.slow
def test_a_vae_that_overflows_fp16_encodes_and_decodes_finite(model, tmp_path):
    other = overflowing(model, tmp_path)
    pixels = torch.rand(2, 3, 64, 64, generator=torch.manual_seed(0)) * 2 - 1
    drawing = {"num_inference_steps": 2, "output_type": "pt"}
    mean, spread = SDXL.load_encoders(other, torch.float16, CPU).encode_image(pixels)
    assert mean.isfinite().all()
    assert spread.isfinite().all()
    pipeline = SDXL.pipeline.make(other, torch.float16, CPU)
    assert pipeline("a ring", generator=torch.manual_seed(0), **drawing).images.isfinite().all()

    edit(other / "vae" / "config.json", force_upcast=False)  # a config that promises what these weights do not hold
    mean, _ = SDXL.load_encoders(other, torch.float16, CPU).encode_image(pixels)
    assert not mean.isfinite().all(), "the VAE of this test overflows"
    pipeline = SDXL.pipeline.make(other, torch.float16, CPU)
    assert pipeline.vae.dtype == torch.float16


def test_the_cache_name_depends_on_the_precision_of_the_vae(model):
    image, text = SDXL.encoder_keys(model, torch.float16)
    assert image == SDXL.encoder_keys(model, torch.float32)[0]
    assert text != SDXL.encoder_keys(model, torch.float32)[1]


def test_training_and_sampling_share_a_zero_terminal_snr_schedule(velocity):
    process = SDXL.denoiser.make_process(velocity)
    assert process.prediction == SDXL.describe(velocity).prediction == "v_prediction"
    assert process.alphas_cumprod[-1] == 0.0
    pipeline = SDXL.pipeline.make(velocity, torch.float32, CPU)
    assert torch.allclose(pipeline.scheduler.alphas_cumprod, process.alphas_cumprod, atol=1e-6)
    pipeline.scheduler.set_timesteps(5)
    assert int(pipeline.scheduler.timesteps[0]) == 999, "drawing begins where there is no signal"
    drawn = pipeline("a ring", num_inference_steps=3, generator=torch.manual_seed(0), output_type="pt")
    assert drawn.images.isfinite().all()


def test_epsilon_with_zero_terminal_snr_is_refused_with_the_reason(velocity):
    edit(velocity / "scheduler" / "scheduler_config.json", prediction_type="epsilon")
    with pytest.raises(UsageError, match="rescale_betas_zero_snr is true and the model predicts epsilon"):
        SDXL.describe(velocity)


def test_drift_is_finite_at_zero_snr(velocity):
    unet, process = SDXL.denoiser.load(velocity, torch.float32, CPU), SDXL.denoiser.make_process(velocity)
    cond = SDXL.load_encoders(velocity, torch.float32, CPU).encode_text(["", "a ring"])
    sizes = torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)

    def predict(noisy, t, cond, sizes):
        return SDXL.denoiser.predict(unet, noisy, t, cond, sizes)

    # Every 333rd timestep, the first and the last among them.
    few = replace(process, alphas_cumprod=process.alphas_cumprod[::333])
    visits = base_visits(predict, few, cond, sizes, (4, 8, 8), steps=4)
    assert visits[0].t == 3
    assert few.alphas_cumprod[3] == 0.0
    assert all(visit.latents.isfinite().all() for visit in visits)
    assert drift(lambda *args: 1.1 * predict(*args), visits, cond, sizes) == pytest.approx(0.1, rel=1e-3)


def test_a_model_of_another_architecture_is_refused(model, tmp_path):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    edit(other / "unet" / "config.json", addition_embed_type=None)
    with pytest.raises(UsageError, match="no pooled text and sizes"):
        SDXL.describe(other)
    edit(other / "vae" / "config.json", latents_mean=[0.0] * 4)
    with pytest.raises(UsageError, match="latents_mean"):
        SDXL.describe(other)
