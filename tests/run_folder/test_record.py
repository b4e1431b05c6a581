"""`run.json`: read back as it was written, and whatever it holds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lora_trainer.run_folder.record import Record


def test_a_record_that_was_written_is_read_back(tmp_path: Path) -> None:
    record = Record(
        "cat", "stopped", 143, started=3.5, steps=7, choices=("a", "b"), scores={"dataset": 1.0, "lora": None}
    )
    record.write(tmp_path)
    assert Record.read(tmp_path) == record


ODD = (None, True, 7, 10**400, -0.5, "x", [], [3, None], {}, {"a": None, "total": "x", "dataset": {}}, [{"step": 1}])


@pytest.mark.parametrize("part", list(asdict(Record("cat"))))
def test_a_part_of_another_type_has_its_default(part: str, tmp_path: Path) -> None:
    """And no other part is lost with it."""
    right = replace(Record(tmp_path.name, steps=7), reason="why", sessions=3)
    for value in ODD:
        (tmp_path / "run.json").write_text(json.dumps(asdict(right) | {part: value}), encoding="utf-8")
        found = Record.read(tmp_path)
        assert found is not None
        assert type(getattr(found, part)) in (type(getattr(right, part)), type(value), type(None))
        assert {**asdict(found), part: None} == {**asdict(right), part: None}
        assert {"dataset", "lora"} <= found.scores.keys()
        assert {"kohya", "diffusers", "report"} <= found.files.keys()
        assert math.isfinite(found.seconds["total"] + found.started)
        assert found.planned_steps is None
        assert isinstance(found.keeps_state, bool)


@pytest.mark.parametrize("text", ["", "{", '{"status": "do', "[]", "null", "3", "[" * 100_000, '{"status": "paused"}'])
def test_a_torn_record_is_that_of_a_run_that_failed(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    assert Record.read(tmp_path) == Record(tmp_path.name, status="failed")


def test_a_folder_with_checkpoints_and_no_record_is_a_run(tmp_path: Path) -> None:
    assert Record.read(tmp_path) is None
    assert Record.read(tmp_path / "missing") is None
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    assert Record.read(tmp_path) == Record(tmp_path.name, status="failed")
