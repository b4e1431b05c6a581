"""VAEs of the first layout, in a checkpoint or a file of their own; those with diffusers' names as well."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lora_trainer.models.single.stored import Part, Stored, renamed

ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
LINEAR = tuple(f".{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0", "query", "key", "value", "proj_attn"))
WITHIN = {
    "encoder.quant_conv.": "quant_conv.",
    "decoder.post_quant_conv.": "post_quant_conv.",
}  # in FLUX.2's first code
OWN = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
STATISTICS = "bn."  # of FLUX.2's latents
MIDDLE = re.compile(r"(encoder|decoder)\.mid\.(?:block_([12])|attn_1)\.(.+)")
LEVEL = re.compile(r"(encoder|decoder)\.(down|up)\.(\d+)\.(?:block\.(\d+)|(?:down|up)sample)\.(.+)")
ENDS = re.compile(r"(?:(encoder|decoder)\.(conv_in|conv_out|norm_out)|((?:post_)?quant_conv))\.(weight|bias)")


def vae_part(stored: Stored, published: Mapping[str, Any]) -> Part:
    """Config and places of a VAE: a `published` one's config, with its form as the file has it."""
    own = "encoder.conv_norm_out.weight" in stored.shapes
    levels = stored.count("encoder.down_blocks." if own else "encoder.down.")

    def rename(name: str) -> str | None:
        if own or name.startswith(STATISTICS):
            return name if name.startswith((*OWN, STATISTICS)) else None
        for within, outside in WITHIN.items():
            name = name.replace(within, outside) if name.startswith(within) else name
        if matched := MIDDLE.fullmatch(name):
            side, block, leaf = matched.groups()
            if block:
                return f"{side}.mid_block.resnets.{int(block) - 1}.{_resnet(leaf)}"
            module, _, kind = leaf.rpartition(".")
            return f"{side}.mid_block.attentions.0.{ATTENTION.get(module, module)}.{kind}"
        if matched := LEVEL.fullmatch(name):
            side, way, number, block, leaf = matched.groups()
            level = int(number) if way == "down" else levels - 1 - int(number)  # ways up are counted from the image
            if block:
                return f"{side}.{way}_blocks.{level}.resnets.{block}.{_resnet(leaf)}"
            return f"{side}.{way}_blocks.{level}.{way}samplers.0.{leaf}"
        if matched := ENDS.fullmatch(name):
            side, end, conv, leaf = matched.groups()
            return f"{conv}.{leaf}" if conv else f"{side}.{end.replace('norm_out', 'conv_norm_out')}.{leaf}"
        return None

    first = "encoder.down_blocks.{}.resnets.0.conv1.weight" if own else "encoder.down.{}.block.0.conv1.weight"
    config = {
        **published,
        "_class_name": published.get("_class_name", "AutoencoderKL"),
        "block_out_channels": [stored.side(first.format(level), 0) for level in range(levels)],
        "layers_per_block": stored.count("encoder.down_blocks.0.resnets." if own else "encoder.down.0.block."),
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "latent_channels": stored.side("decoder.conv_in.weight", 1),
        "use_quant_conv": any(name.endswith("quant_conv.weight") and "post" not in name for name in stored.shapes),
        "use_post_quant_conv": any(name.endswith("post_quant_conv.weight") for name in stored.shapes),
    }
    return Part(config, renamed(stored, rename, squeezed=LINEAR))


def _resnet(leaf: str) -> str:
    return leaf.replace("nin_shortcut", "conv_shortcut")
