"""Broken, huge and special files: each is one finding, nothing blocks, nothing changes."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_trainer.core.findings import Finding
from lora_trainer.core.io import write_json
from lora_trainer.data.images import images, jobs
from lora_trainer.data.images.jobs import read_facts
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.views import Framing
from lora_trainer.dataset_check import DataReport, DatasetGate, check_dataset, checks
from tests.data.hostile import HOSTILE, ODD, noise, state_of

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes, sockets and links are made")


def checked(folder: Path) -> DataReport:
    manifest, findings = read_manifest([folder])
    return check_dataset(manifest, findings, DatasetGate([Framing((64,), 8)], allow_upscale=True))


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
            f"an image of {len(name)}"
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


def test_quick_checks_decode_nothing(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "measure_images", lambda *_: pytest.fail("decoded"))
    manifest, findings = read_manifest([zoo])
    report = check_dataset(manifest, findings, DatasetGate([Framing((64,), 8)]), decode=False)
    assert {path.name for path, found in report.files.items() if not found} == {
        *ODD,
        "cut.png",
        "cut.jpg",
        "no_pixels.tif",
    }
    assert any("headers" in note for note in report.notes)


def test_names_are_shown_on_one_line(zoo: Path) -> None:
    report = checked(zoo)
    names = [report.name_of(path) for path in report.files]
    assert all(name.isprintable() for name in names)
    assert r"two\nlines \x1b[31mred.png" in names
    assert r"caf\udce9 \udcff.png" in names


def _counts(finding: Finding) -> bool:
    """The images are noise of 64 px: findings about their look do not matter here."""
    return finding.severity == "error" or finding.code == "animated"


def test_names_survive_as_json_on_stdout_and_in_files(
    zoo: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    document = checked(zoo).to_json({})
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout.write(json.dumps(document, ensure_ascii=False))
    sys.stdout.flush()
    write_json(tmp_path / "report.json", document)
    for data in (capfdbinary.readouterr().out, (tmp_path / "report.json").read_bytes()):
        paths = [entry["path"] for entry in json.loads(data.decode("utf-8"))["files"]]
        assert {os.fsencode(zoo / name) for name in (*HOSTILE, *ODD)} <= {os.fsencode(path) for path in paths}


def good(folder: Path, count: int = 2) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        noise(number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"noise {number}")


def errors(folder: Path) -> list[tuple[str, str]]:
    report = checked(folder)
    return [
        (path.name, each.code) for path, found in report.files.items() for each in found if each.severity == "error"
    ]


def huge(path: Path) -> None:
    path.unlink()
    with open(path, "wb") as file:
        file.truncate(2**30)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("make", [huge, pipe, lambda path: path.write_bytes(b"\xff\xfe\xfa")])
def test_a_caption_that_is_no_text_is_one_finding(tmp_path: Path, make: Callable[[Path], object]) -> None:
    good(tmp_path)
    make(tmp_path / "1.txt")
    ((name, code),) = errors(tmp_path)
    assert name == "1.png"
    assert code in ("unreadable_caption", "missing_caption")


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_a_table_that_is_nested_or_garbled_is_one_finding(tmp_path: Path, name: str) -> None:
    good(tmp_path)
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / name).write_text(f'{deep}\n{{"file_name": {deep}, "text": "x"}}\n', "utf-8")
    assert [code for _, code in errors(tmp_path)] == ["bad_metadata"]


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="root reads everything")
def test_a_file_without_read_permission(tmp_path: Path) -> None:
    good(tmp_path)
    (tmp_path / "1.png").chmod(0)
    assert errors(tmp_path) == [("1.png", "unreadable")]


def test_a_file_without_read_permission_by_the_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good(tmp_path)
    true = os.open

    def refused(path: Path, *rest: int) -> int:
        if str(path).endswith("1.png"):
            raise PermissionError(13, "Permission denied", str(path))
        return true(path, *rest)

    monkeypatch.setattr(os, "open", refused)
    broken = read_facts((str(tmp_path / "1.png"), 0, -1))["broken"]
    assert broken[:2] == ["unreadable", "cannot be read (permission denied)."]
    assert "facts" in read_facts((str(tmp_path / "0.png"), 0, -1))


def test_an_image_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good(tmp_path)
    path = tmp_path / "1.png"
    true, seed = jobs.header_of, iter(range(100))

    def header_of(data: io.BytesIO) -> images.Header:
        noise(next(seed), (32, 32)).save(path)
        return true(data)

    monkeypatch.setattr(jobs, "header_of", header_of)
    broken = read_facts((str(path), 0, -1))["broken"]
    assert "changes while it is read" in broken[1]
