"""The recipes of docs/recipes.md: their commands suit each family, and their steps are those of the program."""

from __future__ import annotations

import hashlib
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.options import suited
from lora_trainer.config.presets import family_layers, preset_layers
from lora_trainer.config.toml import parse_assignment
from lora_trainer.core.families import families
from lora_trainer.data.sample import Sample
from lora_trainer.data.split import split_validation
from lora_trainer.dataset_check.whole_set import check_plan
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.published import public_architecture
from lora_trainer.run.inputs import arithmetic
from tests.families.own import own_families

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text("utf-8")
IMAGES = {"subject": 15, "style": 60, "concept": 500}
HEADINGS = {
    "SD 1.5": "sd15",
    "SD 2": "sd2",
    "SDXL": "sdxl",
    "SD 3.5": "sd3",
    "FLUX.1": "flux",
    "FLUX.2 klein": "flux2",
    "Chroma": "chroma",
    "Z-Image": "z_image",
}
HEADINGS |= {"Qwen-Image": "qwen_image", "Qwen-Image 2.1": "qwen_image21", "Krea 2": "krea2", "Anima": "anima"}
HEADINGS |= {families()[name]["title"]: name for name in own_families()}


def commands() -> list[tuple[str, str]]:
    """Family and command line, of each section in turn."""
    sections = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [
        (HEADINGS[heading], line)
        for heading, body in sections
        if heading in HEADINGS
        for line in re.findall(r"^lora-trainer (train .*)$", body, flags=re.MULTILINE)
    ]


def test_each_family_has_three_recipes() -> None:
    assert set(HEADINGS.values()) == set(FAMILIES)
    found = [(family, line.split("--name ")[1].split()[0]) for family, line in commands()]
    assert found == [(family, name) for family in HEADINGS.values() for name in IMAGES]


@pytest.mark.parametrize(("family", "line"), commands())
def test_a_recipe_takes_the_documented_steps(family: str, line: str) -> None:
    words = shlex.split(line)
    given = {flag: value for flag, value in pairwise(words) if flag != "--set"}
    own = []
    for flag, text in pairwise(words):
        if flag == "--set":
            parsed = parse_assignment(text)
            assert isinstance(parsed, tuple)
            section, key, value = parsed
            own.append(Layer("--set", {section: {key: value}}))
    below = family_layers(family, builtin=False)
    resolved = resolve([*below, *preset_layers([given["--preset"]]).layers, *own])
    config = suited(resolved, public_architecture(family).facts.prediction).config
    recipe = given["--name"]
    samples = tuple(
        Sample(Path(f"{number}.png"), "", 1024, 1024, hashlib.sha256(bytes([number % 256, number // 256])).hexdigest())
        for number in range(IMAGES[recipe])
    )
    train, _ = split_validation(samples, config.validation.split, config.validation.split_seed)
    steps = arithmetic(config, train, config.train.effective_batch_size, processes=1)
    assert steps.unlimited is None, "the ceiling shortens it"
    tier = given["--preset"].partition(",")[0]
    (row,) = re.findall(rf"^\| `{family}` \| `{tier}` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    documented = row.split(" | ")[list(IMAGES).index(recipe)]
    assert documented == f"{steps.steps_per_epoch} x {steps.epochs} = {steps.total}"
    if len(train) < len(samples):
        assert f"{len(samples)} images ({len(train)} trained)" in PAGE
    exposures = steps.total * config.train.effective_batch_size / len(train)
    assert check_plan(len(train), exposures, config.lora.rank) == []
