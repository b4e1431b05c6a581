"""A cluster of one node for all tests of this folder, and a tiny base model on its disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.recipes.recipe import save_tiny_model
from tests.slurm.one_node import one_node_slurm, unpack_packages


@pytest.fixture(scope="session")
def cluster() -> Iterator[Mapping[str, str]]:
    """The environment of a user of the cluster."""
    packages = os.environ.get("SLURM_PACKAGES")
    if not packages and shutil.which("slurmctld") is None:
        pytest.skip("no SLURM is installed, and SLURM_PACKAGES names no folder for Debian's packages")
    root = unpack_packages(Path(packages).resolve()) if packages else Path("/")
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,  # a short path: sockets have one of 107 characters
        one_node_slurm(Path(folder), root) as environment,
    ):
        yield environment


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
