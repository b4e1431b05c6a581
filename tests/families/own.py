"""What tests over all families know of those that have a file of their own here: `NAME.py` with its tiny model."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType


def own_families() -> dict[str, ModuleType]:
    """By the family's name: `tiny_pipeline`, `tiny_transformer`, and what is expected of the family."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("test_"))
    return {name: import_module(f"tests.families.{name}") for name in names if name != "own"}
