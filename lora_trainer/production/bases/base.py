"""What a user names as the base becomes a folder in diffusers' layout. No torch.

A folder is taken as it is. A model of a hub is found in the user's Hugging Face cache, else fetched into it. A single
checkpoint, or a base whose autoencoder or text encoders are others, is laid out in the user's cache, again wherever that
was deleted. Nothing below this file knows of anything but folders.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import Problem, UsageError, known_as
from lora_trainer.core.findings import printable_lines
from lora_trainer.core.launch import is_main_process
from lora_trainer.models import FAMILIES
from lora_trainer.models.folder import EXPECTED, detect_family, named_parts, tokenizer_of

if TYPE_CHECKING:  # read when a base asks for them: every command begins with this file
    from lora_trainer.models.single.recognise import Checkpoint
    from lora_trainer.production.bases.hub import HubModel

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(?:/(?P<file>[^\\]+\.safetensors))?", re.ASCII)
FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
WEB = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[^/?#]+/[^/?#]+)")


OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@dataclass(frozen=True)
class Base:
    """`folder` is in diffusers' layout; `named` is what people call it: an id of a hub, or the last part of a path.

    `commit` is the one that a model of a hub was taken from; of one that is not `whole` the configs alone are here,
    or of a checkpoint its header.
    `note` says what was assumed of a checkpoint that does not tell it.
    """

    folder: Path
    named: str
    commit: str | None = None
    whole: bool = True
    note: str = ""


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
    if model.vae is not None and as_hub_model(model.vae) is not None:
        message = f"model.vae = {model.vae}: there is no such path, and an autoencoder is not fetched from a hub."
        fix = f"Fetch it first with `hf download {'/'.join(model.vae.split('/')[:2])}`, and name the folder that this prints."
        raise UsageError(Problem(message, fix))
    base = _named(model, offline=offline, weights=weights, origin=origin, say=say)
    if base.folder.is_file():
        with known_as(base.folder, str(base.folder) if base.whole else base.named):
            return _of_checkpoint(model, base)
    parts = _parts(model, base.folder) if base.whole else {}
    if not parts:
        return base
    from lora_trainer.models.single.lay_out import lay_out

    return replace(base, folder=lay_out(base.folder, parts))


def _of_checkpoint(model: ModelSection, base: Base) -> Base:
    """The folder that a checkpoint becomes; its header is read once."""
    from lora_trainer.models.single.lay_out import lay_out
    from lora_trainer.models.single.recognise import recognise

    checkpoint = recognise(base.folder)
    folder = lay_out(checkpoint, _parts(model, base.folder, checkpoint))
    if not base.whole:  # of a header alone, whose file goes too
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return replace(base, folder=folder, note=checkpoint.note)


def _named(model: ModelSection, *, offline: bool, weights: bool, origin: str, say: Callable[[str], None]) -> Base:
    """The base as it lies on the disk, a folder or a file."""
    if model.path is None:
        return Base(BASE_FOLDER, BASE_FOLDER.name)
    if (asked := as_hub_model(model.path, model.revision)) is not None:
        from lora_trainer.production.bases.hub import find_snapshot

        found = find_snapshot(asked, weights=weights, without_t5=model.without_t5, offline=offline, say=say)
        folder = found.folder / asked.file if asked.file is not None else found.folder
        return Base(folder, str(asked), found.commit, found.whole)
    path = local_path(model.path)
    if not path.exists():
        raise UsageError(_no_model(model.path, origin))
    if model.revision is not None:
        message = f"model.revision = {model.revision!r} is of a hub; {model.path} lies on this disk."
        raise UsageError(Problem(message, "Remove model.revision, or name the model as owner/name."))
    if path.is_dir() and not (path / "model_index.json").exists():
        raise UsageError(_no_base(path, origin))
    return Base(path, path.name)


def _parts(model: ModelSection, base: Path, checkpoint: Checkpoint | None = None) -> dict[str, Path | None]:
    """What takes the place of the parts of a base, a folder or a checkpoint, and what it lacks.

    Raises UsageError, all problems at once.
    """
    if model.vae is None and model.text_encoders is None and not model.without_t5:
        return {}
    from lora_trainer.models.single.fitting import text_folders, vae_folder
    from lora_trainer.models.single.lay_out import lacking_parts

    parts: dict[str, Path | None] = {}
    problems: list[Problem] = []
    try:
        if model.without_t5:
            family = detect_family(base) if checkpoint is None else checkpoint.family
            spare = FAMILIES[family].spare_texts
            left_out = [part for name in spare for part in (name, tokenizer_of(name))]
            parts |= dict.fromkeys(left_out if checkpoint is not None else named_parts(base, left_out))
        if model.text_encoders is not None:
            wanted = lacking_parts(checkpoint or base) - set(parts)
            parts |= text_folders(local_path(model.text_encoders), wanted)
    except UsageError as error:
        problems.extend(error.problems)
    if model.vae is not None:
        try:
            parts["vae"] = vae_folder(local_path(model.vae))
        except UsageError as error:
            problems.extend(error.problems)
    if problems:
        raise UsageError(problems)
    return parts


def local_path(text: str) -> Path:
    return Path(text).expanduser()


def told(model: ModelSection) -> str:
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


def absolute(text: str) -> str:
    """The same base named from the root of the disk; an id of a hub stays as it is."""
    return text if as_hub_model(text) is not None else str(local_path(text).resolve())


def as_hub_model(text: str, revision: str | None = None) -> HubModel | None:
    """`owner/name` or `owner/name/file.safetensors`, where it is no path: nothing of that name lies here.

    Where a folder `owner` is here, it is a mistyped path.
    """
    found = HUB_ID.fullmatch(text)
    if found is None or ".." in text or local_path(text).exists() or Path(text.partition("/")[0]).exists():
        return None
    if found["file"] is None and text.endswith(FILES):
        return None
    from lora_trainer.production.bases.hub import HubModel

    return HubModel(found["name"], revision, found["file"])


def _no_base(folder: Path, origin: str) -> Problem:
    """What a folder is that is no base."""
    files = sorted(path.name for path in folder.iterdir())
    checkpoints = [name for name in files if name.endswith(".safetensors")]
    if "adapter_config.json" in files or "pytorch_lora_weights.safetensors" in files:
        return Problem(
            f"{folder} holds a LoRA, not a model to train on.", f"Name the base that it was trained on as {origin}."
        )
    if "config.json" in files:
        return Problem(f"{folder} is one part of a model: it has config.json and no model_index.json.", EXPECTED)
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
    if web := WEB.match(text):
        return Problem(f"{text} is a page of the web.", f"Name the model as {web['id']}.")
    parts = text.split("/")
    if len(parts) == 2 and Path(parts[0]).is_dir():
        message = f"There is no model at {text}; the folder {parts[0]} is here, so it is no id of a hub."
        return Problem(message, f"Check {origin}.")
    fix = f"Check {origin}. A base is a folder, a .safetensors file, or owner/name of a hub."
    return Problem(f"There is no model at {text}.", fix)
