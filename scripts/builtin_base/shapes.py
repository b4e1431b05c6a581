"""The shapes of the miniature bases: SD1.5's, which is the built-in one, SDXL's, and a flow-matching transformer of SD3.5.

They share the autoencoder and the tokenizer, and draw the same 128-pixel images. `train.py` trains them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from builtin_base import architecture

TOKENS = 32  # of a caption: a quarter of what CLIP reads costs a quarter of the time, and drawn captions have 12
POOLED = 64  # width of an encoder's projected summary
SIZE_WIDTH = 32  # of the embedding of each of SDXL's six sizes
MIN_SNR_GAMMA = 5.0
T5_TOKENS = 256  # zeros in the place of SD3's third encoder, which is optional and left out here


@dataclass(frozen=True)
class Batch:
    """`latents` [B, C, h, w], scaled; `ids` [B, tokens]; `sizes` [B, 6]: original height, width, crop top, left, target
    height, width; `noise` like the latents; `draws` [B], standard normal, for the timesteps."""

    latents: Tensor
    ids: Tensor
    sizes: Tensor
    noise: Tensor
    draws: Tensor


@dataclass(frozen=True)
class Shape:
    """`make` takes the tokenizer and returns the trained parts by component; `losses` takes them and a batch, and
    returns [B]; `assemble` takes them, an autoencoder and a tokenizer, and returns the pipeline."""

    make: Callable[[CLIPTokenizer], nn.ModuleDict]
    losses: Callable[[nn.ModuleDict, Batch], Tensor]
    assemble: Callable[[nn.ModuleDict, AutoencoderKL, CLIPTokenizer], DiffusionPipeline]
    tokens: int = TOKENS  # of a caption
    sized: bool = False  # whether it reads the six sizes


def make_sd15(tokenizer: CLIPTokenizer) -> nn.ModuleDict:
    return nn.ModuleDict({"unet": architecture.make_unet(), "text_encoder": architecture.make_text_encoder(tokenizer)})


def min_snr_losses(predicted: Tensor, noise: Tensor, alphas: Tensor) -> Tensor:
    """Squared errors of epsilon [B], weighted by min(SNR, 5) / SNR (arXiv:2303.09556, eq. 5)."""
    snr = alphas / (1.0 - alphas)
    return (predicted.float() - noise).square().mean((1, 2, 3)) * snr.clamp(max=MIN_SNR_GAMMA) / snr


def uniform_timesteps(draws: Tensor) -> Tensor:
    return (1000 * torch.special.ndtr(draws)).long().clamp(max=999)


def sd15_losses(parts: nn.ModuleDict, batch: Batch) -> Tensor:
    scheduler = architecture.make_scheduler()
    t = uniform_timesteps(batch.draws)
    noisy = scheduler.add_noise(batch.latents, batch.noise, t)
    predicted = parts["unet"](noisy, t, parts["text_encoder"](batch.ids)[0]).sample
    return min_snr_losses(predicted, batch.noise, scheduler.alphas_cumprod[t])


def assemble_sd15(parts: nn.ModuleDict, vae: AutoencoderKL, tokenizer: CLIPTokenizer) -> DiffusionPipeline:
    return StableDiffusionPipeline(
        vae=vae,
        **halved(parts),
        tokenizer=tokenizer,
        scheduler=architecture.make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def encoder_config(tokenizer: CLIPTokenizer, **changes: object) -> CLIPTextConfig:
    """The config of the built-in base's text encoder, for shorter captions and with `changes`."""
    config = architecture.make_text_encoder(tokenizer).config.to_dict()
    return CLIPTextConfig(**{**config, "max_position_embeddings": TOKENS, **changes})


def make_projected_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """With a projected summary and, as in SDXL's second one, GELU."""
    return CLIPTextModelWithProjection(encoder_config(tokenizer, projection_dim=POOLED, hidden_act="gelu"))


def encode(encoder: nn.Module, ids: Tensor) -> Any:
    """An encoder's output; SDXL and SD3 read its last state but one."""
    return encoder(ids, output_hidden_states=True)


def make_sdxl(tokenizer: CLIPTokenizer) -> nn.ModuleDict:
    unet = UNet2DConditionModel(
        sample_size=architecture.RESOLUTION // 8,
        in_channels=architecture.LATENT_CHANNELS,
        out_channels=architecture.LATENT_CHANNELS,
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1),
        cross_attention_dim=2 * architecture.TEXT_WIDTH,
        attention_head_dim=(4, 8),  # numbers of heads
        norm_num_groups=8,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=SIZE_WIDTH,
        projection_class_embeddings_input_dim=6 * SIZE_WIDTH + POOLED,
    )
    encoders = CLIPTextModel(encoder_config(tokenizer)), make_projected_encoder(tokenizer)
    return nn.ModuleDict({"unet": unet, "text_encoder": encoders[0], "text_encoder_2": encoders[1]})


