"""What a user names as the base becomes a folder in diffusers' layout. No torch.

A folder is taken as it is. A model of a hub is found in the user's Hugging Face cache, else fetched into it. Nothing
below this file knows of anything but folders.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import printable_lines
from lora_trainer.core.launch import is_main_process
from lora_trainer.production.hub import HubModel, find_snapshot

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(?:/(?P<file>[^\\]+\.safetensors))?", re.ASCII)
FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
WEB = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[^/?#]+/[^/?#]+)")


@dataclass(frozen=True)
class Base:
    """`folder` is in diffusers' layout; `named` is what people call it: an id of a hub, or the last part of a path.

    `commit` is the one that a model of a hub was taken from; of one that is not `whole` the configs alone are here.
    """

    folder: Path
    named: str
    commit: str | None = None
    whole: bool = True


def on_stderr(line: str) -> None:
    """A line for people, from the main process only."""
    if is_main_process():
        sys.stderr.write(printable_lines(line) + "\n")


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
    if model.path is None:
        return Base(BASE_FOLDER, BASE_FOLDER.name)
    if (asked := as_hub_model(model.path, model.revision)) is not None:
        found = find_snapshot(asked, weights=weights, without_t5=model.without_t5, offline=offline, say=say)
        return Base(found.folder, str(asked), found.commit, found.whole)
    path = local_path(model.path)
    if not path.exists():
        raise UsageError(_no_model(model.path, origin))
    if model.revision is not None:
        message = f"model.revision = {model.revision!r} is of a hub; {model.path} lies on this disk."
        raise UsageError(Problem(message, "Remove model.revision, or name the model as owner/name."))
    return Base(path, path.name)


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
    return HubModel(found["name"], revision, found["file"])


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
