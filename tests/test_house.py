"""The shape of the project: imports that stay cheap, files that must parse."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.conftest import matches

TORCH_FREE = (
    "lora_trainer.builtin",
    "lora_trainer.cli.main",
    "lora_trainer.config",
    "lora_trainer.core",
    "lora_trainer.data.alike",
    "lora_trainer.data.buckets",
    "lora_trainer.dataset_check",
    "lora_trainer.data.images.images",
    "lora_trainer.data.manifest",
    "lora_trainer.data.images.jobs",
    "lora_trainer.data.images.decode",
    "lora_trainer.data.images.measures",
    "lora_trainer.data.sample",
    "lora_trainer.data.images.scan",
    "lora_trainer.data.images.worker",
    "lora_trainer.data.sources.read",
    "lora_trainer.data.images.spans",
    "lora_trainer.lora_format.kinds",
    "lora_trainer.models.detection",
    "lora_trainer.models.family",
    "lora_trainer.models.published",
)


@pytest.mark.parametrize("heavy", ["torch", "diffusers", "transformers"])
def test_cheap_imports_leave_torch_unloaded(heavy: str, torch_free_modules: set[str]) -> None:
    assert heavy not in torch_free_modules


@pytest.fixture(scope="module")
def torch_free_modules() -> set[str]:
    """The modules in a process after importing everything that must be cheap."""
    lines = [f"import {name}" for name in TORCH_FREE]
    program = "\n".join([*lines, "import sys", "print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_presets_are_toml_with_a_description(checkout: Path) -> None:
    files = sorted((checkout / "presets").rglob("*.toml"))
    # Six VRAM presets, three training presets, one preset per family and the built-in model's.
    assert len([path for path in files if path.parent.name in ("tiers", "goals")]) == 9
    for path in files:
        assert tomllib.loads(path.read_text("utf-8")), path


def test_launch_configs_are_ones_that_accelerate_reads(checkout: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    files = sorted((checkout / "accelerate_configs").glob("*.yaml"))
    assert [path.stem for path in files] == ["cpu", "cpu_2", "multi_gpu", "multi_node", "single_gpu"]
    for path in files:
        config = load_config_from_file(str(path))
        expected = yaml.safe_load(path.read_text("utf-8"))
        assert config.num_processes == expected["num_processes"]
        assert config.mixed_precision == "no", "precision belongs to the trainer's config"


def test_constraints_pin_every_dependency_exactly(checkout: Path) -> None:
    lines = (checkout / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "/" not in line and "+" not in line for line in pins)
    names = {line.split("==")[0].lower().replace("_", "-") for line in pins}
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(need for needs in project["optional-dependencies"].values() for need in needs),
    ]
    needed = {need.split(">")[0].split(";")[0].strip().lower() for need in wanted}
    assert needed - names == set()


@pytest.mark.slow
def test_slow_tests_and_their_fast_counterparts_exist(checkout: Path) -> None:
    slow = tomllib.loads((checkout / "tests" / "slow.toml").read_text("utf-8"))

    def collected(marks: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 5), done.stderr  # pytest 9.2 ends a listing of deselected tests with 5
        return {line for line in done.stdout.splitlines() if "::" in line}

    slow_tests, in_every_suite = collected("slow"), collected("not slow")
    for file, patterns in slow.items():
        for pattern, shown_by in patterns.items():
            assert any(matches(name, f"{file}::{pattern}") for name in slow_tests), pattern
            there = shown_by if "::" in shown_by else f"{file}::{shown_by}"
            assert any(matches(name, there) for name in in_every_suite), shown_by