def sdxl_losses(parts: nn.ModuleDict, batch: Batch) -> Tensor:
    scheduler = architecture.make_scheduler()
    t = uniform_timesteps(batch.draws)
    outputs = [encode(parts[name], batch.ids) for name in ("text_encoder", "text_encoder_2")]
    context = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    added = {"text_embeds": outputs[1].text_embeds, "time_ids": batch.sizes}
    noisy = scheduler.add_noise(batch.latents, batch.noise, t)
    predicted = parts["unet"](noisy, t, context, added_cond_kwargs=added).sample
    return min_snr_losses(predicted, batch.noise, scheduler.alphas_cumprod[t])


def assemble_sdxl(parts: nn.ModuleDict, vae: AutoencoderKL, tokenizer: CLIPTokenizer) -> DiffusionPipeline:
    return StableDiffusionXLPipeline(
        vae=vae,
        **halved(parts),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        scheduler=architecture.make_scheduler(),
        force_zeros_for_empty_prompt=False,  # the empty caption was encoded
        add_watermarker=False,
    )


def make_flow(tokenizer: CLIPTokenizer) -> nn.ModuleDict:
    heads, head_width = 4, 32
    transformer = SD3Transformer2DModel(
        sample_size=architecture.RESOLUTION // 8,
        patch_size=2,
        in_channels=architecture.LATENT_CHANNELS,
        out_channels=architecture.LATENT_CHANNELS,
        num_layers=6,
        attention_head_dim=head_width,
        num_attention_heads=heads,
        caption_projection_dim=heads * head_width,
        joint_attention_dim=2 * architecture.TEXT_WIDTH,
        pooled_projection_dim=2 * POOLED,
        pos_embed_max_size=24,
        qk_norm="rms_norm",
    )
    encoders = {name: make_projected_encoder(tokenizer) for name in ("text_encoder", "text_encoder_2")}
    return nn.ModuleDict({"transformer": transformer, **encoders})


class Attention(TorchFunctionMode):
    """Attention in fp32, whose backward pass on a CPU is several times as fast as in bf16.

    `last` is how often the context's last token counts. SD3's transformer gives its text no positions: 256 zeros stay the
    same in every layer, and one with the logarithm of their number added to its logits attracts as much.
    """

    def __init__(self, last: int = 1) -> None:
        super().__init__()
        self.last = last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = (each if each.dtype == torch.float64 else each.float() for each in args)
        mask = (kwargs or {}).get("attn_mask")
        if self.last > 1:
            mask = key.new_zeros(1, 1, 1, key.shape[-2])
            mask[..., -1] = math.log(self.last)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        with torch.autocast(query.device.type, enabled=False):
            return func(query, key, value, **{**(kwargs or {}), "attn_mask": mask}).to(args[0].dtype)


def flow_prediction(parts: nn.ModuleDict, noisy: Tensor, ids: Tensor, timestep: Tensor) -> Tensor:
    """The velocity [B, C, h, w] at timesteps in (0, 1000]."""
    outputs = [encode(parts[name], ids) for name in ("text_encoder", "text_encoder_2")]
    context = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    context = torch.cat([context, context.new_zeros(len(ids), 1, context.shape[-1])], dim=1)
    pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
    with Attention(last=T5_TOKENS):
        return parts["transformer"](noisy, context, pooled, timestep).sample


def flow_losses(parts: nn.ModuleDict, batch: Batch) -> Tensor:
    """Squared errors of the velocity [B], times logit-normal (arXiv:2403.03206)."""
    sigma = torch.sigmoid(batch.draws)
    share = sigma[:, None, None, None]
    noisy = (1.0 - share) * batch.latents + share * batch.noise
    predicted = flow_prediction(parts, noisy, batch.ids, 1000.0 * sigma)
    return (predicted.float() - (batch.noise - batch.latents)).square().mean((1, 2, 3))


def assemble_flow(parts: nn.ModuleDict, vae: AutoencoderKL, tokenizer: CLIPTokenizer) -> DiffusionPipeline:
    vae.register_to_config(shift_factor=0.0)
    return StableDiffusion3Pipeline(
        vae=vae,
        **halved(parts),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
    )


def halved(parts: nn.ModuleDict) -> dict[str, nn.Module]:
    """Copies of the parts in half precision."""
    return {name: copy.deepcopy(part).eval().half() for name, part in parts.items()}


SHAPES = {
    "sd15": Shape(make_sd15, sd15_losses, assemble_sd15, tokens=77),
    "sdxl": Shape(make_sdxl, sdxl_losses, assemble_sdxl, sized=True),
    "flow": Shape(make_flow, flow_losses, assemble_flow),
}
