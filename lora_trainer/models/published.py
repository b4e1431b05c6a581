"""The published model of each family, as its JSON file describes it: for planning and measuring without a folder. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from lora_trainer.core.families import FOLDER, families
from lora_trainer.lora_format.layouts import PublishedLayers, PublishedModel
from lora_trainer.models.family import Architecture, ModelFacts


@cache
def published_layers() -> dict[str, Sequence[PublishedModel]]:
    """The layers of each family's published denoisers, as `scripts/write_layer_shapes.py` writes them."""
    return {
        family: [{name: PublishedLayers(*each) for name, each in model.items()} for model in document["layers"]]
        for family, document in families().items()
        if "layers" in document
    }


def public_architecture(name: str) -> Architecture:
    """The published model of a family, for planning and measuring where there is no folder.

    Its path is the file that describes it: whatever lies where the command was started, it is no folder of a model.
    """
    document = families()[name]
    facts = ModelFacts(path=FOLDER / f"{name}.json", named=name, **{"family": name, **document["facts"]})
    return Architecture(facts, document["denoiser"])


def public_forms(name: str) -> list[dict[str, Any]]:
    """Configs of the denoisers of all published models of a family, as far as their layers' shapes differ."""
    document = families()[name]
    return [document["denoiser"], *({**document["denoiser"], **other} for other in document.get("others", ()))]
