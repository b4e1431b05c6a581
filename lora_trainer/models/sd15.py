"""Stable Diffusion 1.x: one CLIP text encoder, a U-Net on 4-channel latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.family import PREDICTIONS, Encoders, Family, ModelFacts
from lora_trainer.models.folder import check_components, fingerprint, read_config, variant_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lora_trainer.diffusion.process import Prediction, Process

SD2_TEXT_WIDTH = 1024
CLIP_TOKENS = 77
NOISE_SCHEDULES = ("scaled_linear", "linear")


@dataclass(frozen=True)
class NoiseSchedule:
    """What a scheduler's config says of the noise; training and drawing read the same."""

    name: str
    steps: int
    beta_start: float
    beta_end: float
    prediction: Prediction


def describe(folder: Path) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    unet = read_config(folder, "unet/config.json", ("in_channels", "sample_size", "block_out_channels"))
    vae = read_config(folder, "vae/config.json", ("block_out_channels",))
    schedule = _noise_schedule(folder)
    caption_tokens = _caption_tokens(folder)
    check_components(folder, ("unet", "vae", "text_encoder"))
    if unet.get("cross_attention_dim") == SD2_TEXT_WIDTH:
        raise UsageError(Problem(f"{folder} is a Stable Diffusion 2.x model.", "Only SD1.x can be trained yet."))
    if unet.get("in_channels") != vae.get("latent_channels", 4):
        raise UsageError(
            Problem(
                f"{folder} is an inpainting or depth model ({unet.get('in_channels')} input channels).", "Use the base."
            )
        )
    downscale = 2 ** (len(vae["block_out_channels"]) - 1)
    return ModelFacts(
        path=folder,
        family="sd15",
        resolution=int(unet["sample_size"]) * downscale,
        latent_channels=int(unet["in_channels"]),
        downscale=downscale,
        pixel_step=downscale * 2 ** (len(unet["block_out_channels"]) - 1),
        prediction=schedule.prediction,
        caption_tokens=caption_tokens,
    )


def _caption_tokens(folder: Path) -> int:
    """The longest caption in tokens, start and end among them: what tokenizer and text encoder both take."""
    tokenizer = read_config(folder, "tokenizer/tokenizer_config.json")
    text_encoder = read_config(folder, "text_encoder/config.json")
    # A tokenizer without a limit of its own says nothing, or 1e30.
    limits = (tokenizer.get("model_max_length"), text_encoder.get("max_position_embeddings"))
    return min(CLIP_TOKENS if limit is None else int(limit) for limit in limits)


def encoder_keys(folder: Path, dtype: torch.dtype) -> tuple[str, str]:
    """Names of the image and the text encoder's weights, without loading them."""
    return f"{fingerprint(folder, 'vae')}-{dtype}", f"{fingerprint(folder, 'text_encoder', 'tokenizer')}-{dtype}"


