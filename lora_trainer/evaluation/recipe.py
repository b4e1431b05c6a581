"""The recipe of an image: everything needed to generate it again, in a file and in the image itself."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL.PngImagePlugin import PngInfo
from pydantic import ValidationError

from lora_trainer.config.schema.inputs import TextEncoderSection
from lora_trainer.config.schema.results import SampleSection
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.families import families
from lora_trainer.core.io import read_json, sha256_file
from lora_trainer.core.version import __version__
from lora_trainer.models.base_loras import base_digest
from lora_trainer.models.family import Family, TextOptions
from lora_trainer.models.folder import weights_digest

ANOTHER = "Use another recipe."
DTYPES = ("float32", "bfloat16", "float16")
CONTROLS = "control_images_sha256"  # of each file, in the recipes of edit models
SHORT_HASH = 10  # hex digits of a hash that people compare by eye
# diffusers' schedulers and AUTOMATIC1111's names of the same samplers.
SAMPLERS = {
    "DDIMScheduler": "DDIM",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "EulerAncestralDiscreteScheduler": "Euler a",
    "EulerDiscreteScheduler": "Euler",
    "FlowMatchEulerDiscreteScheduler": "Euler",
    "HeunDiscreteScheduler": "Heun",
    "LCMScheduler": "LCM",
    "LMSDiscreteScheduler": "LMS",
    "UniPCMultistepScheduler": "UniPC",
}
OF_THE_LORA = (
    "lora",
    "lora_sha256",
    "lora_hash",
    "strengths",
)  # keys of a recipe that do not concern the untouched base model
NEEDED = {
    "model": str,
    "lora_sha256": str,
    "images": list,
    "strengths": list,
    "steps": int,
    "size": list,
    "text": dict,
}


@dataclass(frozen=True)
class ImageRequest:
    """One row of a grid: generated without the LoRA, and with it at every strength.

    `controls` are the files of its control images, `target` that of the edited image of the dataset, where there is one.
    """

    prompt: str
    seed: int
    controls: tuple[str, ...] = ()
    target: str = ""

    def to_json(self) -> dict[str, Any]:
        """As in a recipe: without what it does not have."""
        edit = {"controls": list(self.controls), "target": self.target}
        return {"prompt": self.prompt, "seed": self.seed} | {key: value for key, value in edit.items() if value}


@dataclass(frozen=True)
class Drawing:
    """How images are generated: sampler steps, guidance scale, width and height in pixels, strengths of the LoRA.

    `guidance` is None for models without a guidance scale, `negative` for those without negative prompts.
    `zero_terminal_snr`: with the noise schedule that `noise.zero_terminal_snr` trains on.
    """

    steps: int = 25
    guidance: float | None = 7.5
    size: tuple[int, int] = (512, 512)
    negative: str | None = ""
    strengths: tuple[float, ...] = (1.0,)
    zero_terminal_snr: bool = False


@dataclass(frozen=True)
class Grid:
    """The images of a grid: its rows, and how they are generated."""

    rows: Sequence[ImageRequest]
    drawing: Drawing


@dataclass(frozen=True)
class NamedModel:
    """A base model in its folder. `named` is the user's name of it, `parts` its other settings that a recipe keeps."""

    family: Family
    folder: Path
    named: str | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)


