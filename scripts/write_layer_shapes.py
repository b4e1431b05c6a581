"""Write `lora_trainer/models/architectures/layer_shapes.json`: the shapes of all layers of the published denoisers.

    python scripts/write_layer_shapes.py

The family of a LoRA file without a header is known by them (`models/published.py`). Run it after a change of a published model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]

from lora_trainer.export.layout import without_numbers  # noqa: E402
from lora_trainer.export.weights import shapes_of  # noqa: E402
from lora_trainer.models import FAMILIES  # noqa: E402
from lora_trainer.models.published import SHAPES, public_forms  # noqa: E402


def shapes_of_forms(family: str) -> list[dict[str, list[list[int]]]]:
    """For each published denoiser of a family the shapes of its layers, by their names with `{}` for each number."""
    denoiser, forms = FAMILIES[family].denoiser, []
    for config in public_forms(family):
        with torch.device("meta"):
            shapes = shapes_of({denoiser.component: denoiser.make(config)})
        found: dict[str, set[tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            found.setdefault(without_numbers(name.partition(".")[2]), set()).add(tuple(shape))
        forms.append({name: [list(shape) for shape in sorted(each)] for name, each in sorted(found.items())})
    return forms


def main() -> None:
    found: dict[str, Any] = {family: shapes_of_forms(family) for family in FAMILIES}
    lines = []
    for family, forms in found.items():
        listed = [
            "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(shapes)}" for name, shapes in form.items()) + "\n }"
            for form in forms
        ]
        lines.append(f" {json.dumps(family)}: [{', '.join(listed)}]")
    SHAPES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
