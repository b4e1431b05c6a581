"""FLUX.1: a transformer of 12 billion weights on latents packed by two (arXiv:2403.03206 describes its blocks).

Planned and measured from its form; it cannot be trained from files yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.models.family import PLAIN, TextOptions, planned_family

if TYPE_CHECKING:
    from torch import Tensor, nn

T5_TOKENS = 512
TIMESTEPS = 1000
GUIDANCE = 1.0  # what a distilled model is told while it is trained: as if it were not guided
THINNER_HEADS, FEWER_LAYERS = 12, 6
THINNESS = "a twelfth of its width and a sixth of its layers"
STREAMS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
ATTENTION = tuple(f"*transformer_blocks.*.attn.{name}" for name in STREAMS)
FEED_FORWARD = (
    *(f"transformer_blocks.*.{name}" for name in ("net.0.proj", "net.2")),
    *(f"single_transformer_blocks.*.{name}" for name in ("proj_mlp", "proj_out")),
)


def make_denoiser(config: Mapping[str, Any]) -> nn.Module:
    """The transformer with random weights, on torch's current default device."""
    from diffusers import FluxTransformer2DModel

    return cast("nn.Module", FluxTransformer2DModel.from_config(dict(config)))


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, 512, 4096] and cond["pooled"] [B, 768].

    Four neighbouring places of the latents are one token; the position of each is its row and column.
    """
    import torch

    samples, channels, height, width = noisy.shape
    rows, columns = height // 2, width // 2
    packed = noisy.view(samples, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    places = torch.zeros(rows, columns, 3, device=noisy.device)
    places[..., 1] += torch.arange(rows, device=noisy.device)[:, None]
    places[..., 2] += torch.arange(columns, device=noisy.device)
    embeds = cond["embeds"]
    guided = getattr(denoiser.config, "guidance_embeds", False)
    velocity = denoiser(
        packed,
        embeds,
        cond["pooled"],
        (t + 1) / TIMESTEPS,
        places.flatten(0, 1),
        torch.zeros(embeds.shape[1], 3, device=noisy.device),
        torch.full((samples,), GUIDANCE, device=noisy.device) if guided else None,
        return_dict=False,
    )[0]
    unpacked = velocity.view(samples, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return cast("Tensor", unpacked.reshape(noisy.shape))


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    return {
        "embeds": (text.t5_tokens or T5_TOKENS, int(config["joint_attention_dim"])),
        "pooled": (int(config["pooled_projection_dim"]),),
    }


def thin(config: Mapping[str, Any]) -> dict[str, Any]:
    """A twelfth of the heads, each of the same size, and a sixth of the layers of each kind."""
    return {
        **config,
        "num_attention_heads": max(1, int(config["num_attention_heads"]) // THINNER_HEADS),
        **{kind: max(1, int(config[kind]) // FEWER_LAYERS) for kind in ("num_layers", "num_single_layers")},
    }


FAMILY = planned_family(
    "flux",
    predict=predict,
    lora_targets={"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)},
    make_denoiser=make_denoiser,
    cond_shapes=cond_shapes,
    thin=thin,
    thinness=THINNESS,
)
