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

from lora_trainer.export.layout import split_numbers  # noqa: E402
from lora_trainer.export.weights import shapes_of  # noqa: E402
from lora_trainer.models import FAMILIES  # noqa: E402
from lora_trainer.models.published import SHAPES, public_forms  # noqa: E402


def layers_of(family: str) -> list[dict[str, list[Any]]]:
    """For each published denoiser of a family: by the names of its layers, with `{}` for each number, the last of each number and
    the shapes."""
    denoiser, models = FAMILIES[family].denoiser, []
    for config in public_forms(family):
        with torch.device("meta"):
            shapes = shapes_of({denoiser.component: denoiser.make(config)})
        found: dict[str, list[tuple[list[int], tuple[int, ...]]]] = {}
        for module, shape in shapes.items():
            name, numbers = split_numbers(module.partition(".")[2])
            found.setdefault(name, []).append((numbers, tuple(shape)))
        model = {}
        for name, layers in sorted(found.items()):
            last = [max(numbers) for numbers in zip(*(numbers for numbers, _ in layers), strict=True)]
            model[name] = [last, [list(shape) for shape in sorted({shape for _, shape in layers})]]
        models.append(model)
    return models


def main() -> None:
    found: dict[str, Any] = {family: layers_of(family) for family in FAMILIES}
    lines = []
    for family, forms in found.items():
        listed = [
            "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in form.items()) + "\n }"
            for form in forms
        ]
        lines.append(f" {json.dumps(family)}: [{', '.join(listed)}]")
    SHAPES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