def recipe(pipeline: Any, model: NamedModel, lora: Path, grid: Grid) -> dict[str, Any]:
    """Everything needed to generate the same images elsewhere."""
    import diffusers
    import transformers

    family, base, drawing = model.family, model.folder, grid.drawing

    weights = {part.parent.name: part.parent for part in sorted(base.glob("*/config.json"))}
    drawn_with = {name for name, part in pipeline.components.items() if part is not None}
    kept = {name: weights_digest(folder) for name, folder in weights.items() if name in drawn_with}
    kept |= {family.denoiser.component: base_digest(family, base)}
    config = {key: value for key, value in pipeline.scheduler.config.items() if not key.startswith("_")}
    controls = sorted({file for row in grid.rows for file in row.controls})
    return {
        **({CONTROLS: {file: sha256_file(Path(file)) for file in controls}} if controls else {}),
        "program": f"lora_trainer {__version__}",
        "model": model.named or base.name,
        "family": family.name,
        "model_sha256": kept,
        "lora": lora.name,
        "lora_sha256": sha256_file(lora),
        "lora_hash": tensors_hash(lora),
        "strengths": list(drawing.strengths),
        "images": [row.to_json() for row in grid.rows],
        "negative": drawing.negative,
        "steps": drawing.steps,
        "guidance": drawing.guidance,
        "size": list(drawing.size),
        "zero_terminal_snr": drawing.zero_terminal_snr,
        "scheduler": type(pipeline.scheduler).__name__,
        "scheduler_config": json.loads(json.dumps(config, default=str)),
        "text": {**asdict(family.text.options), "without": list(family.text.options.without)},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        },
    }


def tensors_hash(path: Path) -> str:
    """SHA-256 of a safetensors file's bytes after its header, which programs show of a LoRA."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe saved next to its images. Raises UsageError when it is missing, damaged or no recipe."""
    fix = "Use the .json file next to the images."
    try:
        found = read_json(path)
    except OSError as error:
        raise UsageError(
            Problem("recipe_unreadable", f"{path} cannot be read as a recipe: {error.strerror}.", fix)
        ) from error
    except ValueError as error:
        raise UsageError(
            Problem("recipe_unreadable", f"{path} cannot be read as a recipe: it is not JSON.", fix)
        ) from error
    wrong = not isinstance(found, dict) or [key for key, kind in NEEDED.items() if not isinstance(found.get(key), kind)]
    if wrong:
        lacking = "no object" if wrong is True else f"without a sound {', '.join(wrong)}"
        raise UsageError(Problem("not_a_recipe", f"{path} is not a recipe: it is {lacking}.", fix))
    return dict(found)


def rows_of(found: Mapping[str, Any]) -> list[ImageRequest]:
    """The rows of a recipe. Raises UsageError for what is no prompt with a seed, and for none."""
    try:
        rows = [
            ImageRequest(
                str(each["prompt"]),
                int(each["seed"]),
                tuple(map(str, each.get("controls", ()))),
                str(each.get("target", "")),
            )
            for each in found["images"]
        ]
        if not rows or not all(0 <= row.seed < 2**63 for row in rows):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            Problem("recipe_incomplete", "The recipe's images have no prompt and seed each.", ANOTHER)
        ) from error
    return rows


def drawing_of_recipe(found: Mapping[str, Any]) -> Drawing:
    """A recipe's sampling settings. Raises UsageError for values of another type, and for those that `[sample]` refuses."""
    try:
        width, height = map(int, found["size"])
        drawing = Drawing(
            steps=int(found["steps"]),
            guidance=None if found.get("guidance") is None else float(found["guidance"]),
            size=(width, height),
            negative=None if found.get("negative") is None else str(found["negative"]),
            strengths=tuple(map(float, found["strengths"])),
            zero_terminal_snr=bool(found.get("zero_terminal_snr")),
        )
        settings = {
            "num_inference_steps": drawing.steps,
            "strengths": drawing.strengths,
            "guidance_scale": drawing.guidance or 0.0,
        }
        SampleSection.model_validate(settings)
        at_once = found.get("at_once")
        if found.get("dtype") not in DTYPES or not (at_once is None or (type(at_once) is int and at_once > 0)):
            raise ValueError(f"dtype {found.get('dtype')!r}, {at_once!r} at once")
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            Problem("recipe_invalid", f"The recipe cannot be followed: {_reason(error)}.", ANOTHER)
        ) from error
    return drawing


