"""What `scripts/gpu_wheels.sh` collects, without a network: `--list` prints it."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
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
    [
        ("--python", "3"),
        ("--python", "2.7"),
        ("--python", "3.10"),
        ("--cuda", "13.0"),
        ("--cuda", "99"),
        ("--cuda", "1"),
        ("--limit", "much"),
        ("--limit",),
        ("--has", "no-such-file"),
        ("--lots",),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], checkout: Path) -> None:
    assert wheels(checkout, *arguments, "--list") == (2, [])


def test_every_cuda_of_bitsandbytes_is_taken(checkout: Path) -> None:
    package = find_spec("bitsandbytes")
    if package is None or package.origin is None:
        pytest.skip("bitsandbytes is not installed: pip install bitsandbytes")
    found = Path(package.origin).parent.glob("libbitsandbytes_cuda*.so")
    for cuda in (path.stem.removeprefix("libbitsandbytes_cuda") for path in found):
        assert wheels(checkout, "--cuda", cuda, "--list")[0] == 0, cuda
