"""Shared by the families with a U-Net: facts from the configs, frozen parts, the VAE, the LoRA's targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.autoencoder import levels, vae_facts
from lora_trainer.models.family import ModelFacts
from lora_trainer.models.folder import check_components, read_config, tokenizer_of, whole_number
from lora_trainer.models.frozen import load_frozen, load_tokenizer_folder
from lora_trainer.models.noise_schedule import is_few_step, read_noise_schedule

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lora_trainer.models.quantization.store import Narrow

CLIP_TOKENS = 77
LEAST_TOKENS, MOST_TOKENS = 3, 4096  # start, a word and end
THINNER = 5  # a fifth of the width is about a twenty-fifth of the weights
THINNESS = "a fifth of its width"
LARGEST_SIDE = 1024
SD2_TEXT_WIDTH = 1024  # 1.x and 2.x share a pipeline; their text encoders do not
ATTENTION = tuple(f"*.attentions.*.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
FEED_FORWARD = tuple(f"*.attentions.*.{name}" for name in ("ff.net.0.proj", "ff.net.2"))
CLIP_TARGETS = tuple(f"*.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"))
LORA_READERS = (  # programs that read LoRA files of U-Nets whole, with the style
    "diffusers: kohya",
    "diffusers: old diffusers",
    "diffusers: old diffusers, by layer",
    "ComfyUI: kohya",
    "ComfyUI: kohya, first code",
    "ComfyUI: LyCORIS",
    "ComfyUI: original",
    "ComfyUI: original, kohya's halves",
    "ComfyUI: old diffusers",
    "ComfyUI: old diffusers, no prefix",
    "sd-scripts: kohya",
)
PASSED_OVER = {"sd-scripts": ("conv_in", "conv_out", "time_embedding.", "add_embedding.")}
# Config keys of other inputs of a U-Net, such as images (unCLIP, IP-Adapter) or a guidance (LCM).
MORE_INPUTS = ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "time_cond_proj_dim")
LORA_TARGETS = {"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)}


def unet_facts(folder: Path, family: str, text_encoders: Sequence[str] = ("text_encoder",)) -> ModelFacts:
    """Facts from the config files. Raises UsageError when a part is missing, damaged or of another kind."""
    unet = read_config(folder, "unet/config.json", ("in_channels", "sample_size", "block_out_channels"))
    channels, downscale = vae_facts(folder)
    schedule = read_noise_schedule(folder)
    tokens = min(caption_tokens(folder, name) for name in text_encoders)
    check_components(folder, ("unet", "vae", *text_encoders))
    _refuse_more_than_text(folder, unet, channels)
    unet_levels = levels(folder / "unet", unet)
    side = whole_number(folder / "unet/config.json", unet, "sample_size", 1, LARGEST_SIDE)
    return ModelFacts(
        path=folder,
        family=family,
        resolution=side * downscale,
        latent_channels=channels,
        downscale=downscale,
        pixel_step=downscale * 2 ** (unet_levels - 1),
        prediction=schedule.prediction,
        caption_tokens=tokens,
        distilled_from="the model that it was made from" if is_few_step(folder) else "",
    )


def is_sd2(folder: Path) -> bool:
    """Whether a U-Net reads the text of Stable Diffusion 2.x."""
    return bool(read_config(folder, "unet/config.json").get("cross_attention_dim") == SD2_TEXT_WIDTH)


def _refuse_more_than_text(folder: Path, unet: Mapping[str, Any], channels: int) -> None:
    """Raise UsageError for a U-Net that reads other latents than its VAE makes, or more than noise and text."""
    reads = unet["in_channels"]
    if reads == unet.get("out_channels", 4) != channels:
        message = f"{folder}: the U-Net takes {reads} latent channels, and the VAE makes {channels}."
        raise UsageError(Problem("model_config_invalid", message, "Use the VAE that the model came with."))
    if reads != channels:
        message = (
            f"{folder} is a model for inpainting, depth or editing ({reads} input channels in place of {channels})."
        )
        raise UsageError(
            Problem("model_unsupported", message, "Use the text-to-image base model that it was made from.")
        )
    unknown = [key for key in MORE_INPUTS if unet.get(key) is not None]
    if unet.get("addition_embed_type") not in (None, "text_time"):
        unknown.append("addition_embed_type")
    if unknown:
        message = (
            f"{folder}: the U-Net has inputs besides noise and text ({unknown[0]} is {str(unet[unknown[0]])[:40]!r})."
        )
        raise UsageError(
            Problem("model_unsupported", message, "Use the text-to-image base model that it was made from.")
        )


def refuse_other_texts(folder: Path, names: Sequence[str] = ("text_encoder",)) -> None:
    """Raise UsageError where the text encoders' width is not the U-Net's text width."""
    widths = [read_config(folder, f"{name}/config.json").get("hidden_size") for name in names]
    reads = read_config(folder, "unet/config.json").get("cross_attention_dim")
    if isinstance(reads, int) and reads != sum(width for width in widths if isinstance(width, int)):
        provided = " + ".join(map(str, widths))
        message = f"{folder}: the U-Net takes text {reads} wide, the text encoders give {provided}."
        raise UsageError(Problem("model_config_invalid", message, "Use the text encoders that the model came with."))


def caption_tokens(folder: Path, text_encoder: str) -> int:
    """The longest caption in tokens, start and end among them: what tokenizer and text encoder both take."""
    encoder = read_config(folder, f"{text_encoder}/config.json")
    tokenizer = read_config(folder, f"{tokenizer_of(text_encoder)}/tokenizer_config.json")
    # A tokenizer without a limit of its own has no value here, or 1e30.
    limits = (tokenizer.get("model_max_length"), encoder.get("max_position_embeddings"))
    tokens = min(CLIP_TOKENS if not isinstance(limit, int | float) else limit for limit in limits)
    if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
        message = f"{folder}: captions of {text_encoder} would have {tokens:.6g} tokens, must be {LEAST_TOKENS} to {MOST_TOKENS}."
        raise UsageError(Problem("captions_too_long", message, "Copy or download the model again."))
    return int(tokens)


def load_unet(folder: Path, dtype: torch.dtype, device: torch.device, narrow: Narrow | None = None) -> nn.Module:
    """The U-Net, frozen, on the device."""
    from diffusers import UNet2DConditionModel

    return cast("nn.Module", load_frozen(UNet2DConditionModel, folder / "unet", dtype, device, narrow))


def load_tokenizer(folder: Path, text_encoder: str) -> Any:
    from transformers import CLIPTokenizer

    tokenizer = load_tokenizer_folder(CLIPTokenizer, folder / tokenizer_of(text_encoder))
    tokenizer.model_max_length = caption_tokens(folder, text_encoder)
    return tokenizer


def make_denoiser(config: Mapping[str, Any]) -> nn.Module:
    """A U-Net with random weights, on torch's current default device."""
    from diffusers import UNet2DConditionModel

    return cast("nn.Module", UNet2DConditionModel.from_config(dict(config)))


def thin(config: Mapping[str, Any]) -> dict[str, Any]:
    """A fifth of the width, with heads of the same size."""

    def fifth(value: Any) -> Any:
        return [fifth(each) for each in value] if isinstance(value, list) else value // THINNER

    thinned = dict(config)
    thinned["block_out_channels"] = fifth(config["block_out_channels"])
    if isinstance(config.get("attention_head_dim"), list):  # which holds numbers of heads
        thinned["attention_head_dim"] = fifth(config["attention_head_dim"])
    return thinned