def load_encoders(folder: Path, dtype: torch.dtype, device: torch.device) -> Encoders:
    """The autoencoder and the text encoder, frozen, on the device."""
    import torch

    vae = _load_vae(folder, dtype, device)
    text_encoder = _load_text_encoder(folder, dtype, device)
    tokenizer = _load_tokenizer(folder)
    scale = float(vae.config.scaling_factor)

    @torch.no_grad()
    def encode_image(pixels: Tensor) -> tuple[Tensor, Tensor]:
        posterior = vae.encode(pixels.to(device, dtype)).latent_dist
        return posterior.mean.float() * scale, posterior.std.float() * scale

    @torch.no_grad()
    def encode_text(captions: Sequence[str]) -> dict[str, Tensor]:
        ids = tokenizer(
            list(captions),
            padding="max_length",
            max_length=tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return {"embeds": text_encoder(ids.to(device))[0]}

    image_key, text_key = encoder_keys(folder, dtype)
    return Encoders(encode_image, encode_text, image_key, text_key)


def load_denoiser(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The U-Net, frozen, on the device."""
    return cast("nn.Module", _load_unet(folder, dtype, device))


def _load_vae(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from diffusers import AutoencoderKL

    return _load_frozen(AutoencoderKL, folder / "vae", dtype, device)


def _load_text_encoder(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import CLIPTextModel

    return _load_frozen(CLIPTextModel, folder / "text_encoder", dtype, device)


def _load_unet(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from diffusers import UNet2DConditionModel

    return _load_frozen(UNet2DConditionModel, folder / "unet", dtype, device)


def _load_frozen(kind: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """One part, in eval mode; each has its own variant, since a folder may hold one only as fp16."""
    model = kind.from_pretrained(
        folder, dtype=dtype, variant=variant_of(folder), use_safetensors=True, local_files_only=True
    )
    return model.to(device).eval().requires_grad_(False)


def _load_tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    tokenizer.model_max_length = _caption_tokens(folder)
    return tokenizer


def _noise_schedule(folder: Path) -> NoiseSchedule:
    """The noise schedule that the model was trained with. Raises UsageError for one that cannot be followed."""
    config = read_config(folder, "scheduler/scheduler_config.json")
    where = folder / "scheduler" / "scheduler_config.json"
    problems: list[Problem] = []
    name, prediction = config.get("beta_schedule", "scaled_linear"), config.get("prediction_type", "epsilon")
    if name not in NOISE_SCHEDULES:
        problems.append(Problem(f"{where}: noise schedule {name!r}.", f"Supported: {', '.join(NOISE_SCHEDULES)}."))
    if prediction not in PREDICTIONS:
        problems.append(
            Problem(f"{where}: the model predicts {prediction!r}.", f"Supported: {', '.join(PREDICTIONS)}.")
        )
    if config.get("rescale_betas_zero_snr"):
        problems.append(
            Problem(
                f"{where}: rescale_betas_zero_snr is true; noise without any signal left cannot be trained yet.",
                "Use a model with rescale_betas_zero_snr false.",
            )
        )
    if config.get("trained_betas") is not None:
        problems.append(
            Problem(
                f"{where}: trained_betas gives a noise schedule of its own, which cannot be followed yet.",
                "Use a model whose schedule is given by beta_start, beta_end and beta_schedule.",
            )
        )
    if problems:
        raise UsageError(problems)
    return NoiseSchedule(
        name=name,
        steps=int(config.get("num_train_timesteps", 1000)),
        beta_start=float(config.get("beta_start", 0.00085)),
        beta_end=float(config.get("beta_end", 0.012)),
        prediction=prediction,
    )


def make_process(folder: Path) -> Process:
    """The noise schedule that the model was trained with. Raises UsageError for one that cannot be followed."""
    from lora_trainer.diffusion.process import Process, linear_alphas, scaled_linear_alphas

    schedule = _noise_schedule(folder)
    alphas = {"scaled_linear": scaled_linear_alphas, "linear": linear_alphas}[schedule.name]
    return Process(alphas(schedule.steps, schedule.beta_start, schedule.beta_end), schedule.prediction)


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The U-Net's prediction [B, 4, h, w] for noisy latents at t [B] under cond["embeds"] [B, L, D]."""
    return cast("Tensor", denoiser(noisy, t, cond["embeds"], return_dict=False)[0])


def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """diffusers' pipeline of the untouched base, for drawing pictures."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    schedule = _noise_schedule(folder)
    # Not from the source's config: Euler, PNDM and others lack keys whose DDIM defaults wash pictures out.
    scheduler = DDIMScheduler(
        num_train_timesteps=schedule.steps,
        beta_start=schedule.beta_start,
        beta_end=schedule.beta_end,
        beta_schedule=schedule.name,
        prediction_type=schedule.prediction,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    pipeline = StableDiffusionPipeline(
        vae=_load_vae(folder, dtype, device),
        text_encoder=_load_text_encoder(folder, dtype, device),
        tokenizer=_load_tokenizer(folder),
        unet=_load_unet(folder, dtype, device),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_denoiser(config: Mapping[str, Any]) -> nn.Module:
    """A U-Net with random weights, on torch's current default device."""
    from diffusers import UNet2DConditionModel

    return cast("nn.Module", UNet2DConditionModel.from_config(dict(config)))


def cond_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {"embeds": (CLIP_TOKENS, int(config["cross_attention_dim"]))}


def base_names(facts: ModelFacts) -> tuple[str, str]:
    return "sd_v1", "stable-diffusion-v1/lora"


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")

FAMILY = Family(
    name="sd15",
    describe=describe,
    encoder_keys=encoder_keys,
    load_encoders=load_encoders,
    load_denoiser=load_denoiser,
    make_process=make_process,
    predict=predict,
    make_pipeline=make_pipeline,
    lora_targets={"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)},
    denoiser_prefix="unet",
    make_denoiser=make_denoiser,
    cond_shapes=cond_shapes,
    base_names=base_names,
)