def text_of_recipe(found: Mapping[str, Any]) -> TextOptions:
    """How a recipe's captions are encoded. Raises UsageError for options of another type."""
    try:
        text = TextOptions(**{**found["text"], "without": tuple(found["text"].get("without", ()))})
        settings = {"clip_skip": text.clip_skip, "max_tokens": text.clip_tokens, "max_sequence_length": text.t5_tokens}
        TextEncoderSection.model_validate(settings)
    except (TypeError, ValueError) as error:
        raise UsageError(
            Problem("recipe_invalid", f"The recipe's text cannot be followed: {_reason(error)}.", ANOTHER)
        ) from error
    return text


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return str(error)


def changed_since(found: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs since the recipe's images were generated; where it is empty, the images are the same."""
    names = (CONTROLS, "model_sha256", "lora_sha256", "scheduler", "scheduler_config", "dtype", "device", "versions")
    return [name.removesuffix("_sha256") for name in names if found.get(name) != now.get(name)]


def same_base(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two recipes generate the same images without the LoRA."""

    def bare(found: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if name not in OF_THE_LORA}

    return bare(kept) == bare(wanted)


def embedded_text(used: Mapping[str, Any], row: ImageRequest | None, strength: float | None) -> PngInfo:
    """The recipe for a PNG: as programs of this field show it (`parameters`) and whole (`recipe`). It names no folder."""
    info = PngInfo()
    parts = {name: _last(value) if isinstance(value, str) else value for name, value in used["model_parts"].items()}
    own = {**used, "model": _last(used["model"]), "model_parts": parts}
    if row is not None:
        unplaced = replace(row, controls=tuple(map(_last, row.controls)), target=_last(row.target))
        own |= {"images": [unplaced.to_json()], "strengths": [] if strength is None else [strength]}
        if strength is None:
            own = {key: value for key, value in own.items() if not key.startswith("lora")}
        info.add_text("parameters", parameters(own, row, strength))
    info.add_text("recipe", json.dumps(own, ensure_ascii=False))
    return info


def _last(path: str) -> str:
    return path.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]


def _quoted(text: str) -> str:
    """Quoted as AUTOMATIC1111's web UI does where the text contains one of its separators."""
    return json.dumps(text, ensure_ascii=False) if any(sign in text for sign in ",:\n") else text


def parameters(used: Mapping[str, Any], row: ImageRequest, strength: float | None) -> str:
    """Three lines as AUTOMATIC1111's web UI writes them: prompt with the LoRA's tag, negative prompt, numbers.

    Brackets are escaped: images are drawn of plain prompts, and the web UI would read `(toy)` as a weight.
    """
    prompt, negative = (re.sub(r"[()\[\]]", r"\\\g<0>", text or "") for text in (row.prompt, used["negative"]))
    lines = [prompt]
    width, height = used["size"]
    numbers = {"Steps": used["steps"]}
    if sampler := SAMPLERS.get(used["scheduler"]):
        numbers["Sampler"] = sampler
    if used["guidance"] is not None:
        guidance = f"{used['guidance']:g}"
        # Forge has a scale of its own for guidance that is an input of the model.
        is_input = "guidance" in families().get(used["family"], {}).get("comfyui", {})
        numbers |= {"CFG scale": 1, "Distilled CFG Scale": guidance} if is_input else {"CFG scale": guidance}
    numbers |= {"Seed": row.seed, "Size": f"{width}x{height}", "Model": _quoted(used["model"])}
    if denoiser := used["model_sha256"].get("unet") or used["model_sha256"].get("transformer"):
        numbers["Model hash"] = denoiser[:SHORT_HASH]
    if (skip := used["text"].get("clip_skip")) is not None:
        numbers["Clip skip"] = skip
    if strength is not None:
        stem = used["lora"].removesuffix(".safetensors")
        lines[0] = f"{prompt} <lora:{stem}:{strength:g}>"
        numbers["Lora hashes"] = json.dumps(f"{stem}: {used['lora_hash'][:12]}", ensure_ascii=False)
    numbers["Version"] = used["program"]
    if negative:
        lines.append(f"Negative prompt: {negative}")
    return "\n".join([*lines, ", ".join(f"{key}: {value}" for key, value in numbers.items())])
