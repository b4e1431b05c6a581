"""The model card of the built-in base, written from its files and its measured figures."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from builtin_base.drawing import COLORS, SHAPES, TEMPLATES
from builtin_base.named import TEMPLATES as NAMED_TEMPLATES

PARTS = {
    "vae": "autoencoder (AutoencoderKL, factor 8, 16 channels)",
    "unet": "denoiser (UNet2DConditionModel, attention on the lower of two levels)",
    "text_encoder": "text encoder (CLIPTextModel)",
}
CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
tags: [stable-diffusion, miniature, testing]
---

# The built-in base

Stable Diffusion 1.5's architecture in miniature, so that training a LoRA can be shown, tested and measured without a
download and without a GPU. Same classes, same folder layout, same noise schedule (epsilon prediction, scaled-linear,
1000 steps); images of 128 × 128 pixels, latents of 16 × 16 × 16. It is no smaller copy of Stable Diffusion's weights:
it was trained from nothing. It is a toy: real images need a real model.

| part | parameters | file |
|---|---|---|
{parts}

## What it draws
One shape on a plain background: {shapes}; in {colors}. And about 1,550 things by name, as emoji show them: "a strawberry
on a blue background", "an icon of a robot in front of white". Captions as it learned them:

{templates}

It knows nothing else. What a new word means is left to a LoRA.

## What it was trained on
- Shapes that `scripts/builtin_base/drawing.py` draws.
- Microsoft's Fluent Emoji (MIT, npm `@lobehub/fluent-emoji-3d`) with the names of `emojibase-data` (MIT). Without 40 animals,
  which are kept for judging, and without skin tones and flags.
- The autoencoder alone: Open Clip Art Library (public domain, Debian's `openclipart-svg`), and sketches, paper and busy
  backgrounds that `scripts/builtin_base/train_vae.py` draws.

None of these images is in the repository; `scripts/builtin_base/icons.py` installs them by name.

## How it was trained
`train_vae.py`: {vae_how}. `train.py`: {unet_how}. Both by Muon and AdamW, exponential averages kept, on two CPU cores with
bf16 units. Stored in half precision.

## Measured
Shapes, by `judge.py`, a program that looks at pixels only. The {prompts} prompts were fixed before training; the seeds are
0 to {last_seed}, none selected; DDIM, {steps} steps, guidance {guidance:g}.

| | shape | color | background | all three |
|---|---|---|---|---|
{figures}

Names, by `named.py`: {names}

Peak signal-to-noise ratio of the autoencoder at 128 pixels, on images that it never saw: {psnr}.

## Limits
Captions are read up to 77 tokens. A word that is not in a caption above is spelt in pieces; letters outside ASCII are
unknown to it. Sizes other than 128 × 128, 160 × 96 and 96 × 160 were never seen in training.
"""


def parameters(file: Path) -> int:
    """The number of weights in a safetensors file, from its header."""
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            count = 1
            for side in entry["shape"]:
                count *= side
            total += count
    return total


def card(
    base: Path, figures: dict[str, dict[str, float]], words: dict[str, str], prompts: int, steps: int, guidance: float
) -> str:
    """The card's text.

    `figures` are shares by what was judged, as `judge.shares` gives them; `words` are what the card says of `psnr`,
    `names`, `vae_how` and `unet_how`.
    """
    rows = []
    for part, what in PARTS.items():
        file = next((base / part).glob("*.safetensors"))
        rows.append(f"| {what} | {parameters(file) / 1e6:.2f} M | {file.stat().st_size / 1e6:.1f} MB |")
    measured = [
        f"| {title} | " + " | ".join(f"{100 * share:.1f} %" for share in found.values()) + " |"
        for title, found in figures.items()
    ]
    return CARD.format(
        parts="\n".join(rows),
        shapes=", ".join(SHAPES),
        colors=", ".join(COLORS),
        templates="\n".join(f"- {template}" for template in (*TEMPLATES, *NAMED_TEMPLATES)),
        prompts=prompts,
        last_seed=prompts - 1,
        steps=steps,
        guidance=guidance,
        figures="\n".join(measured),
        **words,
    )
