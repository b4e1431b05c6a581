"""Pictures from the saved file, with and without it, same seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from lora_trainer.core.errors import UsageError
from lora_trainer.core.io import read_json, sha256_file, write_json
from lora_trainer.evaluation.loading import components_of, free_memory, fresh_pipeline, load_onto, misfits, without_lora
from lora_trainer.evaluation.placing import bring_pipeline
from lora_trainer.evaluation.sheet import Row, contact_sheet, save_picture
from lora_trainer.export.weights import shapes_of
from lora_trainer.models.family import Family
from lora_trainer.models.lora_files import read_lora

DRAWN_AT_ONCE = 8  # on a processor; on a card one, since the decoder's memory grows with each
PROBLEMS_SHOWN = 5
Compared = tuple[list[Image.Image], list[Image.Image], dict[str, Any]]  # without, with, recipe


@dataclass(frozen=True)
class Drawing:
    """How pictures are drawn: sampler steps, guidance scale, width and height in pixels.

    `zero_terminal_snr`: on the schedule that `noise.zero_terminal_snr` trained on.
    """

    steps: int = 25
    guidance: float = 7.5
    size: tuple[int, int] = (512, 512)
    zero_terminal_snr: bool = False


@torch.no_grad()
def draw(
    pipeline: Any, prompts: Sequence[str], seeds: Sequence[int], drawing: Drawing, *, at_once: int = DRAWN_AT_ONCE
) -> list[Image.Image]:
    """One picture for each prompt and its seed, in batches.

    Each picture has its own generator on the CPU: neither the batch nor the device changes its noise.
    """
    pictures: list[Image.Image] = []
    width, height = drawing.size
    for start in range(0, len(prompts), at_once):
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds[start : start + at_once]]
        drawn = pipeline(
            prompt=list(prompts[start : start + at_once]),
            generator=generators,
            num_inference_steps=drawing.steps,
            guidance_scale=drawing.guidance,
            width=width,
            height=height,
        )
        pictures.extend(drawn.images)
    return pictures


def compare(
    family: Family,
    base: Path,
    lora: Path,
    prompts: Sequence[str],
    seeds: Sequence[int],
    drawing: Drawing,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    usable: int | None = None,
    earlier: Path | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Compared:
    """Pictures without and with the LoRA file on a fresh base, and the recipe that draws them again.

    Where a comparison in the folder `earlier` has the same recipe but for its LoRA, its pictures
    of the untouched base are taken in place of drawing them once more. The pipeline is gone when
    this returns. `usable` is what of the device's memory may be filled, in bytes; None means no
    limit. Raises UsageError when the file cannot be read or does not fit the base.
    """
    device = device or torch.device("cpu")
    weights = read_lora(lora)
    pipeline = fresh_pipeline(family, base, dtype, torch.device("cpu"))
    if problems := misfits(weights, shapes_of(components_of(pipeline, family)), family, base):
        raise UsageError(problems[:PROBLEMS_SHOWN])
    load_onto(pipeline, lora)
    if drawing.zero_terminal_snr:
        # Drawing must begin at the very last timestep then (arXiv:2305.08891, 3.3).
        changes = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, **changes)
    placed = bring_pipeline(pipeline, family, device, usable, drawing.size)
    if placed.in_turn:
        say(f"drawing with {placed.words}")
    at_once = 1 if device.type == "cuda" else DRAWN_AT_ONCE
    used = recipe(pipeline, base, lora, prompts, seeds, drawing)
    used |= {"dtype": str(dtype).removeprefix("torch."), "tiled": placed.tiled}
    without = drawn_without(earlier, used) if earlier else None
    if without is None:
        with without_lora(pipeline):
            without = draw(pipeline, prompts, seeds, drawing, at_once=at_once)
    with_lora = draw(pipeline, prompts, seeds, drawing, at_once=at_once)
    del pipeline
    free_memory(device)
    return without, with_lora, used


def drawn_without(folder: Path, wanted: Mapping[str, Any]) -> list[Image.Image] | None:
    """Pictures of the untouched base that `save_comparison` kept for the same recipe; None when there are none."""
    for path in sorted(folder.glob("*.json")):
        try:
            kept = {name: value for name, value in read_json(path).items() if not name.startswith("lora")}
            if kept != {name: value for name, value in wanted.items() if not name.startswith("lora")}:
                continue
            return [
                Image.open(folder / f"{path.stem}_{index:02d}_without.png").convert("RGB")
                for index in range(len(wanted["pictures"]))
            ]
        except (OSError, ValueError, AttributeError):
            continue
    return None


def recipe(
    pipeline: Any, base: Path, lora: Path, prompts: Sequence[str], seeds: Sequence[int], drawing: Drawing
) -> dict[str, Any]:
    """Everything that is needed to draw the same pictures elsewhere."""
    import diffusers
    import transformers

    return {
        "model": str(base.resolve()),
        "lora": lora.name,
        "lora_sha256": sha256_file(lora),
        "pictures": [{"prompt": prompt, "seed": seed} for prompt, seed in zip(prompts, seeds, strict=True)],
        "steps": drawing.steps,
        "guidance": drawing.guidance,
        "size": list(drawing.size),
        "zero_terminal_snr": drawing.zero_terminal_snr,
        "scheduler": type(pipeline.scheduler).__name__,
        "versions": {
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        },
    }


def save_comparison(
    folder: Path,
    without: Sequence[Image.Image],
    with_lora: Sequence[Image.Image],
    recipe_used: dict[str, Any],
    *,
    name: str = "before_after",
) -> Path:
    """Write `NAME.png` (left without, right with, prompt below), every picture by itself, and `NAME.json`.

    Returns the sheet's path.
    """
    rows = [
        Row(f"{asked['prompt'] or '(empty prompt)'}  ·  seed {asked['seed']}", (before, after))
        for asked, before, after in zip(recipe_used["pictures"], without, with_lora, strict=True)
    ]
    for index, (before, after) in enumerate(zip(without, with_lora, strict=True)):
        save_picture(folder / f"{name}_{index:02d}_without.png", before)
        save_picture(folder / f"{name}_{index:02d}_with.png", after)
    sheet = folder / f"{name}.png"
    save_picture(sheet, contact_sheet(("without the LoRA", "with the LoRA"), rows))
    write_json(folder / f"{name}.json", recipe_used)
    return sheet
