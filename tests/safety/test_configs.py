"""Untrusted config files and values: one message each, whatever they contain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_trainer.cli.main import main


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments, "--explain"]) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert "bug" not in text
    assert "\x1b" not in text
    return text


CONFIGS = {
    "deep": b"a = " + b"[" * 50_000,
    "deep table": b"[" + b"a." * 20_000 + b"b]",
    "large": b"# " + b"x" * 4_000_001,
    "no text": b"\xff\xfe\x00\xd8",  # half of a pair in UTF-16
    "nothing known": b"[evil]\nrun = 1\n",
    "other kinds": b"run = 5\ntrain = []\nlora = 'x'\n",
    "numbers": b"[lora]\nrank = nan\n[optimizer]\nlearning_rate = inf\n[train]\nmax_steps = 99999999999999999999999\n",
    "escapes": b'[run]\nname = "\\u001b[31m"\n"\\u001b[31m" = 1\n',
}


@pytest.mark.parametrize("data", CONFIGS.values(), ids=CONFIGS)
def test_an_invalid_config(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(data)
    assert error_of(capsys, "--config", str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "config.toml")
    assert "regular file" in error_of(capsys, "--config", str(tmp_path / "config.toml"))


@pytest.mark.parametrize("value", ["lora.rank=" + "[" * 50_000, "lora.rank=1e999", "run.name=\x1b[31m", "a" * 10_000])
def test_invalid_values(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--set", value, "--explain"])
    text = capsys.readouterr()
    assert "bug" not in text.err
    assert "\x1b" not in text.err + text.out
