"""A model folder in diffusers' layout: found, checked and described without torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lora_trainer.core.digests import remembered_sha256
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.tensorfile import read_tensor_header

FAMILY_OF_PIPELINE = {"StableDiffusionPipeline": "sd15", "StableDiffusionXLPipeline": "sdxl"}
SD2_TEXT_WIDTH = 1024  # 1.x and 2.x share a pipeline; their text encoders do not
EXPECTED = "Expected a diffusers folder: model_index.json beside unet/, vae/, text_encoder/, tokenizer/, scheduler/."


def read_config(folder: Path, name: str, needs: tuple[str, ...] = (), expected: str = EXPECTED) -> dict[str, Any]:
    """A component's JSON config. Raises UsageError when it is absent (`expected` is the fix), damaged or lacks its `needs`."""
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(Problem(f"{path} is missing.", expected)) from None
    except (OSError, ValueError) as error:
        raise UsageError(Problem(f"{path} cannot be read ({error}).", "Copy or download the model again.")) from error
    if not isinstance(value, dict):
        raise UsageError(Problem(f"{path} is not a JSON object.", "Copy or download the model again."))
    if lacking := [key for key in needs if key not in value]:
        raise UsageError(Problem(f"{path} lacks {', '.join(lacking)}.", "Copy or download the model again."))
    return value


def _reads_as_hub_id(folder: Path) -> bool:
    """`owner/name`, where no folder `owner` is here that could make it a mistyped path."""
    parts = folder.parts
    return len(parts) == 2 and parts[0] not in (folder.anchor, "..", "~") and not Path(parts[0]).exists()


def detect_family(folder: Path, origin: str = "--model") -> str:
    """The family of a model folder, by its pipeline class and text width.

    Raises UsageError for what cannot be trained; `origin` is what the folder was named by.
    """
    if not folder.exists() and _reads_as_hub_id(folder):
        raise UsageError(
            Problem(
                f"{folder.as_posix()} is not a local folder; models are not downloaded from a hub yet.",
                f"Download the model in diffusers' layout and give its local folder as {origin}.",
            )
        )
    if not folder.exists():
        raise UsageError(Problem(f"There is no model at {folder}.", f"Check {origin}."))
    if folder.is_file():
        read_tensor_header(folder)  # a pickle or a damaged file is named as such
        raise UsageError(
            Problem(f"{folder} is a file; single checkpoints cannot be read yet.", "Convert it to a diffusers folder.")
        )
    pipeline = str(read_config(folder, "model_index.json").get("_class_name", ""))
    if pipeline not in FAMILY_OF_PIPELINE:
        known = ", ".join(FAMILY_OF_PIPELINE)
        raise UsageError(Problem(f"{folder} holds a {pipeline or 'nameless'} model.", f"Supported: {known}."))
    family = FAMILY_OF_PIPELINE[pipeline]
    if family == "sd15" and read_config(folder, "unet/config.json").get("cross_attention_dim") == SD2_TEXT_WIDTH:
        return "sd2"
    return family


def weights_file(folder: Path) -> Path:
    """The safetensors file of a component, the full-precision one first. Raises UsageError."""
    found = sorted(folder.glob("*.safetensors"), key=lambda path: (len(path.suffixes), path.name))
    if not found:
        pickles = [path.name for path in folder.glob("*.bin")] if folder.is_dir() else []
        reason = f"holds only {pickles[0]}, a pickle" if pickles else "holds no weights"
        raise UsageError(Problem(f"{folder} {reason}.", "Only .safetensors weights are loaded; convert the model."))
    if len(found) > 1 and "-of-" in found[0].name:
        raise UsageError(Problem(f"{folder} holds weights in several files.", "Save the model unsharded."))
    return found[0]


def variant_of(folder: Path) -> str | None:
    """`fp16` for a component that has only `….fp16.safetensors`."""
    suffixes = weights_file(folder).suffixes
    return suffixes[-2].lstrip(".") if len(suffixes) > 1 else None


def check_components(folder: Path, components: tuple[str, ...]) -> None:
    """Raise one UsageError with every missing or damaged weight file of the components."""
    problems: list[Problem] = []
    for component in components:
        try:
            read_tensor_header(weights_file(folder / component))
        except UsageError as error:
            problems.extend(error.problems)
    if problems:
        raise UsageError(problems)


def fingerprint(folder: Path, *components: str) -> str:
    """A hash of every file of the components: changes when weights, config or vocabulary change."""
    digest = hashlib.sha256()
    for component in components:
        for path in sorted((folder / component).iterdir()):
            if path.is_file():
                digest.update(f"{component}/{path.name}:{remembered_sha256(path)}\n".encode())
    return digest.hexdigest()[:32]
