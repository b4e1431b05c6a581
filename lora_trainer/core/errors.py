"""What can go wrong for a user, and the exit code that each kind carries."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

DONE = 0
WRONG_USAGE = 2
DATASET_REFUSED = 3
LORA_REFUSED = 4
TRAINING_FAILED = 5


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong and what to do about it."""

    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.message} {self.fix}".strip()


class UserError(Exception):
    """Something the user can mend. Shown without a traceback, all problems at once."""

    exit_code = WRONG_USAGE
    said_by_all = False  # of several processes, not by the main one alone

    def __init__(self, problems: Problem | str | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem(problems)
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UsageError(UserError):
    """A flag, config value or input file that cannot be used."""


@contextmanager
def known_as(names: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, problems that name a place say what people know it by instead; `names` may grow meanwhile."""

    def told(text: str) -> str:
        for place in sorted(names, key=len, reverse=True):
            text = text.replace(place, names[place])
        return text

    try:
        yield
    except UsageError as error:
        found = [Problem(told(problem.message), told(problem.fix)) for problem in error.problems]
        if found == list(error.problems):
            raise
        raise UsageError(found) from error


@contextmanager
def gathering(problems: list[Problem]) -> Iterator[None]:
    """Add what a UsageError in the block says to `problems` and leave the block, so that what else is wrong is told with it."""
    try:
        yield
    except UsageError as error:
        problems.extend(problem for problem in error.problems if problem not in problems)


class Refused(UserError):
    """A gate's no. `report` is what the gate found: a DataReport or a LoraReport, or None."""

    def __init__(self, problems: Problem | str | Iterable[Problem], report: Any = None) -> None:
        super().__init__(problems)
        self.report = report


class DatasetRefused(Refused):
    """The data cannot be trained on, or scores below the gate."""

    exit_code = DATASET_REFUSED


class LoraRefused(Refused):
    """The LoRA scores below the gate or has not seen every image; it stays on disk, marked."""

    exit_code = LORA_REFUSED


class TrainingFailed(UserError):
    """Training could not go on; the message names what was saved."""

    exit_code = TRAINING_FAILED


# How torch, CUDA, its libraries and the system say it where they raise no error of its own.
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
    """Whether memory ran out, of a GPU or of the system, in whatever words a library says it. Loads nothing."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


class memory_may_run_out:  # noqa: N801  used as a statement, as contextlib.suppress is
    """Leave the block quietly where memory runs out in it, with nothing that holds what must be freed."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and is_out_of_memory(error)


def first_line(error: BaseException) -> str:
    """What an error says, as far as it fits a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def nearest(word: str, known: Iterable[str]) -> str:
    """`Did you mean …?` for a misspelt word, or the known words when nothing is near."""
    known = sorted(known)
    near = get_close_matches(word, known, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Known: {', '.join(known)}."
