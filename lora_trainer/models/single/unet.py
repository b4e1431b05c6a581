"""U-Nets of the first layout: one list of numbered blocks down and one up, in place of levels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.tensorfile import METADATA
from lora_trainer.models.published import public_architecture
from lora_trainer.models.single.stored import USE_BASE, Part, SingleFile, Stored, refuse_unknown, renamed

MARK = "input_blocks.0.0.weight"
CLASSES = "label_emb.0.0.weight"  # of U-Nets that read sizes, or classes
HEAD = 64  # channels, where the family's published model has not one number of heads for all levels
PREDICTION = "modelspec.prediction_type"
UNUSUAL_CHANNELS = {5: "a depth model", 7: "an upscaler", 8: "a model of instructions", 9: "an inpainting model"}
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


def text_layer(stored: Stored) -> str:
    """A tensor whose columns are as many as the text is wide."""
    return next((name for name in stored.shapes if name.endswith("attn2.to_k.weight")), "attn2.to_k.weight")


def reads_text_of(stored: Stored, width: int) -> bool:
    """Whether the text that the U-Net reads is so wide."""
    return stored.shapes.get(text_layer(stored), (0,))[-1] == width


def read_unet(found: SingleFile, spreads: Callable[[SingleFile], bool] = lambda found: False) -> SingleFile:
    """The checkpoint with its prediction type: by a key, by its metadata, else by its weights where it `spreads`.

    Raises UsageError for U-Nets that read more than noisy latents and text, and for other noise schedules.
    """
    stored, file = found.denoiser, found.file
    if any(".time_stack." in name or "motion_modules" in name for name in stored.shapes):
        raise UsageError(Problem("model_unsupported", f"{file} makes videos.", USE_BASE))
    channels = stored.side(MARK, 1)
    if channels in UNUSUAL_CHANNELS:
        message = f"{file} is {UNUSUAL_CHANNELS[channels]}: {channels} input channels in place of 4."
        raise UsageError(Problem("model_unsupported", message, "Use the base model that it was made from."))
    stored.side(text_layer(stored), 1)
    for key in ("edm_mean", "edm_vpred.sigma_max"):
        if key in found.header:
            message = f"{file} has a noise schedule that is not supported ({key})."
            raise UsageError(Problem("scheduler_unsupported", message, USE_BASE))
    prediction = str((found.header.get(METADATA) or {}).get(PREDICTION, ""))
    shown_by = {
        "its key v_pred": "v_pred" in found.header,
        f"its metadata, {PREDICTION} = {prediction}": prediction.lower() in ("v", "v_prediction", "v-prediction"),
        "its weights": prediction == "" and spreads(found),
    }
    velocity = next((by for by, is_shown in shown_by.items() if is_shown), "")
    zero_terminal = bool(velocity) and "ztsnr" in found.header
    return replace(
        found,
        prediction="v_prediction" if velocity else "epsilon",
        prediction_by=velocity + (" and its key ztsnr" if zero_terminal else ""),
        zero_terminal=zero_terminal,
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
    linear = len(stored.shapes.get("middle_block.1.proj_in.weight", ())) == 2
    config = dict(public_architecture(family).denoiser)
    heads = config["attention_head_dim"]
    config |= {
        "_class_name": "UNet2DConditionModel",
        "in_channels": stored.side(MARK, 1),
        "out_channels": stored.side("out.2.weight", 0),
        "block_out_channels": widths,
        "layers_per_block": len(down[0]),
        "cross_attention_dim": stored.side(text_layer(stored), 1),
        "use_linear_projection": linear,
        "attention_head_dim": heads if isinstance(heads, int) else [width // HEAD for width in widths],
        "down_block_types": ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths],
        "up_block_types": ["CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in rising],
    }
    if "transformer_layers_per_block" in config:  # which the middle takes the last of
        config["transformer_layers_per_block"] = [depth or 1 for depth in depths[:-1]] + [depths[-1] or deepest]
    if CLASSES in stored.shapes:
        config["projection_class_embeddings_input_dim"] = stored.side(CLASSES, 1)
    return config
