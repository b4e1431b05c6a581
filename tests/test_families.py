"""A family is its own files: no other part of the program names it, and without them everything else works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from lora_trainer.core.families import families

MOST_FILES = 3
# Package files that name a family which is in more: these numbers may only fall.
NAMED_IN_MORE = {
    "flux": 29,
    "qwen_image": 12,
    "sd15": 14,
    "sd2": 8,
    "sd3": 13,
    "sdxl": 23,
}
REMOVED = "lumina2"
WHOLE = ("lora_trainer", "presets", "scripts", "tests")
ROOMS = ("models", "recipes", "lora_format", "importers")  # of tests over all families
NAMES_OF_OTHERS = ("tests/models/single/test_quantized.py",)  # ComfyUI-GGUF calls Z-Image's architecture so
READ = (".py", ".json", ".toml", ".js", ".css", ".html")
VOCABULARY = "models/single/clip/tokenizer.json"  # which has every word


def name_of(family: str) -> re.Pattern[str]:
    """The family's name or its title, in any case and with any signs between the words; not as the beginning of a longer one."""
    words = (family, families()[family]["title"])
    forms = (r"[ _.\-]?".join(map(re.escape, re.split(r"[ _.\-]", each))) for each in words)
    return re.compile(rf"(?<![A-Za-z0-9])(?i:{'|'.join(forms)})(?![a-z0-9])")


@cache
def texts_below(folder: Path) -> dict[str, str]:
    """The text of each file, and its name, by its path in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in READ and path.is_file())
    found = {path.relative_to(folder).as_posix(): path for path in paths if "__pycache__" not in path.parts}
    found.pop(VOCABULARY, None)
    return {name: f"{path.name}\n{path.read_text(encoding='utf-8')}" for name, path in found.items()}


def files_naming(family: str, folder: Path) -> list[str]:
    pattern = name_of(family)
    return [name for name, text in texts_below(folder).items() if pattern.search(text)]


@pytest.mark.parametrize("family", families())
def test_a_family_is_named_in_few_files(family: str, checkout: Path) -> None:
    found = files_naming(family, checkout / "lora_trainer")
    assert {f"models/families/{family}.py", f"models/families/{family}.json"} <= set(found)
    most = NAMED_IN_MORE.get(family, MOST_FILES)
    assert len(found) <= most, found
    if family in NAMED_IN_MORE:
        assert len(found) == most, "fewer: lower the number"


@pytest.mark.slow  # it starts four processes
def test_without_its_files_nothing_mentions_a_family_and_the_rest_works(checkout: Path, tmp_path: Path) -> None:
    for folder in (*WHOLE, "docs"):
        shutil.copytree(checkout / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(checkout / "pyproject.toml", tmp_path)
    own = [path for path in tmp_path.rglob("*") if path.stem.removeprefix("test_") == REMOVED]
    assert len(own) == 5, "module, JSON file, preset; tests and their tiny model"
    for path in own:
        path.unlink()
    named = {f"{folder}/{name}" for folder in WHOLE for name in files_naming(REMOVED, tmp_path / folder)}
    assert named <= {"tests/test_families.py", *NAMES_OF_OTHERS}
    others = [name for name in families() if name != REMOVED]
    listed = run_in(tmp_path, "-c", "import lora_trainer.models.families as all; print(*all.FAMILIES, all.__file__)")
    assert listed.split() == [*others, str(tmp_path / "lora_trainer" / "models" / "families" / "__init__.py")]
    plan = run_in(tmp_path, "-m", "lora_trainer", "plan", "--set", "model.family=z_image")
    assert plan.startswith("z_image (published ")
    collected = run_in(tmp_path, "-m", "pytest", "--collect-only", "-q", *(f"tests/{room}" for room in ROOMS))
    assert all(f"[{name}" in collected for name in others)
    assert f"[{REMOVED}" not in collected
    run_in(tmp_path, "-m", "pytest", "-q", "tests/test_seams.py", "tests/models/single/test_recognize.py")


def run_in(folder: Path, *command: str) -> str:
    """What Python prints, with the program and the tests of a folder."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout
