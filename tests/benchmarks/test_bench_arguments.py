"""`bench` refuses wrong arguments all at once, before anything is loaded or measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_trainer.benchmarks import measures
from lora_trainer.cli.main import main


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(measures.Measure, "__call__", refuse)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["bench", *arguments]) == 2
    return capsys.readouterr().err


def test_files_and_times_are_checked_first(tmp_path: Path, capsys):
    (tmp_path / "words.txt").write_text("root:x:0:0", encoding="utf-8")
    lost, words = tmp_path / "none" / "a", str(tmp_path / "words.txt")
    message = refused(
        ["table", "--minutes", "-1", "--rows", words, "--save", f"{lost}.json", "--baseline", words], capsys
    )
    assert "--minutes -1 is not a time" in message
    assert f"--save {lost}.json: there is no folder {lost.parent}" in message
    assert message.count("words.txt is no JSON document of bench") == 1
    message = refused(["step", "--export-preset", f"{lost}.toml", "--rows", "x.json", "--steps", "1"], capsys)
    assert "there is no folder" in message
    assert "bench step has no --rows" in message
    assert "--steps 1 is too few" in message
    assert "--minutes 0 is not a time" in refused(["table", "--minutes", "0"], capsys)


def test_a_baseline_of_another_measurement(tmp_path: Path, capsys):
    file = tmp_path / "base.json"
    file.write_text(json.dumps({"bench": "cache", "device": "d", "rows": []}), encoding="utf-8")
    message = refused(["step", "--baseline", str(file)], capsys)
    assert "is of bench cache, and this is bench step" in message


def test_what_is_compared_must_be_a_setting_of_that_value(capsys):
    settings = [
        "bogus=1",
        "fullgraph=true",
        "compile.enable=true",
        "memory.gradient_checkpointing=0.5",
        "hardware.attention_backend=flash3",
    ]
    message = refused(["step", *(part for setting in settings for part in ("--compare", setting))], capsys)
    assert "--compare bogus=1: bogus is not a setting." in message
    assert "Did you mean compile.fullgraph?" in message
    assert "compile.enable (from --compare compile.enable=true) is not a setting" in message
    assert "memory.gradient_checkpointing = 0.5 (from --compare" in message
    assert "flash3 is not installed (the folder hopper of FlashAttention's sources).\n     Install it, or" in message


def test_compared_settings_that_contradict_others(capsys):
    message = refused(
        ["step", "--set", "train.deterministic=true", "--compare", "hardware.cudnn_benchmark=true"], capsys
    )
    assert "cuDNN's benchmark chooses by speed" in message


@pytest.mark.parametrize("command", ["train", "bench step"])
def test_an_attention_without_its_package_is_refused_before_the_run(command: str, tmp_path: Path, capsys):
    folder = ["--output", str(tmp_path), "--name", "x"] if command == "train" else []
    assert main([*command.split(), *folder, "--set", "hardware.attention_backend=flash3"]) == 2
    assert "flash3 is not installed" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_bench_without_arguments_lists_the_benchmarks(capsys):
    message = refused([], capsys)
    assert all(f"{name}: " in message for name in measures.MEASURES)
    assert "Did you mean step" in refused(["setp"], capsys)


def test_settings_are_explained_as_one_document(capsys):
    assert main(["bench", "step", "--set", "lora.rank=4", "--explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert found["lora.rank"] == {"value": 4, "from": "--set"}
