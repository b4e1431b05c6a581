"""Print errors: what happened and what to do, without a traceback for user errors."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from lora_trainer.core.disk import FULL, refusal
from lora_trainer.core.errors import BUG, TRAINING_FAILED, WRONG_USAGE, Problem, UserError, first_line, is_out_of_memory
from lora_trainer.core.findings import folded, printable_lines
from lora_trainer.core.launch import is_main_process, launched
from lora_trainer.data.images.remote import RemoteError

FOR_MAIN = 5.0  # seconds
TO_RESUME = "--resume then continues a run, unless it has checkpoint.save_state=false."


def report_error(error: Exception, *, debug: bool) -> int:
    """Print what went wrong and what to do. Returns the exit code."""
    with contextlib.suppress(OSError, ValueError):  # a closed pipe must not hide the error
        sys.stdout.flush()  # in a pipe shared with stderr, the error comes last
    if debug:
        traceback.print_exception(error)
    if isinstance(error, UserError):
        if is_main_process() or error.every_process_reports:
            _print_problems(error.problems)
        elif launched():
            time.sleep(FOR_MAIN)  # torchrun ends the others as soon as one has failed: the main process is to report it
        return error.exit_code
    if is_out_of_memory(error):
        fix = f"Set train.max_micro_batch_size or data.resolution lower, memory.gradient_checkpointing=true or cache.batch_size=1. {TO_RESUME}"
        _print_problems([Problem("out_of_memory", f"Out of memory: {first_line(error)}.", fix)])
        return TRAINING_FAILED
    if isinstance(error, RuntimeError) and "home directory" in str(error).lower():  # of pathlib, for a path with ~
        fix = "Set the variable HOME, or write paths without ~ (`ui`: --root)."
        _print_problems([Problem("no_home_folder", "This user has no home folder, which ~ in a path means.", fix)])
        return WRONG_USAGE
    if isinstance(error, RemoteError):
        _print_problems([error.problem_of("The data")])
        return WRONG_USAGE
    if isinstance(error, OSError) and refusal(error) in FULL:
        _print_problems([Problem("disk_full", "The disk is full.", f"Free some space. {TO_RESUME}")])
        return TRAINING_FAILED
    if (problem := _library_that_fails(error)) is not None:
        _print_problems([problem])
        return WRONG_USAGE
    if isinstance(error, OSError) and error.filename is not None:
        _print_problems(
            [Problem("file_unreadable", f"{error.filename}: {error.strerror}.", "Check the path and its permissions.")]
        )
        return WRONG_USAGE
    again = "" if debug else " Run it again with --debug and report the traceback."
    text = printable_lines(f"{type(error).__name__}: {error}")
    print(f"error: this is a bug in lora-trainer: {text}.{again}", file=sys.stderr)
    return BUG


def _library_that_fails(error: BaseException) -> Problem | None:
    """The library whose import failed, such as a torchvision of another torch; None for an error that has another cause.

    diffusers and transformers wrap the error of a library that they import, and wrap it again. A library's own shared files
    raise OSError where they are of another system or another GPU's build.
    """
    of_import = isinstance(error, ImportError) or str(error).startswith("Failed to import")
    if not of_import and not (isinstance(error, OSError) and error.filename is None):
        return None
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        missing = error.name.partition(".")[0]
        if missing == "lora_trainer":
            return None
        if find_spec(missing) is None:
            return Problem(
                "library_missing", f"The library {missing} is not installed.", f"Run: pip install {missing}."
            )
        message = f"The {missing} that is installed has no {error.name}: another version is needed."
        return Problem("library_broken", message, "Run: pip install --upgrade lora-trainer.")
    importing = [
        str(frame.f_globals.get("__name__", ""))
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    library = importing[-1].partition(".")[0] if importing else ""
    if library in ("", "__main__", "lora_trainer"):
        return None
    if library == "torch":
        fix = "Reinstall torch for this system, Python and GPU: docs/setup.md has the commands for CPU, CUDA, ROCm and XPU."
        return Problem("library_broken", f"torch does not load ({first_line(error)}).", fix)
    fix = (
        f"Install the {library} that suits torch {version('torch')}. If nothing else needs it: pip uninstall {library}."
    )
    return Problem("library_broken", f"The library {library} does not load ({first_line(error)}).", fix)


def _print_problems(problems: Sequence[Problem]) -> None:
    if len(problems) > 1:
        print(f"error: {len(problems)} problems", file=sys.stderr)
    for number, problem in enumerate(problems, start=1):
        lead = "error: " if len(problems) == 1 else f"  {number}. "
        for start, text in ((lead, problem.message), (" " * len(lead), problem.fix)):
            if text:
                print(f"{start}{folded(printable_lines(text), sys.stderr, len(lead))}", file=sys.stderr)
