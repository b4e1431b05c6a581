"""Well-known base models by short names: their id on the hub, license, size. From the families' JSON files. No torch, no request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from lora_trainer.core.errors import Problem, UsageError, nearest
from lora_trainer.core.families import families
from lora_trainer.run.bases.names import HUB_ID

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class CatalogModel:
    """A model as its family's JSON file lists it. None stands for what was not known when the list was written.

    `download_bytes` is computed: the model's weights times the bytes of each in its repository. `checkpoints` are the names,
    without ending, of the same model as one file. `is_planned`: whether the memory plan of its family is that of this model.
    """

    name: str
    family: str
    title: str
    hub_id: str
    license: str | None
    is_gated: bool | None
    download_bytes: int | None
    checkpoints: tuple[str, ...]
    is_planned: bool

    @property
    def page(self) -> str:
        return f"https://huggingface.co/{self.hub_id}"


@cache
def catalog() -> dict[str, CatalogModel]:
    """All listed models by name, those of a family one after the other."""
    return {
        name: _entry(name, family, document["title"], entry)
        for family, document in families().items()
        for name, entry in document.get("hub_models", {}).items()
    }


def _entry(name: str, family: str, title: str, entry: dict[str, Any]) -> CatalogModel:
    size = None
    if "parameters_million" in entry:
        size = entry["parameters_million"] * 1_000_000 * BYTES[entry["stored_in"]]
    return CatalogModel(
        name,
        family,
        title,
        entry["id"],
        entry["license"],
        entry["gated"],
        size,
        tuple(entry.get("checkpoints", ())),
        entry.get("planned", True),
    )


def find_model(text: str) -> CatalogModel | None:
    """The listed model of that name or hub id, in any case; None for another id of a hub.

    Raises UsageError for what is neither.
    """
    for model in catalog().values():
        if text.lower() in (model.name, model.hub_id.lower()):
            return model
    if HUB_ID.fullmatch(text):
        return None
    fix = f"{nearest(text.lower(), catalog())} Or name a model of the hub as owner/name."
    raise UsageError(Problem("unknown_model", f"There is no model named {text} in the list.", fix))
