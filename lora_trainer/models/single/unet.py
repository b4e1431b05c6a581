"""U-Nets of the first layout: one list of numbered blocks down and one up, in place of levels."""

from __future__ import annotations

import re
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.stored import Part, Stored, refuse_unknown, renamed

HEADS = 8  # of Stable Diffusion 1.x; later models have heads of 64 channels
HEAD = 64
RENAMED = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
    "op": "conv",
}
ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
    "middle_block.0": "mid_block.resnets.0",
    "middle_block.1": "mid_block.attentions.0",
    "middle_block.2": "mid_block.resnets.1",
}
BLOCK = re.compile(
    r"((?:input|output)_blocks\.\d+\.\d+|middle_block\.\d|label_emb\.0\.\d|time_embed\.\d|out\.\d)\.(.+)"
)


def unet_part(stored: Stored, family: str) -> Part:
    """Config and places of a U-Net. Raises UsageError for tensors that no U-Net of these families has."""
    blocks, down, up = _blocks(stored)

    def rename(name: str) -> str | None:
        matched = BLOCK.fullmatch(name)
        if matched is None or matched[1] not in blocks:
            return None
        module, _, leaf = matched[2].rpartition(".")
        if not module:
            return f"{blocks[matched[1]]}.{leaf}"
        return f"{blocks[matched[1]]}.{RENAMED.get(module, module)}.{leaf}"

    _refuse_uneven(stored, down, up)
    if unknown := [name for name in stored.shapes if rename(name) is None]:
        refuse_unknown(stored, unknown)
    return Part(_config(stored, family, down, up), renamed(stored, rename))


def _blocks(stored: Stored) -> tuple[dict[str, str], list[list[int]], list[list[int]]]:
    """Diffusers' name of each module, and for each level the numbers of its blocks, on the way down and up."""
    blocks = dict(ENDS)
    down: list[list[int]] = [[]]
    for number in range(1, stored.count("input_blocks.")):
        before = f"input_blocks.{number}"
        level, layer = len(down) - 1, len(down[-1])
        if f"{before}.0.op.weight" in stored.shapes:
            blocks[f"{before}.0"] = f"down_blocks.{level}.downsamplers.0"
            down.append([])
            continue
        blocks[f"{before}.0"] = f"down_blocks.{level}.resnets.{layer}"
        blocks[f"{before}.1"] = f"down_blocks.{level}.attentions.{layer}"
        down[-1].append(number)
    up: list[list[int]] = [[]]
    for number in range(stored.count("output_blocks.")):
        before = f"output_blocks.{number}"
        level, layer = len(up) - 1, len(up[-1])
        blocks[f"{before}.0"] = f"up_blocks.{level}.resnets.{layer}"
        up[-1].append(number)
        for place in (1, 2):
            if f"{before}.{place}.conv.weight" in stored.shapes:
                blocks[f"{before}.{place}"] = f"up_blocks.{level}.upsamplers.0"
                up.append([])
            else:
                blocks[f"{before}.{place}"] = f"up_blocks.{level}.attentions.{layer}"
    return blocks, down, up


def _refuse_uneven(stored: Stored, down: list[list[int]], up: list[list[int]]) -> None:
    """Raise UsageError where levels do not mirror each other, or blocks of one level are not alike.

    This includes U-Nets with removed blocks: SSD-1B, Vega, KOALA 700M.
    """
    falling, rising = (
        [[stored.count(f"{way}_blocks.{number}.1.transformer_blocks.") for number in numbers] for numbers in side]
        for way, side in (("input", down), ("output", up))
    )
    layers, deepest = len(falling[0]), stored.count("middle_block.1.transformer_blocks.")
    depths = [level[0] if level else 0 for level in falling]
    even = [[depth] * layers for depth in depths], [[depth] * (layers + 1) for depth in reversed(depths)]
    if (falling, rising) != even or deepest != (depths[-1] or max(1, deepest)):
        message = f"{stored.file} is a U-Net with removed blocks, as in SSD-1B or Vega, which cannot be trained."
        raise UsageError(Problem("model_unsupported", message, "Use the base model that it was made from."))


def _config(stored: Stored, family: str, down: list[list[int]], up: list[list[int]]) -> dict[str, Any]:
    """The family's published config with widths, depths and attention as the file has them."""
    widths = [stored.side(f"input_blocks.{numbers[0]}.0.out_layers.3.weight", 0) for numbers in down if numbers]
    depths = [stored.count(f"input_blocks.{numbers[0]}.1.transformer_blocks.") for numbers in down if numbers]
    rising = [stored.count(f"output_blocks.{numbers[0]}.1.transformer_blocks.") for numbers in up if numbers]
    deepest = stored.count("middle_block.1.transformer_blocks.")
    reads = next((name for name in stored.shapes if name.endswith("attn2.to_k.weight")), "attn2.to_k.weight")
    linear = len(stored.shapes.get("middle_block.1.proj_in.weight", ())) == 2
    config = dict(public_architecture(family).denoiser)
    config |= {
        "_class_name": "UNet2DConditionModel",
        "in_channels": stored.side("input_blocks.0.0.weight", 1),
        "out_channels": stored.side("out.2.weight", 0),
        "block_out_channels": widths,
        "layers_per_block": len(down[0]),
        "cross_attention_dim": stored.side(reads, 1),
        "use_linear_projection": linear,
        "attention_head_dim": HEADS if family == "sd15" else [width // HEAD for width in widths],
        "down_block_types": ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths],
        "up_block_types": ["CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in rising],
    }
    if "transformer_layers_per_block" in config:  # which the middle takes the last of
        config["transformer_layers_per_block"] = [depth or 1 for depth in depths[:-1]] + [depths[-1] or deepest]
    if "label_emb.0.0.weight" in stored.shapes:
        config["projection_class_embeddings_input_dim"] = stored.side("label_emb.0.0.weight", 1)
    return config
