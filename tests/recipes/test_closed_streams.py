"""Commands whose standard streams are closed, or lost while they work: they end as with open ones, and write the same."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lora_trainer.builtin import DATA_FOLDER
from lora_trainer.cli.main import COMMANDS
from tests.recipes.recipe import Bench, exported, record, rows

pytestmark = pytest.mark.skipif(os.name != "posix", reason="closed by a POSIX shell")

CLOSED = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
ALL = CLOSED[-1]


def code_of(arguments: list[str], closed: str, program: str = "-m lora_trainer") -> int:
    """The exit code of a command that starts with closed streams; the others are the null device."""
    command = f"exec {shlex.quote(sys.executable)} {program} {shlex.join(arguments)} {closed}"
    nowhere = subprocess.DEVNULL
    return subprocess.run(["sh", "-c", command], stdin=nowhere, stdout=nowhere, stderr=nowhere, check=False).returncode


@pytest.mark.parametrize("closed", CLOSED)
def test_a_command_ends_with_the_same_code(closed: str) -> None:
    assert code_of(["presets"], closed) == 0
    assert code_of(["presets", "show", "no-such-preset"], closed) == 2


@pytest.mark.slow
def test_what_a_command_prints_reaches_the_streams_that_are_open(tmp_path: Path) -> None:
    """Neither stream is taken for the other, nor for a file."""
    for closed, open_one in (("<&- 2>&-", "1"), ("<&- >&-", "2")):
        said = tmp_path / f"said-{open_one}"
        code_of(
            ["presets"] if open_one == "1" else ["no-such-command"], f"{closed} {open_one}>{shlex.quote(str(said))}"
        )
        assert said.read_text("utf-8").strip()


EACH = """
import json, os, sys
from lora_trainer.__main__ import entry

def run(arguments, closes):
    if closes:
        for number in (0, 1, 2):
            os.close(number)
        sys.stdin = sys.stdout = sys.stderr = None
    code = entry(arguments)
    nowhere = os.stat(os.devnull).st_rdev
    return [code, [os.fstat(number).st_rdev == nowhere for number in (0, 1, 2)]]

found = {name: [run(each, False), run(each, True)] for name, each in json.load(open(sys.argv[1])).items()}
json.dump(found, open(sys.argv[2], "w"))
"""


def test_every_command_ends_with_the_same_code(finished: Bench, bench: Bench, tmp_path: Path) -> None:
    run, lora = str(finished.folder("first")), str(finished.folder("first") / "first.safetensors")
    data, config, missing = str(bench.data), str(finished.folder("first") / "config.toml"), str(tmp_path / "missing")
    commands = {
        "train": bench.arguments("dry", "--dry-run"),
        "produce": ["produce", "--explain"],
        "demo": ["demo", "--explain"],
        "batch": ["batch", "status", missing],
        "search": ["search", "--space", missing],
        "check": ["check", data, "--json"],
        "cache": ["cache", "status", str(bench.cache), "--json"],
        "plan": ["plan", "--explain"],
        "validate": ["validate", missing],
        "sample": ["sample", missing, "--prompt", "a ring"],
        "inspect": ["inspect", lora],
        "convert": ["convert", lora, str(tmp_path / "converted.safetensors"), "--to", "diffusers", "--overwrite"],
        "merge": ["merge", lora, lora, "--output", str(tmp_path / "merged.safetensors"), "--overwrite"],
        "resize": ["resize", lora, "--rank", "1", "--output", str(tmp_path / "small.safetensors"), "--overwrite"],
        "extract": ["extract", missing, missing, "--rank", "1", "--output", str(tmp_path / "out.safetensors")],
        "average": ["average", lora, lora, "--output", str(tmp_path / "mean.safetensors"), "--overwrite"],
        "request": ["request", run, "save"],
        "report": ["report", run, "--output", str(tmp_path / "page.html")],
        "metrics": ["metrics", missing],
        "ui": ["ui", "--port", "none"],
        "profile": ["profile", run],
        "bench": ["bench", "no-such-row"],
        "doctor": ["doctor", "--json"],
        "caption": ["caption", "--list"],
        "import": ["import", config],
        "presets": ["presets", "show", "12gb"],
    }
    assert commands.keys() == COMMANDS.keys()
    (tmp_path / "commands.json").write_text(json.dumps(commands), "utf-8")
    program = ["-c", EACH, str(tmp_path / "commands.json"), str(tmp_path / "codes.json")]
    assert code_of([], "", shlex.join(program)) == 0
    for name, (with_open, with_closed) in json.loads((tmp_path / "codes.json").read_text("utf-8")).items():
        assert with_closed == [with_open[0], [True] * 3], name
        assert with_open[0] in (0, 2, 3), name


def test_a_training_writes_the_same(bench: Bench) -> None:
    assert bench.run("open") == code_of(bench.arguments("shut"), ALL) == 0
    one, other = bench.folder("open"), bench.folder("shut")
    assert exported(one) == exported(other)
    assert [row["loss"] for row in rows(one)] == [row["loss"] for row in rows(other)]
    assert record(other)["status"] == "done"
    assert {path.name.replace(one.name, "NAME") for path in one.iterdir()} == {
        path.name.replace(other.name, "NAME") for path in other.iterdir()
    }


WITHOUT_STREAMS = """
import sys
sys.stdin = sys.stdout = sys.stderr = None
{program}
"""
CHECKED = "from lora_trainer import check_dataset; check_dataset({data!r}, quiet=False)"
ENTERED = "from lora_trainer.__main__ import entry; sys.exit(entry(['check', {data!r}, '--json']))"


@pytest.mark.parametrize("program", [CHECKED, ENTERED], ids=["api", "command"])
def test_streams_that_are_none_are_no_error(bench: Bench, program: str) -> None:
    """As under `pythonw`, where the descriptors may be anything."""
    text = WITHOUT_STREAMS.format(program=program.format(data=str(bench.data)))
    codes = {closed: code_of(["-c", text], closed, program="") for closed in ("", ALL)}
    assert codes[""] == codes[ALL]
    assert codes[ALL] in (0, 3)  # the images are small


WITH_A_TEE = """
import sys

