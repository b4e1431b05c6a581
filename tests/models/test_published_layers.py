"""The stored layers of published models, by which LoRA files without a header are known, are those that diffusers builds."""

from __future__ import annotations

import pytest

from lora_trainer.core.families import families
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.published import published_layers
from write_layer_shapes import layers_of

FAST = ("sd15", "flux2", "anima")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]
)
def test_stored_layers_are_up_to_date(family: str):
    """`scripts/write_layer_shapes.py` writes them."""
    assert families()[family]["layers"] == layers_of(family)


def test_every_family_has_its_layers():
    assert set(published_layers()) == set(FAMILIES)
