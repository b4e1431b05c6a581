"""Requests to a run while it trains: files in `RUN/requests`, read between steps, answered in `RUN/requests/done`.

`{"do": "save"}` writes a checkpoint and exports the LoRA, `{"do": "sample"}` generates images, and
`{"do": "prompts", "prompts": [...]}` replaces the prompts of sample images. None of them changes what is trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lora_trainer.core.errors import Problem, UsageError, nearest
from lora_trainer.core.findings import counted
from lora_trainer.core.io import create_exclusively, read_json, write_json

if TYPE_CHECKING:
    from lora_trainer.config.schema import SampleSection

FOLDER, ANSWERED = "requests", "done"
KINDS = ("save", "sample", "prompts")
MOST_PROMPTS, LONGEST_PROMPT = 16, 2000  # characters of each
MOST_BYTES = 2**20  # of a request's file
SHOWN = 60  # characters of what is wrong
AS_FILES = 'Use `lora-trainer request`, or write an object such as {"do": "save"}.'


@dataclass(frozen=True)
class RunRequest:
    """What a run is asked to do; one that cannot be read has a `problem`."""

    do: str
    prompts: tuple[str, ...] = ()
    problem: str | None = None


def parse_request(document: object) -> RunRequest:
    """The request that a JSON document makes. Raises UsageError with everything that is wrong with it."""
    if not isinstance(document, dict):
        raise UsageError(Problem("request_invalid", "A request is a JSON object.", AS_FILES))
    do, prompts, problems = document.get("do"), document.get("prompts", []), list[Problem]()
    if do not in KINDS:
        problems.append(
            Problem("unknown_request", f"There is no request {repr(do)[:SHOWN]}.", nearest(str(do)[:SHOWN], KINDS))
        )
    if strange := sorted(document.keys() - {"do", "prompts"}):
        problems.append(Problem("request_invalid", f"A request has no {repr(strange[0])[:SHOWN]}.", AS_FILES))
    if do == "prompts":
        problems += prompt_problems(prompts)
    elif prompts != []:
        problems.append(
            Problem("request_invalid", "Prompts belong to the request `prompts`.", "Send it first, then `sample`.")
        )
    if problems:
        raise UsageError(problems)
    return RunRequest(str(do), tuple(prompts))


def prompt_problems(prompts: object) -> list[Problem]:
    """What is wrong with the prompts of a request."""
    if not isinstance(prompts, list) or not all(isinstance(each, str) and each.strip() for each in prompts):
        return [
            Problem("request_invalid", "Prompts are a list of texts that are not empty.", "Leave the empty ones out.")
        ]
    found = []
    if not 1 <= len(prompts) <= MOST_PROMPTS:
        found.append(
            Problem("request_invalid", f"There are {counted(len(prompts), 'prompt')}.", f"Name 1 to {MOST_PROMPTS}.")
        )
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) > LONGEST_PROMPT:
            message = f"Prompt {number} has {len(prompt)} characters."
            found.append(Problem("request_invalid", message, f"Shorten it to {LONGEST_PROMPT}."))
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            found.append(
                Problem("request_invalid", f"Prompt {number} has characters that are not UTF-8.", "Leave them out.")
            )
    return found


def write_request(run: Path, do: str, prompts: Sequence[str] = ()) -> Path:
    """Write a request to the run in the folder `run`: the path of its file, `requests/N.json`, whole or absent.

    Its answer will be in `requests/done`, in a file of the same name. Raises UsageError for one that the run would refuse,
    OSError where it cannot be written.
    """
    document = {"do": do, **({"prompts": list(prompts)} if prompts or do == "prompts" else {})}
    parse_request(document)
    folder = run / FOLDER
    (folder / ANSWERED).mkdir(parents=True, exist_ok=True)
    # In this order: the trainer writes an answer before it deletes the request.
    names = chain(os.listdir(folder), os.listdir(folder / ANSWERED))
    numbers = [int(stem) for name in names if (stem := name.removesuffix(".json")).isdecimal() and stem != name]
    number = max(numbers, default=0) + 1
    while not create_exclusively(path := folder / f"{number}.json", json.dumps(document, ensure_ascii=False) + "\n"):
        number += 1
    return path


class Requests:
    """The requests to a run, from when they are read until they are answered.

    Only the main process reads them, below the run's folder `run`, which is None in the others. All processes agree by
    their votes on what is done after a step (`training/stopping.py`). As a context it answers, at its end, what was not
    done. `sample` are the run's settings.
    """

    def __init__(self, run: Path | None = None, sample: SampleSection | None = None) -> None:
        self.prompts: tuple[str, ...] | None = None  # of sample images, in place of the config's
        self.due: frozenset[str] = frozenset()  # the kinds that all processes do after this step
        self._folder = None if run is None else run / FOLDER
        # Where each prompt has control images of its own; 0 allows any number.
        self._prompts_needed = len(set(sample.prompts)) if sample and len(sample.control_images) > 1 else 0
        self._sent: dict[str, RunRequest] = {}  # by file name: read, and voted for
        self._agreed: dict[str, RunRequest] = {}
        self._stuck: set[str] = set()  # answered, in files that cannot be deleted
        self._step: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.restart()
        self.read()
        self._agreed, self._sent = self._sent, {}
        self.answer(self._step, lambda kind: Problem("training_ends", "The training ended before this was done."))

    def restart(self) -> None:
        """Forget what was read and not answered, before the first step and after a rollback: it is read again."""
        self._sent, self._agreed, self.due = {}, {}, frozenset()

    def read(self) -> list[bool]:
        """Read what is new, of the main process; for each of `KINDS` whether it is requested since the last votes."""
        if self._folder is None:
            return [False] * len(KINDS)
        known = self._stuck | self._sent.keys() | self._agreed.keys()
        names = list[str]()
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                whole = entry.name.endswith(".json") and not entry.name.startswith(".")
                if whole and entry.name not in known and entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
        for name in sorted(names, key=lambda name: (len(name), name)):
            request, needed = read_request(self._folder / name), self._prompts_needed
            if request.prompts and needed and len(set(request.prompts)) != needed:
                problem = f"sample.control_images has images for {counted(needed, 'prompt')}. Name as many."
                request = RunRequest(request.do, problem=problem)
            self._sent[name] = request
        wanted = {request.do for request in self._sent.values() if request.problem is None}
        return [kind in wanted for kind in KINDS]

    def agree(self, kinds: Iterable[str]) -> None:
        """All processes do these kinds after this step: what was read before the votes that say so."""
        self._agreed |= self._sent
        self._sent = {}
        self.due |= frozenset(kinds)
        for request in self._agreed.values():
            self.prompts = request.prompts or self.prompts

    def answer(self, step: int | None, result_of: Callable[[str], str | Problem]) -> list[str]:
        """Answer what was agreed on, by the result of each of `KINDS`; returns a sentence for each answer."""
        self._step, agreed = step, self._agreed
        self._agreed, self.due = {}, frozenset()
        sentences = []
        for name, request in agreed.items():
            result = result_of(request.do) if request.problem is None else Problem("request_invalid", request.problem)
            document: dict[str, Any] = {"do": request.do, "step": step}
            if request.prompts:
                document["prompts"] = list(request.prompts)
            if isinstance(result, Problem):
                document["problem"] = str(result)
                sentences.append(f"a request was refused: {result}")
            else:
                document["result"] = result
                sentences.append(f"requested: {result}")
            assert self._folder is not None
            with suppress(OSError):  # no disk that refuses an answer ends a run
                write_json(self._folder / ANSWERED / name, document)
            try:
                (self._folder / name).unlink(missing_ok=True)
            except OSError:
                self._stuck.add(name)
        return sentences


def read_request(path: Path) -> RunRequest:
    """The request in a file, or what is wrong with it."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError("too large")
        return parse_request(read_json(path))
    except UsageError as error:
        return RunRequest("", problem=" ".join(str(error).splitlines()))
    except (OSError, ValueError):
        return RunRequest("", problem=f"The file is no JSON document of at most {MOST_BYTES} bytes. {AS_FILES}")