class Tee:
    def write(self, text):
        return len(text)

    def flush(self):
        pass

streams = sys.stdout, sys.stderr = Tee(), Tee()
from lora_trainer import check_dataset
check_dataset({data!r}, quiet=False)
assert (sys.stdout, sys.stderr) == streams
from lora_trainer.__main__ import entry
assert entry(["presets"]) == 0
assert entry(["presets", "show", "no-such-preset"]) == 2
"""


def test_objects_that_only_write_stay_the_streams(bench: Bench) -> None:
    assert code_of(["-c", WITH_A_TEE.format(data=str(bench.data))], "", program="") == 0


@pytest.mark.parametrize(
    ("command", "reader", "code"),
    [
        (["presets"], "left", 1),  # without its output it was in vain
        (["presets"], "full", 1),
        (["check", str(DATA_FOLDER), "--json"], "full", 1),
        (["train", "--explain"], "full", 0),
        (["no-such-command"], "left", 2),
    ],
    ids=["prints-left", "prints-full", "json", "works", "error"],
)
def test_output_that_is_lost_changes_the_code_of_what_only_prints(command: list[str], reader: str, code: int) -> None:
    left, writer = os.pipe()
    os.close(left)
    with open("/dev/full", "wb") as full:
        stdout, stderr = (full.fileno(), writer) if reader == "full" else (writer, full.fileno())
        program = [sys.executable, "-m", "lora_trainer", *command]
        assert subprocess.run(program, stdout=stdout, stderr=stderr, check=False).returncode == code
    os.close(writer)


def test_a_run_outlives_the_readers_of_its_output(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in the test below, in this process: stdout has no reader from its first line on, stderr is on a full disk."""
    own, (reader, writer), full = (os.dup(1), os.dup(2)), os.pipe(), os.open("/dev/full", os.O_WRONLY)
    os.dup2(writer, 1)
    os.dup2(full, 2)
    os.close(writer)
    monkeypatch.setattr(sys, "stdout", open(1, "w", buffering=1, closefd=False, encoding="utf-8"))  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", open(2, "w", closefd=False, encoding="utf-8"))  # noqa: SIM115

    def read_a_line() -> None:
        os.read(reader, 1)
        os.close(reader)

    leaving = threading.Thread(target=read_a_line)
    leaving.start()
    try:
        code = bench.run("lost", steps=3)
    finally:
        for number, kept in enumerate(own, 1):
            os.dup2(kept, number)
        for number in (*own, full):
            os.close(number)
        leaving.join()
    assert code == 0
    assert exported(bench.folder("lost"))["kohya"]


@pytest.mark.slow
def test_a_training_outlives_the_readers_of_its_output(bench: Bench) -> None:
    """`train … | tee log` whose tee is killed, and a log on a disk that is full."""
    command = [sys.executable, "-m", "lora_trainer", *bench.arguments("left", steps=3)]
    with open("/dev/full", "wb") as full, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=full) as training:
        assert training.stdout is not None
        assert training.stdout.readline()
        training.stdout.close()
        training.send_signal(signal.SIGPIPE)
        assert training.wait() == 0
    assert record(bench.folder("left"))["status"] == "done"
    assert exported(bench.folder("left"))["kohya"]


def test_output_waits_for_a_slow_reader() -> None:
    """Also where another program left the pipe in a mode in which a full one refuses."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    program = "from lora_trainer.core.terminal import *; outlive_readers(); print('x' * 10**6); print(lost_output())"
    with subprocess.Popen([sys.executable, "-c", program], stdout=writer) as printing, open(reader, "rb") as pipe:
        os.close(writer)
        assert pipe.read() == b"x" * 10**6 + b"\nNone\n"
    assert printing.returncode == 0
