"""Image grids from a LoRA file: prompts, seeds and strengths, with and without the LoRA, same seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lora_trainer.core.conditioning import EditCaption
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.grid import image_name
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.interrupt import Stopped
from lora_trainer.core.io import read_json, write_json
from lora_trainer.data.buckets import Bucket, fit_to
from lora_trainer.data.images.images import BrokenImageError, cut_out, load_rgb, to_rgb
from lora_trainer.evaluation.compute import ON_CPU, Compute
from lora_trainer.evaluation.loading import (
    at_strength,
    components_of,
    fresh_pipeline,
    in_short,
    misfits,
    misfits_by_config,
    put_on,
)
from lora_trainer.evaluation.placing import bring_pipeline
from lora_trainer.evaluation.recipe import (
    Drawing,
    Grid,
    ImageRequest,
    NamedModel,
    embedded_text,
    recipe,
    rows_of,
    same_base,
)
from lora_trainer.evaluation.sheet import SheetGroup, SheetRow, contact_sheet, save_image
from lora_trainer.lora_format.weights import AdapterWeights, shapes_of
from lora_trainer.models.autoencoder import image_encoder
from lora_trainer.models.drawing import prompted, read_prompts, texts_of
from lora_trainer.models.lora_names import read_adapter_with_tokens
from lora_trainer.models.memory.phases import DRAWN_AT_ONCE, drawn_on_a_cpu, phase_costs
from lora_trainer.models.textual_inversion import LearnedTokens, add_learned_tokens, from_embeddings

if TYPE_CHECKING:
    from lora_trainer.models.family import Family

# Text embeddings by prompt, or by a prompt and the files of the control images that it was read with.
ReadTexts = dict[Any, dict[str, Tensor]]
SHORT_NAME = 40  # characters of a file's name in the sheet's heading


@dataclass(frozen=True)
class Where:
    """The files of one grid: `NAME.png`, `NAME.json` and one for each image, in `folder`."""

    folder: Path
    name: str

    @property
    def sheet(self) -> Path:
        return self.folder / f"{self.name}.png"

    @property
    def recipe(self) -> Path:
        return self.folder / f"{self.name}.json"

    def image(self, row: int, strength: float | None) -> Path:
        return self.folder / image_name(self.name, row, strength)


def compare(model: NamedModel, lora: Path, grid: Grid, where: Where, compute: Compute = ON_CPU) -> dict[str, Any]:
    """Generate every row on a fresh base model, without the LoRA and at each strength; write images, sheet and recipe.

    Where another grid in the folder has the same recipe except for its LoRA, its images without LoRA are reused.
    Finished images stay when this is interrupted; earlier ones of the grid's name stay until the first image is there. The pipeline is freed at the end. Returns the recipe. Raises
    UsageError when the file cannot be read or does not fit.
    """
    family, base, device, drawing = model.family, model.folder, compute.device, grid.drawing
    weights = read_adapter_with_tokens(lora)
    if problems := misfits_by_config(weights, family, base):
        raise UsageError(in_short(problems))
    where.folder.mkdir(parents=True, exist_ok=True)  # fails before the base model is loaded
    pipeline = fresh_pipeline(family, base, compute.dtype, torch.device("cpu"))
    if problems := misfits(weights, shapes_of(components_of(pipeline, family)), family, base):
        raise UsageError(in_short(problems))
    put_on(pipeline, family, weights)
    if drawing.zero_terminal_snr:
        # Sampling must then start at the very last timestep (arXiv:2305.08891, 3.3).
        changes = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, **changes)
    placed = bring_pipeline(pipeline, family, device, compute.usable, drawing.size)
    if placed.in_turn:
        compute.say(f"generating images with {placed.description}")
    pixels = drawing.size[0] * drawing.size[1]
    fitting = drawn_on_a_cpu(pixels, torch.float32.itemsize, phase_costs(family.name))
    at_once = compute.at_once or (1 if device.type == "cuda" else fitting)
    used = recipe(pipeline, model, lora, grid)
    used |= {
        "model_parts": dict(model.parts),
        "dtype": str(compute.dtype).removeprefix("torch."),
        "device": device.type,
        "at_once": at_once,
        "tiled": placed.tiled,
    }
    planned = [
        where.image(index, strength) for strength in (None, *drawing.strengths) for index in range(len(grid.rows))
    ]
    done = 0
    columns = draw_columns(
        pipeline, family, weights, grid, earlier_base(where, used), replace(compute, at_once=at_once)
    )
    try:
        for strength, drawn in columns:
            images = untouched(where, len(grid.rows)) if drawn is None else drawn
            for row, image in zip(grid.rows, images, strict=True):
                if done == 0:
                    where.recipe.unlink(missing_ok=True)  # of an earlier grid, whose images are overwritten now
                save_image(planned[done], image, embedded_text(used, row, strength))
                done += 1
                compute.progress(done, len(planned))
    except (Stopped, KeyboardInterrupt):
        for path in planned[done:]:
            path.unlink(missing_ok=True)  # an earlier grid's, which are not of this recipe
        write_sheet(where, used)
        raise
    write_sheet(where, used)
    del pipeline, columns
    free_memory(device)
    return used


def draw_columns(
    pipeline: Any, family: Family, weights: AdapterWeights, grid: Grid, known: Where | None, compute: Compute
) -> Iterator[tuple[float | None, Iterator[Image.Image] | None]]:
    """Each strength with its images, one for each row: without the LoRA first, from `known` where that is a grid.

    None at strength 0: no LoRA and no learned tokens, so these are the images without LoRA.
    """
    rows, drawing, device = grid.rows, grid.drawing, compute.device
    words: LearnedTokens = from_embeddings(weights.embeddings, family.text.clips)
    texts_change = bool(words) or any(name.startswith("text_encoder") for name in weights.modules)
    read: ReadTexts = {}
    for strength in (None, *drawing.strengths):
        if strength == 0:
            yield strength, None
            continue
        if strength is None and known is not None:
            yield strength, untouched(known, len(rows))
            continue
        if strength and words:
            add_learned_tokens(texts_of(pipeline, device), words)
            words = {}
        with at_strength(pipeline, strength):
            if not read or texts_change:
                read = read_rows(pipeline, family, rows, drawing, device)
            yield strength, draw(pipeline, family, read, rows, drawing, compute.at_once or DRAWN_AT_ONCE)


@torch.no_grad()
def read_rows(
    pipeline: Any, family: Family, rows: Sequence[ImageRequest], drawing: Drawing, device: torch.device | None = None
) -> ReadTexts:
    """The text embeddings of the rows' prompts and of the negative one, by prompt; where the text encoder sees control
    images, of each prompt with each row's, by (prompt, files of the control images).

    `device` is where the encoders compute when their layers are offloaded. Raises UsageError as `load_controls`.
    """
    negative, parts = [] if drawing.negative is None else [drawing.negative], texts_of(pipeline, device)
    if parts.image_processor is None or not any(row.controls for row in rows):
        return read_prompts(pipeline, family, [*(row.prompt for row in rows), *negative], device)
    read: ReadTexts = {}
    for row in rows:
        controls = tuple(image[0] for image in load_controls([row], drawing.size))
        for prompt in (row.prompt, *negative):
            read[prompt, row.controls] = family.text.encode_prompts(parts, [EditCaption(prompt, controls)])
    return read


@torch.no_grad()
def draw(
    pipeline: Any,
    family: Family,
    read: ReadTexts,
    rows: Sequence[ImageRequest],
    drawing: Drawing,
    at_once: int = DRAWN_AT_ONCE,
) -> Iterator[Image.Image]:
    """One image for each row, in batches; `read` has the text embeddings of every prompt, as `read_rows`.

    Each image has its own generator on the CPU: neither the batch nor the device changes its noise. Raises UsageError as
    `encode_controls`, and for rows with different numbers of control images.
    """
    if len({len(row.controls) for row in rows}) > 1:
        message = "The prompts have different numbers of control images."
        raise UsageError(Problem("control_images_differ", message, "Give each prompt equally many."))
    width, height = drawing.size
    guidance = 0.0 if drawing.guidance is None else drawing.guidance
    seen = not all(isinstance(key, str) for key in read)
    if getattr(pipeline, "processor", None) is not None:
        at_once = 1  # prompts with images differ in length, and the pipelines take one
    for start in range(0, len(rows), at_once):
        chosen = rows[start : start + at_once]
        texts = {key[0]: text for key, text in read.items() if key[1] == chosen[0].controls} if seen else read
        drawn = pipeline(
            **prompted(family, texts, [row.prompt for row in chosen], drawing.negative if guidance > 0 else None),
            **family.pipeline.with_controls(pipeline, drawing.size, encode_controls(pipeline, chosen, drawing.size)),
            generator=[torch.Generator("cpu").manual_seed(row.seed) for row in chosen],
            num_inference_steps=drawing.steps,
            **{family.pipeline.guidance: guidance},
            width=width,
            height=height,
        ).images
        yield from map(to_rgb, drawn)


def encode_controls(pipeline: Any, rows: Sequence[ImageRequest], size: tuple[int, int]) -> list[Tensor]:
    """The scaled latents [B, C, h, w] of each control image of B rows. Raises UsageError as `load_controls`."""
    if not any(row.controls for row in rows):
        return []
    encode = image_encoder(pipeline.vae, pipeline._execution_device)
    return [encode(pixels)[0] for pixels in load_controls(rows, size)]


def load_controls(rows: Sequence[ImageRequest], size: tuple[int, int]) -> list[Tensor]:
    """The pixels [B, 3, H, W] in [-1, 1] of each control image of B rows, cut to an image's width and height as in training.

    Raises UsageError for an image that cannot be read, and for rows with different numbers of them.
    """
    found = []
    try:
        for files in zip(*(row.controls for row in rows), strict=True):
            images = [load_rgb(Path(file)) for file in files]
            cut = [cut_out(image, fit_to(image.width, image.height, Bucket(*size))) for image in images]
            pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in cut])
            found.append(pixels.float() / 127.5 - 1.0)
    except BrokenImageError as error:
        raise UsageError(Problem(error.code, f"A control image {error.message}", error.fix)) from error
    return found


def earlier_base(where: Where, wanted: dict[str, Any]) -> Where | None:
    """Another grid in the folder with all images without LoRA of the same recipe; None when there is none."""
    for path in sorted(where.folder.glob("*.json")):
        try:
            if same_base(read_json(path), wanted):
                other = Where(where.folder, path.stem)
                for _ in untouched(other, len(wanted["images"])):
                    pass  # each can be read
                return other
        except (OSError, ValueError, AttributeError):
            continue
    return None


def untouched(where: Where, rows: int) -> Iterator[Image.Image]:
    """A grid's images without LoRA, one by one. Raises OSError for one that is missing or damaged."""
    for index in range(rows):
        with Image.open(where.image(index, None)) as image:
            yield image.convert("RGB")


