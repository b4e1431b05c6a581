"""Turns the model that a user names into a folder in diffusers' layout. No torch.

A folder is used as it is. A model of a hub is found in the user's Hugging Face cache, else downloaded into it. A single
checkpoint, or a base model with another VAE or text encoders, is laid out in the user's cache. All other code reads
folders only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.core.errors import Problem, UsageError, known_as
from lora_trainer.core.findings import printable_lines
from lora_trainer.core.gguf_file import PACKED_TYPES, read_gguf_header
from lora_trainer.core.imports import is_installed
from lora_trainer.core.launch import is_main_process
from lora_trainer.core.tensorfile import METADATA, is_gguf
from lora_trainer.models.folder import EXPECTED, INDEX, MODULAR_INDEX, index_path, without_weights
from lora_trainer.run.bases.catalog import catalog
from lora_trainer.run.bases.names import FILES, absolute, as_hub_model, as_hub_part, local_path, page_of_the_web
from lora_trainer.run.bases.parts import find_parts, refuse_missing

if TYPE_CHECKING:
    from lora_trainer.config.schema.inputs import ModelSection

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@dataclass(frozen=True)
class Base:
    """`folder` is in diffusers' layout; `named` is its name for people: an id of a hub, or the last part of a path.

    `commit` is that of a model of a hub; `pinned` has other settings that name a hub's models, with their commits.
    One that is not `whole` has only its configs here, a checkpoint only its header.
    `note` is what was assumed of a checkpoint, `form` in which quantized form it is stored, `title` what its metadata
    calls it, and `prediction_by` what in it shows the prediction type. `places` maps paths to names for people.
    """

    folder: Path
    named: str
    commit: str | None = None
    whole: bool = True
    note: str = ""
    form: str = ""
    title: str = ""
    prediction_by: str = ""
    pinned: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)


def on_stderr(line: str) -> None:
    """Print a line, from the main process only."""
    if is_main_process():
        sys.stderr.write(printable_lines(line) + "\n")


def go_offline() -> None:
    """From here on no library uses the network, including those that are already imported."""
    for name in OFFLINE_VARIABLES:
        os.environ[name] = "1"
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        vars(constants)["HF_HUB_OFFLINE"] = True


def silent(line: str) -> None:
    """Print nothing."""


def find_base(
    model: ModelSection,
    *,
    offline: bool = False,
    weights: bool = True,
    origin: str = "--model",
    say: Callable[[str], None] = on_stderr,
) -> Base:
    """The base model that is named; the built-in one where none is. Without `weights` only configs are downloaded.

    Raises UsageError for what is no model here or on the hub; `origin` is the flag or setting that names it.
    """
    base = _named(model, offline=offline, weights=weights, origin=origin, say=say)
    of_files = {"model.flavor": model.flavor, "model.prediction_type": model.prediction_type}
    for name, value in of_files.items():
        if value is not None and not base.folder.is_file():
            message = f"{name} is {value}, but {base.named} is a folder with a scheduler of its own."
            raise UsageError(Problem("setting_not_for_folder", message, f"Remove {name}."))
    places = dict(base.places)
    checkpoint = None
    with known_as(places):
        if base.folder.is_file():
            from lora_trainer.models.single.recognize import recognize

            checkpoint = recognize(base.folder, model.flavor, model.prediction_type)
            form = (
                f"{base.folder.name} is stored as {checkpoint.form}: it is dequantized layer by layer while it loads."
            )
            notes = (checkpoint.note, form if checkpoint.form else "")
            base = replace(
                base,
                note=" ".join(filter(None, notes)),
                form=checkpoint.form,
                title=checkpoint.title,
                prediction_by=checkpoint.prediction_by,
            )
        replaced = find_parts(model, checkpoint or base.folder, places, offline=offline, weights=weights, say=say)
        if weights:
            refuse_without_gguf([base.folder, *filter(None, replaced.parts.values())])
        if base.commit is None and checkpoint is None:  # a hub's model is already checked
            refuse_missing(base.folder, replaced.parts)
    whole = base.whole and replaced.whole
    base = replace(base, whole=whole, pinned=replaced.pinned, places=places)
    if not replaced.parts and checkpoint is None:
        return base
    from lora_trainer.models.single.lay_out import lay_out

    with known_as(places), naming_parts_here(), contextlib.nullcontext() if whole else without_weights():
        folder = lay_out(checkpoint or base.folder, replaced.parts, kept=whole)
    if not whole:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return replace(base, folder=folder, places={**places, str(folder): model.path or base.named})


@contextlib.contextmanager
def naming_parts_here() -> Iterator[None]:
    """Adds to the problem of a part that a checkpoint lacks where programs on this computer have such parts."""
    try:
        yield
    except UsageError as error:
        from lora_trainer.run.bases.programs import TEXT_ENCODERS, VAES, find_programs

        wanted: dict[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {
            "vae_missing": ("model.vae", VAES),
            "model_is_quantized": ("model.text_encoders", TEXT_ENCODERS),
        }
        problems = []
        for problem in error.problems:
            fix = problem.fix
            for program in find_programs() if problem.code in wanted else ():
                setting, names = wanted[problem.code]
                folders = program.model_folders(names[program.kind])
                file = "/FILE" if setting == "model.vae" else ""
                fix += "".join(f" {program.title} is here: --set {setting}={folder}{file}." for folder in folders)
            problems.append(replace(problem, fix=fix))
        raise UsageError(problems) from error


def refuse_without_gguf(files: Iterable[Path]) -> None:
    """Raise UsageError for quantized GGUF files where the package that dequantizes them is not installed."""
    if is_installed("gguf"):
        return
    for file in filter(is_gguf, files):
        header = read_gguf_header(file)
        packed = sorted(
            {row["dtype"] for name, row in header.items() if name != METADATA and row["dtype"] in PACKED_TYPES}
        )
        if packed:
            message = f"{file} holds {packed[0]}, which the package gguf dequantizes; it is not installed."
            raise UsageError(Problem("library_missing", message, "pip install 'lora-trainer[gguf]'"))


def _named(model: ModelSection, *, offline: bool, weights: bool, origin: str, say: Callable[[str], None]) -> Base:
    """The base model as it is on the disk, a folder or a file."""
    if model.path is None:
        return Base(BASE_FOLDER, BASE_FOLDER.name)
    if (hub := as_hub_model(model.path, model.revision)) is not None:
        from lora_trainer.run.bases.hub import find_snapshot

        found = find_snapshot(hub, weights=weights, without_t5=model.without_t5, offline=offline, say=say)
        folder = found.folder / hub.file if hub.file is not None else found.folder
        places = {str(found.folder): hub.name} | ({str(folder): str(hub)} if hub.file else {})
        return Base(folder, str(hub), found.commit, found.whole, places=places)
    if not model.path.strip():
        raise UsageError(
            Problem("setting_empty", f"{origin} is empty.", "Set a model, or remove it to use the built-in one.")
        )
    path = local_path(model.path)
    if path.name in (INDEX, MODULAR_INDEX) and path.is_file():
        raise UsageError(
            Problem("model_is_index", f"{path} is the index of a model.", f"Use its folder: {path.parent}.")
        )
    if not path.exists():
        raise UsageError(_no_model(model.path, origin))
    if model.revision is not None:
        message = f"model.revision is {model.revision!r}, but {model.path} is on this disk, not on a hub."
        raise UsageError(
            Problem("revision_of_local_model", message, "Remove model.revision, or set the model as owner/name.")
        )
    if path.is_dir() and not index_path(path).exists():
        raise UsageError(_no_base(path, origin))
    return Base(path, path.name)


def describe_model(model: ModelSection) -> str:
    """The base model as the user named it, for messages."""
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
    """Why a folder is not a base model."""
    files = sorted(path.name for path in folder.iterdir())
    checkpoints = [name for name in files if name.endswith((".safetensors", ".gguf"))]
    if "adapter_config.json" in files or "pytorch_lora_weights.safetensors" in files:
        return Problem(
            "model_is_lora",
            f"{folder} holds a LoRA, not a model to train on.",
            f"Set {origin} to the LoRA's base model.",
        )
    if "config.json" in files:
        message = f"{folder} is one part of a model: it has config.json and no model_index.json."
        whole = folder.absolute().parent
        return Problem(
            "one_part_of_model", message, f"Use the whole model: {whole}." if index_path(whole).is_file() else EXPECTED
        )
    if checkpoints:
        named = ", ".join(str(folder / name) for name in checkpoints[:5])
        return Problem(
            "model_is_checkpoints",
            f"{folder} holds single checkpoints and no model_index.json.",
            f"Use one of its files: {named}.",
        )
    what = "is empty" if not files else "holds no model_index.json"
    inside = [path.parent for path in folder.glob("*/*model_index.json")]
    return Problem("model_missing", f"{folder} {what}.", f"Did you mean {inside[0]}?" if len(inside) == 1 else EXPECTED)


def _no_model(text: str, origin: str) -> Problem:
    """Why there is no model at `text`, and how models are named."""
    if page := page_of_the_web(text, origin):
        return page
    path, parts = local_path(text), text.split("/")
    if path.is_symlink():
        return Problem(
            "link_broken", f"{text} is a link to {path.readlink()}, which does not exist.", f"Check {origin}."
        )
    if (hub := as_hub_part(text)) is not None and hub.revision:
        return Problem(
            "model_missing", f"There is no model at {text}.", f"Write it as {hub}, with model.revision={hub.revision}."
        )
    if path.suffix in FILES:
        return _no_file(text, path, origin)
    if (listed := catalog().get(text.lower())) is not None:
        message = f"There is no model at {text}; {text} is a name of `lora-trainer models`."
        return Problem(
            "model_missing", message, f"Write {origin} {listed.hub_id}, or a file: lora-trainer models get {text}"
        )
    if len(parts) == 2 and parts[0] not in (".", "..", "~") and Path(parts[0]).is_dir():
        message = f"There is no model at {text}; the folder {parts[0]} exists, so this is not an id of a hub."
        return Problem("model_missing", message, f"Check {origin}.")
    where = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
    fix = f"Check {origin}. A base model is a folder, a .safetensors or .gguf file, or owner/name of a hub."
    return Problem("model_missing", f"There is no model at {text}{where}.", fix)


def _no_file(text: str, path: Path, origin: str) -> Problem:
    """Why there is no checkpoint at `text`: the files beside it, or the folder that is missing."""
    if not path.parent.is_dir():
        message = f"There is no model at {text}: the folder {path.parent} does not exist."
        return Problem("model_missing", message, f"Check {origin}.")
    there = sorted(each.name for each in path.parent.iterdir() if each.suffix in FILES)
    fix = f"That folder holds {', '.join(there[:5])}." if there else f"Check {origin}: that folder holds no checkpoint."
    return Problem("model_missing", f"There is no file {path.name} in {path.parent.absolute()}.", fix)
