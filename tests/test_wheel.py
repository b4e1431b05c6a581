"""The wheel: the same bytes when it is built twice, small, only what a user needs, complete without the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import CHECKOUT

MOST_BYTES = 45_000_000
NEEDED_TO_BUILD = (
    "lora_trainer",
    "presets",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "constraints.txt",
)
OF_DEVELOPERS = {"ruff", "mypy", "pytest", "pytest-xdist", "hypothesis", "import-linter", "lycoris-lora", "hatchling"}


def build(source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    environment = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True, timeout=300)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CHECKOUT, tmp_path_factory.mktemp("dist"))


def test_it_has_the_same_bytes_from_a_copy_made_at_another_time(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in NEEDED_TO_BUILD:
        if (checkout / name).is_dir():
            shutil.copytree(checkout / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (checkout / name).exists():
            shutil.copy(checkout / name, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
        path.chmod(0o700 if path.is_dir() else 0o600)
    again = build(copy, tmp_path / "dist")
    assert again.name == wheel.name
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


def test_it_is_small_and_asks_for_nothing_that_only_developers_need(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (metadata,) = (file.read(name).decode() for name in names if name.endswith("/METADATA"))
        (entry_points,) = (file.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    required = [Requirement(text) for text in Parser().parsestr(metadata).get_all("Requires-Dist", [])]
    always = {each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})}
    assert "torch" in always
    assert not always & OF_DEVELOPERS
    assert "lora-trainer = lora_trainer.__main__:entry" in entry_points
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "scripts/"))]


def test_presets_and_data_are_found_without_the_checkout(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    for arguments in (["presets", "show", "12gb", "quality"], ["check", "--json"], ["models", "--json"]):
        command = [sys.executable, "-m", "lora_trainer", *arguments]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        assert str(checkout) not in ended.stdout
    shipped = {path.name for path in (tmp_path / "installed/lora_trainer/presets_data").rglob("*.toml")}
    assert shipped == {path.name for path in (checkout / "presets").rglob("*.toml")}


def test_the_versions_of_python_are_those_of_the_public_ci(checkout: Path) -> None:
    classifiers = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]["classifiers"]
    versions = [text.rpartition(" ")[2] for text in classifiers if "Python :: 3." in text]
    ci = (checkout / ".github/workflows/ci.yaml").read_text("utf-8")
    assert all(f'"{version}"' in ci for version in versions)
