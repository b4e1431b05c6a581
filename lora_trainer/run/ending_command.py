"""`run.on_finish` and `run.on_failure`: a command when a run has ended, as a notification (docs/trackers.md).

It runs after the record is written and the run's folder is unlocked. What it does changes neither the record nor the
exit code.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import SIGNALED, DatasetRefused, Problem
from lora_trainer.core.interrupt import remembering
from lora_trainer.core.io import append_text
from lora_trainer.core.launch import is_main_process
from lora_trainer.run_folder.record import RECORD, Record

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.config.layers import Resolved
    from lora_trainer.config.schema.results import RunSection
    from lora_trainer.run.order import Order

COMMANDS = ("on_finish", "on_failure")
LOG = Path("logs") / "commands.txt"
PREFIX = "LORA_TRAINER_"
MOST_OUTPUT = 100_000  # characters that are logged
SHOWN_LINES = 10
STOPPED_SECONDS = 5.0


def wrong_commands(section: RunSection) -> list[Problem]:
    """Commands that cannot be run: quotes that are not closed, a program that is not there."""
    problems = []
    for name in COMMANDS:
        command = getattr(section, name)
        if command is None:
            continue
        try:
            words = words_of(command)
        except ValueError as error:
            problems.append(
                Problem("command_invalid", f"run.{name}={command!r}: {str(error).lower()}.", "Close the quotes.")
            )
            continue
        if not words:
            problems.append(Problem("command_empty", f"run.{name} is empty.", "Set a command, or remove the setting."))
        elif shutil.which(words[0]) is None:
            fix = "Use the path of a program; a shell's own commands need one: sh -c '…'."
            problems.append(Problem("program_missing", f"run.{name}: there is no program {words[0]!r}.", fix))
    return problems


def show_commands(resolved: Resolved, console: Console) -> None:
    """Print the commands of the settings and where they are from: a config of somebody else may have one."""
    for name in COMMANDS:
        if (command := getattr(resolved.config.run, name)) is not None:
            when = "finished" if name == "on_finish" else "failed"
            console.print(f"command after a {when} run: {command} (run.{name}, from {resolved.origin[f'run.{name}']})")


def words_of(command: str) -> list[str]:
    """The command's words, as a shell splits them. Raises ValueError."""
    return shlex.split(command, posix=os.name != "nt")


@contextmanager
def then_command(order: Order) -> Iterator[Callable[[Record], None]]:
    """Afterwards the command for how the run in the block ended. Yields a function that takes the record of its end.

    Where an error ended it, its record is that of the folder. A run that left none has no command, as for wrong settings;
    but a refused dataset has one.
    """
    before, records = Record.read(order.folder), list[Record]()
    try:
        yield records.append
    except DatasetRefused as error:
        score = None if error.report is None else round(error.report.score, 4)
        scores = {"dataset": score, "lora": None}
        records = [Record(order.folder.name, "refused", error.exit_code, reason=str(error), scores=scores)]
        raise
    except BaseException:
        after = Record.read(order.folder)
        records = [after] if after is not None and after != before else []
        raise
    finally:
        for record in records:
            run_ending_command(order, record)


def run_ending_command(order: Order, record: Record) -> None:
    """Run the command for a record's status, and print what it printed. Raises nothing."""
    section, code = order.config.run, record.exit_code
    name = "on_finish" if code == 0 else "on_failure"
    command = getattr(section, name)
    if command is None or code is None or not is_main_process():
        return
    with remembering():  # a signal that comes now must not change how the run ended
        began = time.monotonic()
        # After a signal little time is left until the system kills the process.
        seconds = min(section.command_seconds, STOPPED_SECONDS if code > SIGNALED else section.command_seconds)
        ending, output = run_words(words_of(command), environment_of(order.folder, record), seconds)
        order.console.print(f"run.{name}: {ending} after {time.monotonic() - began:.1f} s")
        for line in output.splitlines()[-SHOWN_LINES:]:
            order.console.print(f"  {line}")
        if output and order.folder.is_dir():
            with suppress(OSError):
                (order.folder / LOG).parent.mkdir(exist_ok=True)
                append_text(order.folder / LOG, f"run.{name}: {ending}\n{output.rstrip()}\n")


def environment_of(folder: Path, record: Record) -> dict[str, str]:
    """This process's environment and the run's facts. `_RECORD` is empty where there is no `run.json`."""
    path = folder.absolute() / RECORD
    score = record.scores["lora"]
    facts = {
        "RUN": str(folder.absolute()),
        "STATUS": record.status,
        "SCORE": "" if score is None else f"{score:.4f}",
        "REASON": record.reason or "",
        "EXIT_CODE": record.exit_code,
        "RECORD": path if path.is_file() else "",
    }
    return os.environ | {f"{PREFIX}{name}": str(value).replace("\0", "") for name, value in facts.items()}


def run_words(words: list[str], environment: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """Run a program without a shell; how it ended, in words, and what it printed. A late one is ended."""
    try:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl+C is for the run
        )
    except (OSError, ValueError) as error:
        return f"could not be started ({error})", ""
    try:
        output, _ = process.communicate(timeout=seconds)
        return f"exit code {process.returncode}", output[-MOST_OUTPUT:]
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):  # it and those that it started
            if os.name == "posix":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        output = ""
        with suppress(subprocess.TimeoutExpired):  # a program that it started may keep the pipe open
            output, _ = process.communicate(timeout=1.0)
        return f"ended at its limit of {seconds:g} s", output[-MOST_OUTPUT:]
