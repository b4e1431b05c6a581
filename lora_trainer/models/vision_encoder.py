"""Image encoders of transformers, such as DINOv2 or CLIP, whose features compare images: safetensors only, no code of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.folder import check_part, index_path, read_config, weights_are_here
from lora_trainer.models.pretrained import LOCAL, explaining_folder, load_pretrained

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SETTING = "gates.encoder"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # either says how an image becomes numbers
OF_IMAGES = ("vision_config", "image_size", "num_channels")  # keys of configs of models that read images
GRID = 3  # cells a side
DescribePixels = Callable[["Tensor"], dict[str, "Tensor"]]
EXPECTED = (
    f"Set {SETTING} to a folder of transformers such as DINOv2, CLIP or SigLIP: config.json, *.safetensors and "
    f"{PROCESSORS[0]}; or leave it empty."
)


@dataclass(frozen=True)
class EncoderFolder:
    """Where an image encoder is, and its name for people: a path, or `owner/name@commit`."""

    path: Path
    name: str


def check_vision_encoder(folder: Path) -> int:
    """How many numbers the weights in a folder hold. Imports no torch.

    Raises UsageError for a folder without an image encoder that may be loaded: one of another kind, or pickles.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UsageError(Problem("encoder_missing", f"{SETTING}: {folder} {what}.", EXPECTED))
    if index_path(folder).exists():
        raise UsageError(
            Problem("encoder_unsupported", f"{SETTING}: {folder} is a diffusers model, no image encoder.", EXPECTED)
        )
    config = read_config(folder, "config.json", expected=EXPECTED)
    kind = config.get("_class_name") or config.get("model_type") or "unknown"
    if "_class_name" in config or not any(key in config for key in OF_IMAGES):
        raise UsageError(
            Problem(
                "encoder_unsupported",
                f"{SETTING}: {folder} holds a model of type {str(kind)[:80]}, no image encoder.",
                EXPECTED,
            )
        )
    if not any((folder / name).exists() for name in PROCESSORS):
        raise UsageError(Problem("encoder_incomplete", f"{SETTING}: {folder} lacks {PROCESSORS[0]}.", EXPECTED))
    return check_part(folder) if weights_are_here(folder) else 0


def load_vision_encoder(folder: Path, device: torch.device) -> DescribePixels:
    """The image encoder of a folder in fp32; of a model of images and texts, such as CLIP, its image part.

    The function returned takes pixels [3, H, W] in [-1, 1] and returns features [D] by block, fp32 on the CPU:
    `pooled`, what the model itself makes of the whole image, and `cells`, the means of its patches in 3 x 3 cells. Each
    is scaled to length 1, so that distances grow with the angle, as the cosine that is usual with these models.

    Raises UsageError as `check_vision_encoder`, and for a model that describes no image, or not always in the same way.
    """
    import torch

    stored_numbers = check_vision_encoder(folder)
    config = read_config(folder, "config.json")
    with explaining_folder(folder, config.get("architectures") or (), EXPECTED):
        from transformers import AutoConfig, AutoImageProcessor, AutoModel

        whole = AutoConfig.from_pretrained(folder, **LOCAL)
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **LOCAL)
        part = getattr(whole, "vision_config", whole)
        model = load_pretrained(AutoModel, folder, device, stored_numbers, part).float().requires_grad_(False)
        patch = getattr(part, "patch_size", None)

        @torch.no_grad()
        def describe(pixels: Tensor) -> dict[str, Tensor]:
            shown = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()
            inputs = processor(
                images=[shown.transpose(1, 2, 0)], input_data_format="channels_last", return_tensors="pt"
            )
            image = inputs["pixel_values"].to(device)
            return blocks_of(model(pixel_values=image), image.shape[-2:], patch)

        one, again = (describe(torch.linspace(-1, 1, 3 * 64 * 64).reshape(3, 64, 64)) for _ in range(2))
    if not all(torch.equal(one[name], again[name]) and one[name].isfinite().all() for name in one):
        message = f"{SETTING}: {folder} does not describe one image the same way twice."
        raise UsageError(Problem("encoder_random", message, EXPECTED))
    return describe


def blocks_of(found: Any, sides: tuple[int, int], patch: Any) -> dict[str, Tensor]:
    """Features [D] by block from a model's output for one image of these sides in pixels."""
    from torch.nn.functional import adaptive_avg_pool2d, normalize

    states = found.last_hidden_state
    if states.ndim == 3:
        rows, columns = rows_and_columns(states.shape[1], sides, patch)
        # Tokens of the whole image and registers come first.
        states = states[:, states.shape[1] - rows * columns :].transpose(1, 2).unflatten(2, (rows, columns))
    pooled = getattr(found, "pooler_output", None)
    pooled = states.mean((2, 3)) if pooled is None else pooled.flatten(1)
    cells = adaptive_avg_pool2d(states, GRID).flatten(2)
    return {
        "pooled": normalize(pooled.float(), dim=1).flatten().cpu(),
        "cells": normalize(cells.float(), dim=1).flatten().cpu(),
    }


def rows_and_columns(tokens: int, sides: tuple[int, int], patch: Any) -> tuple[int, int]:
    """How the patches of an image lie; models that merge patches have fewer of them, in a square."""
    if isinstance(patch, int):
        rows, columns = (side // patch for side in sides)
        if 0 < rows * columns <= tokens:
            return rows, columns
    return math.isqrt(tokens), math.isqrt(tokens)
