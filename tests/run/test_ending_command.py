"""`run.on_finish` and `run.on_failure`: which runs, with what, and that nothing about it changes the run."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer
from lora_trainer.core.errors import DatasetRefused, Problem, TrainingFailed, UsageError
from lora_trainer.core.io import write_json
from lora_trainer.run.ending_command import LOG, then_command
from lora_trainer.run.order import Order, plain_console
from lora_trainer.run.settings import settle
from lora_trainer.run_folder.record import Record

DUMP = "import json, os; print('ä'); json.dump(dict(os.environ), open(os.environ['LORA_TRAINER_RUN'] + '.env', 'w'))"
DUMP_AT_END = shlex.join([sys.executable, "-c", DUMP])
posix = pytest.mark.skipif(os.name == "nt", reason="words are split otherwise on Windows")


def order_in(folder: Path, **settings: Any) -> Order:
    resolved = settle([], [Layer("test", {"run": {"output": str(folder), **settings}})])
    return Order(resolved, folder / "cat", plain_console())


def ended(order: Order, **values: Any) -> dict[str, str] | None:
    """What the command saw after a run that wrote a record with these values; None where none ran."""
    record = Record("cat", **values)
    record.write(order.folder)
    with then_command(order) as end:
        end(record)
    return seen(order)


def seen(order: Order) -> dict[str, str] | None:
    path = order.folder.with_name("cat.env")
    if not path.exists():
        return None
    found: dict[str, str] = json.loads(path.read_text())
    return {name.removeprefix("LORA_TRAINER_"): found[name] for name in found if name.startswith("LORA_TRAINER_")}


@posix
def test_the_command_knows_how_the_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = order_in(tmp_path, on_finish=DUMP_AT_END)
    facts = ended(order, status="done", exit_code=0, scores={"dataset": 1.0, "lora": 0.9312})
    assert facts is not None
    expected = {"RUN": str(order.folder), "STATUS": "done", "SCORE": "0.9312", "REASON": "", "EXIT_CODE": "0"}
    assert facts | expected | {"RECORD": str(order.folder / "run.json")} == facts
    assert "run.on_finish: exit code 0 after" in capsys.readouterr().out
    assert (order.folder / LOG).read_text("utf-8") == "run.on_finish: exit code 0\nä\n"


@posix
@pytest.mark.parametrize(("status", "code"), [("refused", 4), ("failed", 5), ("stopped", 143)])
def test_other_ends_run_the_other_command(status: str, code: int, tmp_path: Path) -> None:
    record = {"status": status, "exit_code": code, "reason": "because"}
    assert ended(order_in(tmp_path, on_finish=DUMP_AT_END), **record) is None
    facts = ended(order_in(tmp_path, on_failure=DUMP_AT_END), **record)
    assert facts is not None
    assert (facts["STATUS"], facts["EXIT_CODE"], facts["REASON"], facts["SCORE"]) == (status, str(code), "because", "")


@posix
def test_errors_have_the_command_of_their_record(tmp_path: Path) -> None:
    order = order_in(tmp_path, on_failure=DUMP_AT_END)
    with pytest.raises(UsageError), then_command(order):
        raise UsageError(Problem("planted", "wrong", "fix"))
    assert seen(order) is None, "you are there to see it"

    def fail() -> None:
        write_json(order.folder / "run.json", {"status": "failed", "exit_code": 5, "reason": "no memory"})
        raise TrainingFailed(Problem("planted", "no memory", "fix"))

    with pytest.raises(TrainingFailed), then_command(order):
        fail()
    assert (seen(order) or {})["REASON"] == "no memory"
    with pytest.raises(DatasetRefused), then_command(replace(order, folder=tmp_path / "other")):
        raise DatasetRefused(Problem("planted", "no images", "fix"), None)  # type: ignore[arg-type]
    facts = json.loads((tmp_path / "other.env").read_text())
    assert (facts["LORA_TRAINER_STATUS"], facts["LORA_TRAINER_EXIT_CODE"]) == ("refused", "3")
    assert facts["LORA_TRAINER_RECORD"] == ""


@posix
def test_a_command_that_fails_or_hangs_only_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hanging = "sh -c 'echo begun; sleep 600 & wait'"
    began = time.monotonic()
    for command in ("false", hanging):
        assert ended(order_in(tmp_path, on_finish=command, command_seconds=0.5), status="done", exit_code=0) is None
    assert time.monotonic() - began < 300
    output = capsys.readouterr().out
    assert "run.on_finish: exit code 1 after" in output
    assert "run.on_finish: ended at its limit of 0.5 s" in output
    assert "begun" in output


@posix
def test_no_shell_reads_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(order_in(tmp_path, on_finish="echo $HOME; rm x"), status="done", exit_code=0)
    assert "  $HOME; rm x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("on_finish=no-such-program --now", "there is no program 'no-such-program'"),
        ("on_failure='echo \"'", "no closing quotation"),
        ("on_finish=''", "run.on_finish is empty"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_run(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--output", str(tmp_path), "--set", f"run.{setting}"]) == 2
    assert message in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = ["train", "--output", str(tmp_path), "--set", 'run.trackers=["tensorboard", "wandb"]']
    assert main(arguments) == 2
    assert "pip install 'lora-trainer[wandb]'" in capsys.readouterr().err
    assert main(["train", "--output", str(tmp_path), "--set", "run.trackers=wadb"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@posix
def test_a_command_of_a_config_is_shown_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "theirs.toml"
    config.write_text('[run]\non_failure = "echo gone"\n', "utf-8")
    arguments = ["--config", str(config), "--output", str(tmp_path / "runs"), "--set", "run.on_finish=echo well"]
    assert main(["train", *arguments, "--max-steps", "1", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "command after a finished run: echo well (run.on_finish, from --set)" in output
    assert f"command after a failed run: echo gone (run.on_failure, from --config {config})" in output
    assert output.index("echo gone") < output.index("dataset: ")
