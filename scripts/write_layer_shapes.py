"""Write `layers` of `lora_trainer/models/families/NAME.json`: the shapes of all layers of the published denoisers.

    python scripts/write_layer_shapes.py FAMILY…

The family of a LoRA file without a header is known by them (`models/published.py`). Run it after a change of a published model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]

LONGEST = 120  # characters of a list or table on one line


def format_json(value: Any, indent: int = 0) -> str:
    """JSON in which a list of numbers, and what else fits on a line, takes one line."""
    flat = json.dumps(value, ensure_ascii=False)
    has_members = isinstance(value, dict) or (
        isinstance(value, list) and isinstance(value[0] if value else 0, dict | list)
    )
    if not has_members or indent + len(flat) <= LONGEST:
        return flat
    inner = "\n" + " " * (indent + 2)
    if isinstance(value, dict):
        members = [f"{json.dumps(key)}: {format_json(each, indent + 2)}" for key, each in value.items()]
    else:
        members = [format_json(each, indent + 2) for each in value]
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{opening}{inner}{f',{inner}'.join(members)}\n{' ' * indent}{closing}"


def layers_of(family: str) -> list[dict[str, list[Any]]]:
    """For each published denoiser of a family: by the names of its layers, with `{}` for each number, the last of each number and
    the shapes."""
    import torch

    from lora_trainer.export.layout import split_numbers
    from lora_trainer.export.weights import shapes_of
    from lora_trainer.models.families import FAMILIES
    from lora_trainer.models.published import public_forms

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
    from lora_trainer.core.families import FOLDER, families

    for family in sys.argv[1:] or families():
        document = {**families()[family], "layers": layers_of(family)}
        (FOLDER / f"{family}.json").write_text(format_json(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
