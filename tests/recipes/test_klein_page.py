"""The FLUX.2 klein recipe of docs/recipes.md runs: train on the base, then sample and score with the distilled model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.models.families import flux2
from tests.recipes.recipe import QUICK, draw_images, save_tiny_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
BASE, DISTILLED = (f"black-forest-labs/FLUX.2-klein-{kind}" for kind in ("base-4B", "4B"))


def documented() -> dict[str, list[str]]:
    """The words of the first command of each name in the section of FLUX.2 klein."""
    section = PAGE.read_text("utf-8").partition("## FLUX.2 klein\n")[2].partition("\n## ")[0]
    found: dict[str, list[str]] = {}
    for line in re.findall(r"^lora-trainer (.*)$", section, flags=re.MULTILINE):
        found.setdefault(line.split()[0], shlex.split(line))
    return found


def test_the_recipe_trains_on_the_base_and_generates_with_the_distilled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {
        BASE: save_tiny_model(tmp_path / "base", "flux2"),
        DISTILLED: save_tiny_model(tmp_path / "distilled", "flux2-distilled"),
    }
    draw_images(tmp_path / "subject", 6)
    monkeypatch.setattr(flux2, "SIDE", 8)  # the gate samples at the model's own size: 64 px in place of 1024
    monkeypatch.chdir(tmp_path)
    commands = {name: [str(models.get(word, word)) for word in words] for name, words in documented().items()}
    assert list(commands) == ["train", "sample", "validate"]
    small = {key: value for key, value in QUICK.items() if not key.startswith(("sample", "validation"))}
    small |= {"cache.dir": str(tmp_path / "cache"), "data.resolution": "64", "gates.dataset": "0"}
    quick = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    assert main([*commands["train"], *quick, "--max-steps", "2"]) == 0
    assert main([*commands["sample"], "--size", "64x64"]) == 0
    (recipe,) = (tmp_path / "runs" / "subject" / "distilled").glob("*.json")
    drawn = json.loads(recipe.read_text("utf-8"))
    assert (drawn["model"], drawn["steps"], drawn["guidance"]) == (str(models[DISTILLED]), 4, None)
    capsys.readouterr()
    assert main([*commands["validate"], "--json", "--set", "gates.lora_check=lite"]) in (0, 4)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["parts"]
    assert f"base model: {models[DISTILLED]}" in printed.err
