"""`bench together`: steps of runs on one base model beside those of a run alone."""

from __future__ import annotations

import json

import pytest

from lora_trainer.cli.main import main

SMALLEST = [
    *("--steps", "2", "--tiny", "--subject", "own", "--json"),
    *("--set", "model.family=sd15", "--set", "data.resolution=64", "--set", "train.effective_batch_size=1"),
]


@pytest.mark.slow
def test_runs_on_one_base_take_fewer_passes(tmp_path, capsys):
    rows_file = tmp_path / "rows.json"
    arguments = ["bench", "together", *SMALLEST, "--set", "memory.blocks_to_swap=10000", "--rows", str(rows_file)]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    alone, *rows = found["rows"]
    assert alone["name"] == "alone"
    assert alone["ratio"] == 1
    assert [row["runs"] for row in rows] == [1, 2, 4, 8]
    assert all(row["passes"] == pytest.approx(alone["passes"] / row["runs"]) for row in rows)

    assert main(arguments) == 0  # all rows are in the file
    assert json.loads(capsys.readouterr().out)["rows"] == found["rows"]


def test_what_trains_alone_and_rows_that_do_not_exist_are_refused(capsys):
    assert main(["bench", "together", *SMALLEST, "--filter", "nothing"]) == 2
    assert "There are: 1 together, 2 together, 4 together, 8 together" in capsys.readouterr().err
    assert main(["bench", "together", *SMALLEST, "--set", "lora.dropout=0.1"]) == 2
    assert "trains alone" in capsys.readouterr().err
