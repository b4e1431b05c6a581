"""A record is not believed without the files that it names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.report.ending import verdict_of
from lora_trainer.report.read import read_run
from lora_trainer.run.lost_files import lost_loras
from lora_trainer.run_folder.record import Record
from lora_trainer.web.run_list import RunList
from tests.recipes.recipe import Bench, exported, record

KINDS = ("{}.safetensors", "{}.diffusers.safetensors")


@pytest.fixture
def trained(finished: Bench, bench: Bench) -> Bench:
    """A finished run of the test's own."""
    shutil.copytree(finished.output, bench.output)
    return bench


def read(folder: Path) -> Record:
    record = Record.read(folder)
    assert record is not None
    return record


def again(bench: Bench, *extra: str, **more: object) -> int:
    settings = {"checkpoint__every_n_steps": 3, "validation__every_n_steps": 3, "gates__lora_check": "lite"}
    return bench.run("first", "--resume", *extra, **settings | more)


def damage(bench: Bench, name: str, how: str) -> None:
    path = bench.folder("first") / name
    data = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[-20] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "how"), [(0, "deleted"), (0, "truncated"), (0, "changed"), (1, "deleted"), (1, "truncated")]
)
def test_a_lost_lora_is_exported_again(trained, finished, kind, how):
    folder = trained.folder("first")
    damage(trained, KINDS[kind].format("first"), how)
    assert list(lost_loras(folder, read(folder))) == [KINDS[kind].format("first")]
    assert again(trained, gates__lora_check="off") == 0
    assert exported(folder) == exported(finished.folder("first"))
    found = read(folder)
    assert (found.status, found.steps) == ("done", 6)
    assert lost_loras(folder, found) == {}


def test_a_lora_that_no_checkpoint_can_replace_is_named(trained, capsys):
    folder = trained.folder("first")
    shutil.rmtree(folder / "checkpoints")
    assert again(trained) == 0  # all that it wrote is there
    (folder / "first.safetensors").unlink()
    capsys.readouterr()
    assert again(trained) == 2
    assert "first.safetensors" in capsys.readouterr().err
    assert record(folder)["status"] == "done"


def test_a_lost_report_is_written_again(trained):
    report = trained.folder("first") / "report.html"
    report.unlink()
    assert again(trained) == 0
    assert report.is_file()


def test_nothing_says_that_a_lost_lora_can_be_used(trained, capsys):
    """The report, the page, and doctor."""
    folder = trained.folder("first")
    before = verdict_of(read_run(folder))
    assert before.label != "missing"
    runs = RunList(trained.output)
    assert runs.row(folder)["outcome"] != "missing"
    (folder / "first.safetensors").unlink()
    verdict = verdict_of(read_run(folder))
    assert (verdict.tone, verdict.label) == ("bad", "missing")
    assert "--resume" in str(verdict.command)
    assert runs.row(folder)["outcome"] == "missing"
    assert main(["doctor", str(folder)]) == 2
    assert main(["report", str(folder)]) == 0
    assert "missing" in (folder / "report.html").read_text(encoding="utf-8")
    assert main(["validate", str(folder / "first.safetensors"), "--model", str(trained.model)]) == 2
    capsys.readouterr()
