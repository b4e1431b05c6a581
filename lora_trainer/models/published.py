"""The published model of each family, as its JSON file describes it: for planning and measuring without a folder. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lora_trainer.export.layout import PublishedLayers, PublishedModel
from lora_trainer.models import FAMILIES
from lora_trainer.models.family import Architecture, ModelFacts

SHAPES = Path(str(files("lora_trainer.models") / "architectures" / "layer_shapes.json"))


@cache
def published_layers() -> dict[str, Sequence[PublishedModel]]:
    """The layers of each family's published denoisers, as `scripts/write_layer_shapes.py` writes them."""
    document = json.loads(SHAPES.read_text(encoding="utf-8"))
    return {
        family: [{name: PublishedLayers(*each) for name, each in model.items()} for model in models]
        for family, models in document.items()
    }


def published_file(name: str) -> Path:
    """The file that describes a family's published model; or `small`, 30 M weights."""
    own = FAMILIES[name].published if name in FAMILIES else None
    return own or Path(str(files("lora_trainer.models") / "architectures" / f"{name}.json"))


def read_published(name: str) -> dict[str, Any]:
    """Its `facts`, `phases` and `denoiser`."""
    document: dict[str, Any] = json.loads(published_file(name).read_text(encoding="utf-8"))
    return document


def public_architecture(name: str) -> Architecture:
    """The published model of a family, for planning and measuring where there is no folder; or `small`.

    Its path is the file that describes it: whatever lies where the command was started, it is no folder of a model.
    """
    document = read_published(name)
    facts = ModelFacts(path=published_file(name), named=name, **{"family": name, **document["facts"]})
    return Architecture(facts, document["denoiser"])


def public_forms(name: str) -> list[dict[str, Any]]:
    """Configs of the denoisers of all published models of a family, as far as their layers' shapes differ."""
    document = read_published(name)
    return [document["denoiser"], *({**document["denoiser"], **other} for other in document.get("others", ()))]
