"""What is known of every model family without its code: the JSON file of each in `models/families`.

| key | what |
|---|---|
| `title`, `other_names` | what people call it; without dots and dashes, for the hint of a wrong `model.family` |
| `facts`, `denoiser`, `others`, `phases` | the published model: its facts, its denoiser's config, how others of the family differ, its memory |
| `hub_models` | its models on the hub by the names of `lora-trainer models` (`run/bases/catalog.py`) |
| `comfyui` | the nodes that load it in ComfyUI (`report/comfyui.py`); absent where they are not known |
| `single_file` | of checkpoints: where text encoders lie, the hub's models with their tokenizers, configs that no file holds |
| `other_trainers` | what each trainer calls the family, and the defaults that it has there |
| `layers` | the published denoisers' layers, by `scripts/write_layer_shapes.py` |
| `memory_profile` | the memory of its training step as it was traced (`memory_plan/profiles.py`) |
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "models" / "families"


@cache
def families() -> dict[str, dict[str, Any]]:
    """The file of each family by its name, in alphabetical order."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def known_to(trainer: str) -> dict[str, Any]:
    """What another trainer calls each family that it trains, and its defaults there, by our name."""
    listed = {name: document.get("other_trainers", {}).get(trainer) for name, document in families().items()}
    return {name: entry for name, entry in listed.items() if entry is not None}


def is_flow(name: str) -> bool:
    """Whether a family's models learn a flow, not noise."""
    return bool(families()[name]["facts"]["prediction"] == "flow")


def titles() -> str:
    """All families, for a sentence: `A, B and C`."""
    *first, last = (document["title"] for document in families().values())
    return f"{', '.join(first)} and {last}"
