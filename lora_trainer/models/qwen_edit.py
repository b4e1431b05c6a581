"""Prompts of Qwen-Image's edit models: Qwen2.5-VL sees the control images, which stand before the caption.

`Qwen-Image-Edit` sees one image of about a million pixels, `Edit-Plus` (2509, 2511) up to three of 384² pixels, each with its
number. The tokens of an image have the positions that the encoder was trained with, by row and column (arXiv:2502.13923,
2.1.2). diffusers 0.42 with transformers 5 leaves them out of its edit pipelines (its issue 14194), and all tokens
are in a row there: other programs, and later versions, agree with this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.models.frozen import load_tokenizer_folder
from lora_trainer.models.qwen_text import AFTER
from lora_trainer.models.weighting import padded_tokens, tokens_of

if TYPE_CHECKING:
    from torch import Tensor

    from lora_trainer.core.conditioning import EditCaption
    from lora_trainer.models.family import TextParts

READER = "processor"  # its folder
SETTINGS = f"{READER}/preprocessor_config.json"
BEFORE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), "
    "then explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate.<|im_end|>\n"
    "<|im_start|>user\n"
)
CUT = 64  # tokens of the system message, whose states are not read
START, PLACE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
STEP = 32  # of the sides of an image that the encoder sees, pixels
TOKEN = 28  # pixels along a side that become one token


@dataclass(frozen=True)
class ControlReader:
    """How control images reach the text encoder: each with `area` pixels, behind its number where they are `numbered`.

    `image_processor` is transformers' image processor for Qwen2-VL on PIL images.
    """

    image_processor: Any
    area: int
    numbered: bool

    def prepare(self, control: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels [3, H, W] in [-1, 1] -> its patches [n, 1176], and the frames, rows and columns of them [1, 3]."""
        from PIL import Image

        pixels = ((control.float() + 1.0) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
        image = Image.fromarray(pixels)
        ratio = image.width / image.height
        width = math.sqrt(self.area * ratio)  # then both sides as diffusers' pipelines round them
        size = round(width / STEP) * STEP, round(width / ratio / STEP) * STEP
        resized = image.resize(size, Image.Resampling.LANCZOS)
        read = self.image_processor(images=[resized], return_tensors="pt")
        return read["pixel_values"], read["image_grid_thw"]

    def tokens(self, grid: Tensor) -> int:
        """How many tokens an image of such a grid becomes."""
        return int(grid.prod()) // int(self.image_processor.merge_size) ** 2


def load_reader(folder: Path, area: int, *, numbered: bool) -> ControlReader:
    """The reader of an edit model's folder. Raises UsageError where its settings cannot be used.

    The image processor is always that on PIL images, whether torchvision is there or not, so that numbers are the same.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return ControlReader(load_tokenizer_folder(Qwen2VLImageProcessorPil, folder / READER), area, numbered)


def encode_with_controls(
    parts: TextParts, encoder: str, captions: Sequence[EditCaption], size: int
) -> tuple[Tensor, Tensor]:
    """States [B, n + size, D] of B captions behind their control images' n tokens, zeros behind each caption; and where
    there is nothing [B, n + size], bool.

    The images of all captions become equally many tokens. `size` counts the tokens of the text, the template's among them.
    """
    import torch

    reader, tokenizer = parts.image_processor, parts.tokenizers[encoder]
    place = tokenizer.convert_tokens_to_ids(PLACE)
    prepared = [[reader.prepare(control) for control in caption.controls] for caption in captions]
    counts = [[reader.tokens(grid) for _, grid in own] for own in prepared]
    length = CUT + size + max(map(sum, counts))
    rows = [
        _row(tokenizer, caption, own, numbered=reader.numbered)[:length]
        for caption, own in zip(captions, counts, strict=True)
    ]
    tokens, mask = padded_tokens(tokenizer, [caption.text for caption in captions], rows, length, parts.device, CUT)
    seen = [image for own in prepared for image in own]
    images: dict[str, Tensor] = {}
    if seen:
        images = {
            "pixel_values": torch.cat([patches for patches, _ in seen]).to(parts.device),
            "image_grid_thw": torch.cat([grid for _, grid in seen]).to(parts.device),
            "mm_token_type_ids": (tokens.ids == place).int(),  # without them positions would ignore rows and columns
        }
    output = parts.encoders[encoder](input_ids=tokens.ids, attention_mask=mask, use_cache=False, **images)
    states = tokens.weigh(output.last_hidden_state[:, CUT:])
    return states.masked_fill(~mask[:, CUT:, None], 0.0), torch.logical_not(mask[:, CUT:])


def _row(tokenizer: Any, caption: EditCaption, counts: Sequence[int], *, numbered: bool) -> list[tuple[int, float]]:
    """The tokens of one prompt and their weights; `counts` are the tokens of each of its images."""
    after = f"{caption.text}{AFTER}" if isinstance(caption.text, str) else (*caption.text, (AFTER, 1.0))
    if not counts:
        return tokens_of(tokenizer, f"{BEFORE}{after}" if isinstance(after, str) else ((BEFORE, 1.0), *after))
    named = (f"Picture {number}: " if numbered else "" for number in range(1, len(counts) + 1))
    images, place = "".join(f"{name}{START}{PLACE}{END}" for name in named), tokenizer.convert_tokens_to_ids(PLACE)
    left, row = iter(counts), list[tuple[int, float]]()
    for token, weight in tokens_of(tokenizer, f"{BEFORE}{images}"):
        row += [(token, weight)] * (next(left) if token == place else 1)
    return row + [each for each in tokens_of(tokenizer, after) if each[0] != place]
