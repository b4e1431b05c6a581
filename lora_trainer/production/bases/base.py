"""What a user names as the base becomes a folder in diffusers' layout. No torch.

A folder is taken as it is. A model of a hub is found in the user's Hugging Face cache, else fetched into it. A single
checkpoint, or a base whose VAE or text encoders are others, is laid out in the user's cache, again wherever that
was deleted. Nothing below this file knows of anything but folders.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import Problem, UsageError, known_as
from lora_trainer.core.findings import printable_lines
from lora_trainer.core.launch import is_main_process
from lora_trainer.models.folder import EXPECTED, without_weights
from lora_trainer.production.bases.hub_files import INDEX
from lora_trainer.production.bases.names import absolute, as_hub_model, as_hub_part, local_path, page_of_the_web
from lora_trainer.production.bases.parts import find_parts, refuse_missing

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@dataclass(frozen=True)
class Base:
    """`folder` is in diffusers' layout; `named` is what people call it: an id of a hub, or the last part of a path.

    `commit` is the one that a model of a hub was taken from, and `held` says with theirs what settings name of a hub besides.
    Of one that is not `whole` the configs alone are here, or of a checkpoint its header.
    `note` says what was assumed of a checkpoint that does not tell it. `places` are paths with what people call them.
    """

    folder: Path
    named: str
    commit: str | None = None
    whole: bool = True
    note: str = ""
    held: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


def on_stderr(line: str) -> None:
    """A line for people, from the main process only."""
    if is_main_process():
        sys.stderr.write(printable_lines(line) + "\n")


def go_offline() -> None:
    """From here on no library asks the network: also those that read the environment before."""
    for name in OFFLINE_VARIABLES:
        os.environ[name] = "1"
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        vars(constants)["HF_HUB_OFFLINE"] = True


def silent(line: str) -> None:
    """Where nothing is to be printed."""


def find_base(
    model: ModelSection,
    *,
    offline: bool = False,
    weights: bool = True,
    origin: str = "--model",
    say: Callable[[str], None] = on_stderr,
) -> Base:
    """The base that is named; the built-in one where none is. Without `weights` only what describes it is fetched.

    Raises UsageError for what is no model here or on the hub; `origin` is what it was named by.
    """
    base = _named(model, offline=offline, weights=weights, origin=origin, say=say)
    if model.flavor is not None and not base.folder.is_file():
        message = f"model.flavor = {model.flavor}: {base.named} is a folder, whose scheduler tells."
        raise UsageError(Problem(message, "Remove model.flavor."))
    places = dict(base.places)
    checkpoint = None
    with known_as(places):
        if base.folder.is_file():
            from lora_trainer.models.single.recognize import recognize

            checkpoint = recognize(base.folder, model.flavor)
        replaced = find_parts(model, checkpoint or base.folder, places, offline=offline, weights=weights, say=say)
        if base.commit is None and checkpoint is None:  # of a hub's it was seen to
            refuse_missing(base.folder, replaced.parts)
    whole = base.whole and replaced.whole
    base = replace(base, whole=whole, held=replaced.held, places=places, note=checkpoint.note if checkpoint else "")
    if not replaced.parts and checkpoint is None:
        return base
    from lora_trainer.models.single.lay_out import lay_out

    with known_as(places), contextlib.nullcontext() if whole else without_weights():
        folder = lay_out(checkpoint or base.folder, replaced.parts, kept=whole)
    if not whole:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return replace(base, folder=folder, places={**places, str(folder): model.path or base.named})


def _named(model: ModelSection, *, offline: bool, weights: bool, origin: str, say: Callable[[str], None]) -> Base:
    """The base as it lies on the disk, a folder or a file."""
    if model.path is None:
        return Base(BASE_FOLDER, BASE_FOLDER.name)
    if (asked := as_hub_model(model.path, model.revision)) is not None:
        from lora_trainer.production.bases.hub import find_snapshot

        found = find_snapshot(asked, weights=weights, without_t5=model.without_t5, offline=offline, say=say)
        folder = found.folder / asked.file if asked.file is not None else found.folder
        places = {str(found.folder): asked.name} | ({str(folder): str(asked)} if asked.file else {})
        return Base(folder, str(asked), found.commit, found.whole, places=places)
    if not model.path.strip():
        raise UsageError(Problem(f"{origin} is empty.", "Name a model; without it the built-in base is used."))
    path = local_path(model.path)
    if path.name == INDEX and path.is_file():
        raise UsageError(Problem(f"{path} is the index of a model.", f"Name its folder: {path.parent}."))
    if not path.exists():
        raise UsageError(_no_model(model.path, origin))
    if model.revision is not None:
        message = f"model.revision = {model.revision!r} is of a hub; {model.path} lies on this disk."
        raise UsageError(Problem(message, "Remove model.revision, or name the model as owner/name."))
    if path.is_dir() and not (path / "model_index.json").exists():
        raise UsageError(_no_base(path, origin))
    return Base(path, path.name)


def describe_model(model: ModelSection) -> str:
    """The base as the user named it, for a line that people read."""
    if model.path is None:
        return str(BASE_FOLDER)
    return f"{model.path} at {model.revision[:12]}" if model.revision else model.path


def named_absolutely(model: ModelSection) -> dict[str, str]:
    """For the record: `path` as the user named it, good from any folder, and the `commit` of a hub's model."""
    path = {"path": str(BASE_FOLDER.resolve()) if model.path is None else absolute(model.path)}
    return path | ({"commit": model.revision} if model.revision else {})


