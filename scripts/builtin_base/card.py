"""The model card of the built-in base, written from its files and its measured figures."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from builtin_base.drawing import COLORS, SHAPES, TEMPLATES

PARTS = {
    "vae": "autoencoder (AutoencoderKL, factor 8, 4 channels)",
    "unet": "denoiser (UNet2DConditionModel, cross-attention on two levels)",
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
1000 steps); images of 128 × 128 pixels, latents of 4 × 16 × 16. It is no smaller copy of Stable Diffusion's weights:
it was trained from nothing.

| part | parameters | file |
|---|---|---|
{parts}

## What it draws
One shape on a plain background: {shapes}; in {colors}. Captions as it learned them:

{templates}

It knows nothing else. What a new word means is left to a LoRA.

## How it was trained
By `scripts/builtin_base/train.py`, on images that `scripts/builtin_base/drawing.py` draws on the way; no image or
text came from elsewhere. The autoencoder learned by L1 + squared error and a slight KL term, the denoiser and the text
encoder together by min-SNR-weighted epsilon loss with 10 % empty captions; their exponential average was kept. The
autoencoder took 4,200 steps of 16 images, the last 1,300 on its decoder alone; the denoiser 4,000 steps of 32, of a
cosine laid out for 5,000. On two CPU cores with bf16 units, not always idle, that was about 100 minutes. Stored in half
precision.

## Measured
By `scripts/builtin_base/judge.py`, a program that looks at pixels only. The {prompts} prompts were fixed before training;
the seeds are 0 to {last_seed}, none selected; DDIM, {steps} steps, guidance {guidance:g}.

| | shape | color | background | all three |
|---|---|---|---|---|
{figures}

The autoencoder's peak signal-to-noise ratio on 128 unseen images is {psnr:.1f} dB.

## Limits
Captions are read up to 77 tokens. A word that is not in the list above is spelt letter by letter; letters outside ASCII
are unknown to it. Sizes other than 128 × 128, 160 × 96 and 96 × 160 were never seen in training.
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
    base: Path, figures: dict[str, dict[str, float]], psnr: float, prompts: int, steps: int, guidance: float
) -> str:
    """The card's text; `figures` are shares by what was judged, as `judge.shares` gives them."""
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
        templates="\n".join(f"- {template}" for template in TEMPLATES),
        prompts=prompts,
        last_seed=prompts - 1,
        steps=steps,
        guidance=guidance,
        figures="\n".join(measured),
        psnr=psnr,
    )
