"""What a user names is a path here, or a model of a hub. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from lora_trainer.core.errors import Problem

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(?:/(?P<file>[^\\]+\.safetensors))?", re.ASCII)
FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
AT = re.compile(r"(?P<name>[^@]+)@(?P<revision>[^@/]+)(?P<file>/[^@]+)?")
WEB = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[^/?#]+/[^/?#]+)"
    r"(?:/(?:resolve|blob)/[^/?#]+/(?P<file>[^?#]+\.safetensors))?"
)


@dataclass(frozen=True)
class HubModel:
    """`owner/name` at a branch, tag or commit. `file` names a single checkpoint in it, `parts` those that are wanted of a
    model: all where none is named. `origin` is what it was named by.
    """

    name: str
    revision: str | None = None
    file: str | None = None
    parts: tuple[str, ...] = ()
    origin: str = "--model"

    @property
    def asked(self) -> str:
        return self.revision or "main"

    def __str__(self) -> str:
        return "/".join(filter(None, (self.name, self.file)))


def local_path(text: str) -> Path:
    return Path(text).expanduser()


def absolute(text: str) -> str:
    """The same base or part named from the root of the disk; an id of a hub stays as it is."""
    return text if as_hub_part(text) is not None else str(local_path(text).resolve())


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


def as_hub_part(text: str, parts: tuple[str, ...] = (), origin: str = "--model") -> HubModel | None:
    """The same for parts of a model, whose revision follows the name: `owner/name@revision`."""
    at = AT.fullmatch(text)
    if at is not None and local_path(text).exists():
        return None
    found = as_hub_model(text) if at is None else as_hub_model(at["name"] + (at["file"] or ""), at["revision"])
    return None if found is None else replace(found, parts=parts, origin=origin)


def page_of_the_web(text: str, origin: str) -> Problem | None:
    """How what lies behind an address is named."""
    if not text.startswith(("http://", "https://")):
        return None
    web = WEB.match(text)
    named = "/".join(filter(None, (web["id"], web["file"]))) if web else ""
    fix = f"Name the model as {named}." if web else f"Download the file, and name it as {origin}."
    return Problem("model_name_invalid", f"{text} is a page of the web.", fix)