def is_builtin(model: ModelSection) -> bool:
    return model.path is None or local_path(model.path).resolve() == BASE_FOLDER


def _no_base(folder: Path, origin: str) -> Problem:
    """What a folder is that is no base."""
    files = sorted(path.name for path in folder.iterdir())
    checkpoints = [name for name in files if name.endswith(".safetensors")]
    if "adapter_config.json" in files or "pytorch_lora_weights.safetensors" in files:
        return Problem(
            f"{folder} holds a LoRA, not a model to train on.", f"Name the base that it was trained on as {origin}."
        )
    if "config.json" in files:
        message = f"{folder} is one part of a model: it has config.json and no model_index.json."
        whole = folder.absolute().parent
        return Problem(message, f"Name all of it: {whole}." if (whole / INDEX).is_file() else EXPECTED)
    if checkpoints:
        named = ", ".join(str(folder / name) for name in checkpoints[:5])
        return Problem(
            f"{folder} holds single checkpoints and no model_index.json.", f"Name one of its files: {named}."
        )
    what = "is empty" if not files else "holds no model_index.json"
    inside = [path.parent for path in folder.glob("*/model_index.json")]
    return Problem(f"{folder} {what}.", f"Did you mean {inside[0]}?" if len(inside) == 1 else EXPECTED)


def _no_model(text: str, origin: str) -> Problem:
    """Why nothing is there, and how models are named."""
    if page := page_of_the_web(text, origin):
        return page
    path, parts = local_path(text), text.split("/")
    if path.is_symlink():
        return Problem(f"{text} is a link to {path.readlink()}, where nothing is.", f"Check {origin}.")
    if (asked := as_hub_part(text)) is not None and asked.revision:
        return Problem(f"There is no model at {text}.", f"Name it as {asked}, with model.revision={asked.revision}.")
    if len(parts) == 2 and Path(parts[0]).is_dir():
        message = f"There is no model at {text}; the folder {parts[0]} is here, so it is no id of a hub."
        return Problem(message, f"Check {origin}.")
    where = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
    fix = f"Check {origin}. A base is a folder, a .safetensors file, or owner/name of a hub."
    return Problem(f"There is no model at {text}{where}.", fix)
