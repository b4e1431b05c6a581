"""Every name that the config allows has its function, and vice versa."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from lora_trainer.config import schema
from lora_trainer.evaluation.lora_check import LORA_CHECKS
from lora_trainer.models.attention.backends import BACKENDS
from lora_trainer.models.families import FAMILIES
from lora_trainer.optim.schedules import SHAPES
from lora_trainer.run.choices import DTYPES


@pytest.mark.parametrize(
    ("names", "functions"),
    [
        (schema.SchedulerName, SHAPES),
        (schema.Precision, DTYPES),
        (schema.LoraCheckName, {**LORA_CHECKS, "auto": None, "off": None}),
    ],
)
def test_each_literal_equals_its_dict(names, functions):
    assert set(get_args(names)) == set(functions)


def test_attention_names_are_probed_or_tell_how_to_choose():
    assert set(get_args(schema.AttentionName)) == {"auto", "fastest", *BACKENDS}


def test_families_name_themselves():
    assert all(name == family.name for name, family in FAMILIES.items())


def test_no_code_outside_models_names_a_family(checkout: Path) -> None:
    """In examples `./my-sd15` is a folder's name, and `model.family=sdxl` is what a user types."""
    name = re.compile(rf"(?<!my-)(?<!model\.family=)\b({'|'.join(FAMILIES)})\b")
    files = sorted((checkout / "lora_trainer").rglob("*.py"))
    assert len(files) > 50
    found = {path.relative_to(checkout).as_posix() for path in files if name.search(path.read_text(encoding="utf-8"))}
    # Importers read the keys of other programs, which name families differently.
    elsewhere = ("lora_trainer/models/", "lora_trainer/importers/")
    assert {path for path in found if not path.startswith(elsewhere)} == set()


# What a name chooses has functions in its table: an adapter kind, a family, an optimizer (docs/architecture.md).
CHOSEN = re.compile(r"\b(family(\.name)?|denoiser\.component|lora\.type|optimizer\.name)$")
CHOSEN_NAMES = re.compile(r"family|denoiser\.component|lora\.type|optimizer\.name")  # a file without one is not parsed
ROOMS = ("lora_trainer/models/", "lora_trainer/importers/")


def test_no_code_compares_a_chosen_name_with_a_literal(checkout: Path) -> None:
    """`if family == "sd15"` outside its own room means that the seam lacks a function."""
    found, compared = [], 0
    for path in sorted((checkout / "lora_trainer").rglob("*.py")):
        name = path.relative_to(checkout).as_posix()
        text = path.read_text(encoding="utf-8")
        if not CHOSEN_NAMES.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            literal = any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in walked(sides))
            if literal and any(CHOSEN.search(ast.unparse(side)) for side in sides):
                compared += 1
                if not name.startswith(ROOMS):
                    found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert compared  # inside models and importers there are some
    assert found == []


def walked(nodes: list[ast.expr]) -> Iterator[ast.AST]:
    return (each for node in nodes for each in ast.walk(node))
