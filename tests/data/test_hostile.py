"""Files that are broken, huge or no files at all: each is one finding, nothing hangs, nothing is changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lora_trainer.core.findings import Finding
from lora_trainer.data.check import DataReport, check_dataset
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.views import Framing
from tests.data.hostile import HOSTILE, ODD, state_of

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes, sockets and links are made")


def checked(folder: Path) -> DataReport:
    manifest, findings = read_manifest([folder])
    return check_dataset(manifest, findings, framings=(Framing((64,), 8),), allow_upscale=True)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo") / "data"
    folder.mkdir()
    for name, (make, _) in HOSTILE.items():
        make(folder / name)
    for name, odd in ODD.items():
        odd(folder / name)
    for name in (*HOSTILE, *ODD):
        (folder / f"{name}.txt" if len(name) < 240 else folder / f"{name[:-4]}.txt").write_text(
            f"a picture of {len(name)}"
        )
    (folder / "folder.png").mkdir()
    (folder / "folder.png" / "round").symlink_to("..")
    return folder


def test_each_hostile_file_is_one_finding_and_each_odd_one_is_used(zoo: Path) -> None:
    before = state_of(zoo)
    report = checked(zoo)
    found = {path.name: [finding for finding in each if _counts(finding)] for path, each in report.files.items()}
    assert {name: [finding.code for finding in found[name]] for name in HOSTILE} == {
        name: [code] for name, (_, code) in HOSTILE.items()
    }
    assert {name: found[name] for name in ODD} == {name: [] for name in ODD}
    assert {sample.path.name for sample in report.samples} == {*ODD, "many.gif"}
    assert state_of(zoo) == before


def _counts(finding: Finding) -> bool:
    """The pictures are noise of 64 pixels: what the gate says of how they look is not the question here."""
    return finding.severity == "error" or finding.code == "animated"


def test_names_survive_as_json(zoo: Path) -> None:
    document = checked(zoo).to_json({})
    text = json.dumps(document)
    paths = [entry["path"] for entry in json.loads(text)["files"]]
    assert {os.fsencode(zoo / name) for name in (*HOSTILE, *ODD)} <= {os.fsencode(path) for path in paths}
