"""What `scripts/gpu_wheels.sh` collects, without a network: `--list` prints it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a script for bash")


def wheels(checkout: Path, *arguments: str) -> tuple[int, list[str]]:
    command = ["bash", str(checkout / "scripts" / "gpu_wheels.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_the_wheels_have_the_tested_versions(checkout: Path) -> None:
    code, listed = wheels(checkout, "--list")
    assert code == 0
    tested = (checkout / "constraints.txt").read_text("utf-8").lower().replace("_", "-").splitlines()
    assert set(listed) <= set(tested)
    assert {name.partition("==")[0] for name in listed} >= {"diffusers", "peft", "pydantic", "pydantic-core", "tomli-w"}


def test_what_the_machine_has_in_the_same_version_is_not_collected(checkout: Path, tmp_path: Path) -> None:
    _, everything = wheels(checkout, "--list")
    (same,) = [pin for pin in everything if pin.startswith("pydantic-core==")]
    frozen = tmp_path / "frozen.txt"
    frozen.write_text(f"{same.replace('pydantic-core', 'Pydantic_Core')}\ndiffusers==0.1\nlocal @ file:///x\n", "utf-8")
    code, listed = wheels(checkout, "--list", "--has", str(frozen), "--without", "gguf", "--without", "TOMLI_W")
    assert code == 0
    assert [pin for pin in everything if not pin.startswith(("pydantic-core==", "gguf==", "tomli-w=="))] == listed


@pytest.mark.parametrize(
    "arguments",
    [("--python", "3"), ("--cuda", "13.0"), ("--limit", "much"), ("--limit",), ("--has", "no-such-file"), ("--lots",)],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], checkout: Path) -> None:
    assert wheels(checkout, *arguments, "--list") == (2, [])
