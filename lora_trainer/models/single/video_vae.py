"""The VAEs of Qwen-Image and of 2.1 in a file of their own or a checkpoint: by the names of Wan's first code, or by diffusers'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lora_trainer.models.autoencoder import RGBA, VIDEO
from lora_trainer.models.single.stored import Part, Stored, renamed

NORMS = ("encoder.head.0.gamma", "encoder.norm_out.gamma")  # of both namings; other VAEs have group norms
PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
OUTSIDE = {
    "conv1": "quant_conv",
    "conv2": "post_quant_conv",
    **{f"{side}.conv1": f"{side}.conv_in" for side in ("encoder", "decoder")},
    **{f"{side}.head.0": f"{side}.norm_out" for side in ("encoder", "decoder")},
    **{f"{side}.head.2": f"{side}.conv_out" for side in ("encoder", "decoder")},
}
IN_BLOCK = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
NUMBERED = re.compile(r"(encoder|decoder)\.(downsamples|upsamples|middle)\.(\d+)\.(.+)\.(weight|bias|gamma)")
IN_LEVEL = re.compile(
    r"(encoder\.down|decoder\.up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.+)\.(weight|bias|gamma)"
)
RESAMPLE = "resample.1.weight"


def is_video_vae(stored: Stored) -> bool:
    """Whether the file has such norms."""
    return any(name in stored.shapes for name in NORMS)


def video_vae_part(stored: Stored, published: Mapping[str, Any]) -> Part:
    """Config and places of the VAE: the `published` mean and deviation of each channel, and its form as the file has it."""
    ours = NORMS[1] in stored.shapes
    if any(
        name.startswith(("encoder.downsamples.0.downsamples.", "encoder.down_blocks.0.resnets."))
        for name in stored.shapes
    ):
        return _rgba_part(stored, published, ours=ours)
    first = next((n for n in range(len(stored.shapes)) if f"decoder.upsamples.{n}.{RESAMPLE}" in stored.shapes), 0)

    def rename(name: str) -> str | None:
        return (name if name.startswith(PARTS) else None) if ours else _renamed(name, first + 1)

    places = renamed(stored, rename)
    shapes = {new: stored.shapes[place.key.removeprefix(stored.prefix)] for new, place in places.items()}
    renamed_parts = Stored(stored.file, "", shapes)
    width = renamed_parts.side("encoder.conv_in.weight", 0)
    multiples, blocks, shrinks = [0], 0, []
    for number in range(renamed_parts.count("encoder.down_blocks.")):
        block = f"encoder.down_blocks.{number}"
        if f"{block}.{RESAMPLE}" in shapes:
            shrinks.append(f"{block}.time_conv.weight" in shapes)
            multiples.append(0)
        else:
            multiples[-1] = renamed_parts.side(f"{block}.conv2.weight", 0) // width
            blocks += len(multiples) == 1
    config = {
        **published,
        "_class_name": VIDEO,
        "base_dim": width,
        "z_dim": renamed_parts.side("decoder.conv_in.weight", 1),
        "dim_mult": multiples,
        "num_res_blocks": blocks,
        "temperal_downsample": shrinks,
        "attn_scales": [],
    }
    return Part(config, places)


def _rgba_part(stored: Stored, published: Mapping[str, Any], *, ours: bool) -> Part:
    """That of 2.1, each of whose levels is a block; ComfyUI's file has kernels over one frame, which loading leaves out."""

    def rename(name: str) -> str | None:
        if ours:
            return name if name.startswith(PARTS) else None
        matched = IN_LEVEL.fullmatch(name)
        if matched is None:
            return _renamed(name, 1)
        side, level, place, inner, leaf = matched.groups()
        within = (
            f"resnets.{place}.{IN_BLOCK[inner]}" if inner in IN_BLOCK else f"{side.partition('.')[2]}sampler.{inner}"
        )
        return f"{side}_blocks.{level}.{within}.{leaf}"

    places = renamed(stored, rename)
    parts = Stored(
        stored.file, "", {new: stored.shapes[each.key.removeprefix(stored.prefix)] for new, each in places.items()}
    )
    width, blocks = parts.side("encoder.conv_in.weight", 0), parts.count("encoder.down_blocks.0.resnets.")
    levels = [f"encoder.down_blocks.{number}" for number in range(parts.count("encoder.down_blocks."))]
    config = {
        **published,
        "_class_name": RGBA,
        "base_dim": width,
        "decoder_base_dim": parts.side("decoder.norm_out.gamma", 0),
        "z_dim": parts.side("decoder.conv_in.weight", 1),
        "dim_mult": [parts.side(f"{level}.resnets.{blocks - 1}.conv2.weight", 0) // width for level in levels],
        "num_res_blocks": blocks,
        "temperal_downsample": [f"{level}.downsampler.time_conv.weight" in parts.shapes for level in levels[:-1]],
        "in_channels": parts.side("encoder.conv_in.weight", 1),
        "out_channels": parts.side("decoder.conv_out.weight", 0),
        "attn_scales": [],
        "is_residual": True,
    }
    return Part(config, places)


def _renamed(name: str, of_level: int) -> str | None:
    """diffusers' name of a tensor of the first code; a level of its decoder has `of_level` numbered parts."""
    module, _, leaf = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{leaf}"
    matched = NUMBERED.fullmatch(name)
    if matched is None:
        return None
    side, kind, number, inner, leaf = matched.groups()
    if kind == "middle":
        return f"{side}.mid_block.{MIDDLE.get(number, number)}.{IN_BLOCK.get(inner, inner)}.{leaf}"
    if kind == "downsamples":
        return f"{side}.down_blocks.{number}.{IN_BLOCK.get(inner, inner)}.{leaf}"
    level, place = divmod(int(number), of_level)
    within = "upsamplers.0" if place == of_level - 1 and inner not in IN_BLOCK else f"resnets.{place}"
    return f"{side}.up_blocks.{level}.{within}.{IN_BLOCK.get(inner, inner)}.{leaf}"
