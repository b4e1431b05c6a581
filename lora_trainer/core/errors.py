"""Errors that users see, and their exit codes."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from lora_trainer.core.findings import cut

DONE = 0
BUG = 1
WRONG_USAGE = 2
DATASET_REFUSED = 3
LORA_REFUSED = 4
TRAINING_FAILED = 5
SIGNALED = 128  # plus the signal's number
INTERRUPTED = 130  # SIGINT
# What a full GPU or disk, a file or a library raises in work that a finished LoRA can do without.
MACHINE_FAILURES = (RuntimeError, ValueError, OSError, MemoryError)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong and what to do about it. `code` names its kind for scripts and tests, and never changes."""

    code: str
    message: str
    fix: str = ""

    def __post_init__(self) -> None:
        """Both may quote what users' files hold."""
        for name in ("message", "fix"):
            lines = getattr(self, name).split("\n")
            object.__setattr__(self, name, "\n".join(map(cut, lines)))

    def __str__(self) -> str:
        return f"{self.message} {self.fix}".strip()


class UserError(Exception):
    """Something the user can fix. Shown without a traceback, all problems at once."""

    exit_code = WRONG_USAGE
    every_process_reports = False  # not only the main one

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(self.problems)  # what it is made of again where it is unpickled

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class UsageError(UserError):
    """A flag, config value or input file that cannot be used."""


@contextmanager
def known_as(names: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, replace paths in problems by the names that users know; `names` may grow meanwhile."""

    def with_names(text: str) -> str:
        for place in sorted(names, key=len, reverse=True):
            text = text.replace(place, names[place])
        return text

    try:
        yield
    except UsageError as error:
        found = [
            Problem(problem.code, with_names(problem.message), with_names(problem.fix)) for problem in error.problems
        ]
        if found == list(error.problems):
            raise
        raise UsageError(found) from error


@contextmanager
def gathering(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a UsageError in the block to `problems` and leave the block, to report all of them at once."""
    try:
        yield
    except UsageError as error:
        problems.extend(problem for problem in error.problems if problem not in problems)


class Refused(UserError):
    """A gate refused. `report` is its DataReport or LoraReport, or None."""

    def __init__(self, problems: Problem | Iterable[Problem], report: Any = None) -> None:
        super().__init__(problems)
        self.report = report


class DatasetRefused(Refused):
    """The data cannot be trained on, or scores below the gate."""

    exit_code = DATASET_REFUSED


class LoraRefused(Refused):
    """The LoRA is refused or unresolved, or was not trained on every image; it stays on disk, marked."""

    exit_code = LORA_REFUSED


class TrainingFailed(UserError):
    """Training could not continue; the message names what was saved."""

    exit_code = TRAINING_FAILED


# Texts of torch, CUDA, its libraries and the system where no class of error says it.
OUT_OF_MEMORY = (
    "out of memory",
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "cudaerrormemoryallocation",
    "can't allocate memory",  # torch on a CPU
    "not enough memory",  # the same on Windows
    "cannot allocate memory",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a GPU or of the system, whichever library reports it. Loads nothing."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY)


class memory_may_run_out:  # noqa: N801  used as a statement, as contextlib.suppress is
    """Leave the block quietly if memory runs out, without a reference to anything that must be freed."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and is_out_of_memory(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, to put into a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def nearest(word: str, known: Iterable[str]) -> str:
    """`Did you mean …?` for a misspelt word, in whatever case, or the known words when nothing is near."""
    known = sorted(known)
    lower: dict[str, str] = {name.lower(): name for name in reversed(known)}
    if word.lower() in lower:
        return f"Did you mean {lower[word.lower()]}?"
    near = [lower[name] for name in get_close_matches(word.lower(), lower, n=3, cutoff=0.6)]
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Known: {', '.join(known)}."