def write_sheet(where: Where, used: dict[str, Any]) -> Path:
    """Write the sheet of all finished images, with gaps for the others, and the recipe next to it."""
    strengths: list[float | None] = [None, *used["strengths"]]
    groups: dict[str, list[SheetRow]] = {}
    rows = rows_of(used)
    controls, edits = max(len(row.controls) for row in rows), any(row.target for row in rows)
    for index, row in enumerate(rows):
        shown = [Path(file) for file in (*row.controls, *([row.target] if edits else []))]
        paths = [*shown, *(where.image(index, strength) for strength in strengths)]
        groups.setdefault(row.prompt, []).append(SheetRow(f"seed {row.seed}", paths))
    guidance = "" if used["guidance"] is None else f" · guidance {used['guidance']:g}"
    width, height = used["size"]
    title = f"{shortened(used['lora'])} on {shortened(short_path(used['model']))}"
    sampler = used["scheduler"].removesuffix("Scheduler")
    details = f"{used['steps']} steps · {sampler}{guidance} · {width}x{height}"
    if used["negative"]:
        details += f" · negative prompt: {used['negative']}"
    beside = ["control" if controls == 1 else f"control {number + 1}" for number in range(controls)]
    beside += ["dataset's image"] if edits else []
    headings = [*beside, "untouched base", *(f"LoRA at {strength:g}" for strength in used["strengths"])]
    sheet = contact_sheet(
        title, details, headings, [SheetGroup(prompt or "(empty prompt)", r) for prompt, r in groups.items()]
    )
    save_image(where.sheet, sheet, embedded_text(used, None, None))
    write_json(where.recipe, used)
    return where.sheet


def short_path(model: str) -> str:
    """A file's name, a folder's last two (many a folder is called `model`), all of a hub's id."""
    path = Path(model)
    return path.name if path.suffix == ".safetensors" else "/".join(path.parts[-2:]).lstrip("/")


def shortened(name: str) -> str:
    return name if len(name) <= SHORT_NAME else f"{name[: SHORT_NAME // 2]}...{name[-SHORT_NAME // 2 :]}"


def nearest_size(size: tuple[int, int], step: int) -> tuple[int, int]:
    """The nearest size that the model can generate."""
    width, height = (max(step, (side + step // 2) // step * step) for side in size)
    return width, height


def refuse_size(size: tuple[int, int], step: int) -> None:
    """Raise UsageError for sides that are no multiples of the model's step, with the nearest that are."""
    if any(side % step or side < step for side in size):
        width, height = nearest_size(size, step)
        message = f"{size[0]}x{size[1]} is no size for this model: sides must be multiples of {step} pixels."
        raise UsageError(Problem("size_invalid", message, f"The nearest: {width}x{height}."))
