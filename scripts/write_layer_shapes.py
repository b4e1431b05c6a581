"""Write `layers` of `lora_trainer/models/families/NAME.json`: the shapes of all layers of the published denoisers.

    python scripts/write_layer_shapes.py FAMILY…

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


from lora_trainer.core.families import FOLDER, families  # noqa: E402
from lora_trainer.core.io import write_text  # noqa: E402
from lora_trainer.lora_format.layouts import split_numbers  # noqa: E402
from lora_trainer.lora_format.weights import shapes_of  # noqa: E402
from lora_trainer.models.families import FAMILIES  # noqa: E402
from lora_trainer.models.published import public_forms  # noqa: E402

MEMORY_PROFILE = "memory_profile"  # thousands of numbers, which nobody reads: on one line
LONGEST = 120  # characters of a list or table on one line


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


def format_json(value: Any, indent: int = 0) -> str:
    """JSON in which a list of numbers, and whatever else fits on a line, takes one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if indent + len(flat) <= LONGEST or not isinstance(value, dict | list):
        return flat
    if isinstance(value, list) and not isinstance(value[0], dict | list):
        return flat
    if isinstance(value, list):
        return _lines("[", [format_json(each, indent + 2) for each in value], "]", indent)
    members = []
    for key, each in value.items():
        text = format_json(each, indent + 2)
        if key == MEMORY_PROFILE:
            text = json.dumps(each, separators=(",", ":"))
        members.append(f"{json.dumps(key)}: {text}")
    return _lines("{", members, "}", indent)


def _lines(opening: str, members: list[str], closing: str, indent: int) -> str:
    inner = "\n" + " " * (indent + 2)
    return opening + inner + f",{inner}".join(members) + "\n" + " " * indent + closing


def main() -> None:
    for family in sys.argv[1:] or FAMILIES:
        document = {**families()[family], "layers": layers_of(family)}
        write_text(FOLDER / f"{family}.json", format_json(document) + "\n")


if __name__ == "__main__":
    main()
