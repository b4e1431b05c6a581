"""Stable Diffusion 3.5: a transformer that reads pictures and text side by side (arXiv:2403.03206).

Planned and measured from its form; it cannot be trained from files yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.models.family import PLAIN, TextOptions, planned_family

if TYPE_CHECKING:
    from torch import Tensor, nn

CLIP_TOKENS, T5_TOKENS = 77, 256
# The stored table of positions is 384 patches wide, 0.84 GiB in fp32; no picture needs more than its middle.
LARGEST_SIDE = 128  # patches, of 16 pixels each
THINNER_HEADS, FEWER_LAYERS = 12, 6
THINNESS = "a twelfth of its width and a sixth of its layers"
STREAMS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
ATTENTION = tuple(f"transformer_blocks.*.attn*.{name}" for name in STREAMS)
FEED_FORWARD = tuple(f"transformer_blocks.*.{name}" for name in ("net.0.proj", "net.2"))


def make_denoiser(config: Mapping[str, Any]) -> nn.Module:
    """The transformer with random weights, on torch's current default device, its table of positions cropped."""
    from diffusers import SD3Transformer2DModel

    cropped = min(int(config["pos_embed_max_size"]), LARGEST_SIDE)
    return cast("nn.Module", SD3Transformer2DModel.from_config({**config, "pos_embed_max_size": cropped}))


def predict(denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor) -> Tensor:
    """The velocity [B, 16, h, w] at t [B] under cond["embeds"] [B, 333, 4096] and cond["pooled"] [B, 2048].

    Timestep t is the model's t + 1, a thousandth of it the share of noise.
    """
    return cast("Tensor", denoiser(noisy, cond["embeds"], cond["pooled"], t + 1, return_dict=False)[0])


def cond_shapes(config: Mapping[str, Any], text: TextOptions = PLAIN, /) -> dict[str, tuple[int, ...]]:
    return {
        "embeds": (CLIP_TOKENS * text.pieces + (text.t5_tokens or T5_TOKENS), int(config["joint_attention_dim"])),
        "pooled": (int(config["pooled_projection_dim"]),),
    }


def thin(config: Mapping[str, Any]) -> dict[str, Any]:
    """A twelfth of the heads, each of the same size, and a sixth of the layers of each kind."""
    heads = max(1, int(config["num_attention_heads"]) // THINNER_HEADS)
    width = heads * int(config["attention_head_dim"])
    dual = list(config["dual_attention_layers"])
    return {
        **config,
        "num_attention_heads": heads,
        "caption_projection_dim": width,
        "num_layers": max(1, int(config["num_layers"]) // FEWER_LAYERS),
        "dual_attention_layers": dual[: -(-len(dual) // FEWER_LAYERS)],
    }


FAMILY = planned_family(
    "sd3",
    predict=predict,
    lora_targets={"attention": ATTENTION, "attention+ff": (*ATTENTION, *FEED_FORWARD)},
    make_denoiser=make_denoiser,
    cond_shapes=cond_shapes,
    thin=thin,
    thinness=THINNESS,
)
