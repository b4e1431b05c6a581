"""Every name that the config allows has its function, and vice versa."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from lora_trainer.config import schema
from lora_trainer.evaluation.lora_check import LORA_CHECKS
from lora_trainer.models import FAMILIES
from lora_trainer.models.attention.kinds import KINDS
from lora_trainer.models.folder import FAMILY_OF_PIPELINE
from lora_trainer.optim.schedules import SHAPES
from lora_trainer.run.choices import DTYPES
from lora_trainer.run.release import RELEASED_STEP


@pytest.mark.parametrize(
    ("names", "functions"),
    [
        (schema.FamilyName, FAMILIES),
        (schema.SchedulerName, SHAPES),
        (schema.Precision, DTYPES),
        (schema.ExportWeightsName, RELEASED_STEP),
        (schema.LoraCheckName, LORA_CHECKS),
    ],
)
def test_each_literal_equals_its_dict(names, functions):
    assert set(get_args(names)) == set(functions)


def test_attention_names_are_probed_or_tell_how_to_choose():
    assert set(get_args(schema.AttentionName)) == {"auto", "fastest", *KINDS}


def test_every_detected_pipeline_has_a_family():
    assert set(FAMILY_OF_PIPELINE.values()) <= set(FAMILIES)


def test_families_name_themselves():
    assert all(name == family.name for name, family in FAMILIES.items())


# Where a family may be named: the list that settings are checked against.
NAMES_FAMILIES = {"lora_trainer/config/schema/types.py"}


def test_no_code_outside_models_names_a_family(checkout: Path) -> None:
    """In examples `./my-sd15` is a folder's name, and `model.family=sdxl` is what a user types."""
    name = re.compile(rf"(?<!my-)(?<!model\.family=)\b({'|'.join(FAMILIES)})\b")
    files = sorted((checkout / "lora_trainer").rglob("*.py"))
    assert len(files) > 50
    found = {path.relative_to(checkout).as_posix() for path in files if name.search(path.read_text(encoding="utf-8"))}
    # Importers read the keys of other programs, which name families differently.
    elsewhere = ("lora_trainer/models/", "lora_trainer/importers/")
    assert {path for path in found if not path.startswith(elsewhere)} == NAMES_FAMILIES
