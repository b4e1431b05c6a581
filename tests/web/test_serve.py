"""The command `ui`: a real server, its address and token, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from tests.web.site import write_run


@contextmanager
def served(*arguments: str, **environment: str) -> Iterator[tuple[str, list[str], subprocess.Popen[str]]]:
    """The address of a server in another process, the lines before it, and the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_trainer", "ui", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stderr is not None
        lines = list[str]()
        while not lines or not lines[-1].startswith("page:"):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        found = re.search(r"http://\S+?:\d+", lines[-1])
        assert found is not None
        yield found[0], lines[:-1], process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_the_page_is_served_until_a_signal_comes(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "cat", steps=2)
    with served("--output", str(tmp_path / "runs"), SSH_CONNECTION="1") as (address, _, process):
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{address}/api/runs") as answer:
            assert [row["id"] for row in json.load(answer)["runs"]] == ["cat"]
        with urllib.request.urlopen(address) as page:
            assert b"<title>lora-trainer</title>" in page.read()
        assert process.stderr is not None
        assert "ssh -L" in process.stderr.readline()
        with urllib.request.urlopen(
            f"{address}/api/live"
        ) as stream:  # an open page keeps it from ending for two seconds
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.readline() == b"retry: 2000\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 130
        assert process.stderr.read().split("\n") == ["the page has ended", ""]  # and nothing about training


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_another_address_prints_its_token_once(tmp_path: Path) -> None:
    tokens = []
    for _ in range(2):
        with served("--output", str(tmp_path), "--host", "0.0.0.0") as (address, lines, _):
            port = address.rpartition(":")[2]
            tokens.append(next(line for line in lines if line.startswith("token:")))
            assert any(line.startswith("warning: the connection is not encrypted") for line in lines)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs")
            text = tokens[0].split()[1]
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/api/runs", headers={"Authorization": f"Bearer {text}"}
            )
            with urllib.request.urlopen(asked) as answer:
                assert json.load(answer)["runs"] == []
    assert "as printed before" in tokens[1]


def test_wrong_arguments_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    wrong = ["--port", "70000", "--root", str(tmp_path / "nothing"), "--output", str(tmp_path / "file"), "--shared"]
    assert main(["ui", *wrong]) == 2
    printed = capsys.readouterr().err
    for part in ("--port 70000", "nothing is not a folder", "file is not a folder", "Unknown flag --shared"):
        assert part in printed
    assert "pip install 'lora-trainer[ui]'" in printed
