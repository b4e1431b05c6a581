"""One try: a disturbed run, its files on the disk, and the run that resumes from them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lora_trainer.config.toml import read_toml
from lora_trainer.core.errors import UserError
from lora_trainer.data.caches.files import ENTRY, KINDS, entry_folders, named
from lora_trainer.lora_format.tensor_file import DamagedFile, read_sealed
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, read_checkpoint, step_of
from tests.faults.disk import Mode
from tests.faults.ground import STEPS, Ended, Ground
from tests.recipes.recipe import losses, rows, tensor_bytes

NAME = "first"
FILES = (f"{NAME}.safetensors", f"{NAME}.diffusers.safetensors")
NEAR = 2e-3  # of a weight, in fp16
KILLS = (Mode.KILL, Mode.TORN, Mode.CUT)
# Allowed exit codes when the disk fails: success, refused (2), failed (5).
FAILED_CODES = (0, 2, 5)


@dataclass(frozen=True)
class Expected:
    """The files of an undisturbed run."""

    operations: tuple[str, ...]
    tensors: dict[str, dict[str, bytes]]
    losses: list[float]
    validation_loss: list[tuple[int, float]]


@dataclass
class Row:
    """A fault, its place, its count, and the outcome. The table sums those of one fault."""

    fault: str
    where: str
    notes: str = ""
    tries: int = 0
    lost: int = 0  # most steps that were trained again because of it
    same: int = 0  # tries that ended with the same bytes as an undisturbed run
    wrong: int = 0  # tries that ended as they must not
    problems: list[str] = field(default_factory=list)

    def add(self, tried: Tried) -> None:
        self.tries += 1
        self.lost = max(self.lost, tried.lost)
        self.same += tried.same and not tried.problems
        self.wrong += bool(tried.problems)
        self.problems += [f"{tried.what}: {problem}" for problem in tried.problems]


@dataclass(frozen=True)
class Tried:
    """The fault, the steps trained again, the problems, and whether the bytes equal the undisturbed run's."""

    what: str
    lost: int
    problems: list[str]
    same: bool = True


def undisturbed(ground: Ground, *, cached: bool = True) -> Expected:
    """Run to the end undisturbed."""
    place = ground.new_place(cached=cached)
    ended = ground.run(place)
    assert ended.exit == 0, ended.output
    assert ended.steps == STEPS
    folder = run_folder(place)
    tensors = {name: tensor_bytes(folder / name) for name in FILES}
    return Expected(ended.operations, tensors, losses(folder), validation_loss(folder))


def run_folder(place: Path) -> Path:
    return place / "runs" / NAME


def validation_loss(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(folder, "validation.jsonl")]


def try_at(
    ground: Ground,
    expected: Expected,
    at: int,
    mode: Mode,
    *,
    number: int = 0,
    cached: bool = True,
    codes: Iterable[int] = FAILED_CODES,
) -> Tried:
    """Disturb a run at one operation, check its files, resume, and compare.

    Before the first image file both are brief: the gate touches no disk.
    """
    images = (index for index, operation in enumerate(expected.operations) if "/samples" in operation)
    brief = at < next(images, len(expected.operations))
    place = ground.new_place(cached=cached)
    ended = ground.run(place, at=at, mode=mode, number=number, brief=brief)
    named = expected.operations[at] if at < len(expected.operations) else "the end"
    problems = [*wrong_end(ended, mode, tuple(codes)), *torn(place, expected)]
    lost, more = resumed(ground, place, expected, ended, brief=brief)
    tried = Tried(f"{place.name} {mode.name} {at} ({named})", lost, problems + more)
    if not tried.problems:
        shutil.rmtree(place)
    return tried


def wrong_end(ended: Ended, mode: Mode, codes: tuple[int, ...]) -> list[str]:
    """The problems of a disturbed run's end: it may fail, but not silently and not with a traceback."""
    if ended.late:
        return ["it did not end"]
    if mode in KILLS and ended.fired:
        return [] if ended.signal == 9 else [f"ended with {ended.exit}, not killed"]
    wrong = [] if ended.exit in codes else [f"ended with exit {ended.exit}, signal {ended.signal}"]
    if mode != Mode.SIGNAL and ended.exit and "error: " not in ended.output:
        wrong.append("ended without an error message")
    wrong += [f"printed {word!r}" for word in ("Traceback", "this is a bug") if word in ended.output]
    return [f"{each}: {last_line(ended)}" for each in wrong]


def last_line(ended: Ended) -> str:
    lines = ended.output.strip().splitlines()
    return lines[-1][:300] if lines else "(no output)"


def torn(place: Path, expected: Expected) -> list[str]:
    """Files under their final names that are incomplete."""
    folder, problems = run_folder(place), []
    for path in list_checkpoints(folder / "checkpoints"):
        try:
            read_checkpoint(path)
        except UserError as error:
            problems.append(f"torn: {error}")
    exported = [name for name in FILES if (folder / name).exists()]
    problems += [f"torn: {name}" for name in exported if not same_tensors(folder / name, expected.tensors[name])]
    for name, read in (("run.json", read_document), ("config.toml", read_toml)):
        if (folder / name).exists():
            try:
                read(folder / name)
            except (ValueError, UserError) as error:
                problems.append(f"torn: {name} ({error})")
    return problems + damaged_caches(place / "cache")


def read_document(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def same_tensors(path: Path, wanted: dict[str, bytes]) -> bool:
    try:
        return tensor_bytes(path) == wanted
    except Exception:  # noqa: BLE001  safetensors raises its own for a file cut off
        return False


def damaged_caches(folder: Path) -> list[str]:
    """Entries under their names that are damaged."""
    problems = []
    entries = [path for kind in KINDS for place in entry_folders(folder, kind) for path in named(place, ENTRY)]
    for path in entries:
        try:
            read_sealed(path, path.stem, needs_digest=True)
        except DamagedFile as error:
            problems.append(f"torn: {error}")
    return problems


def resumed(ground: Ground, place: Path, expected: Expected, ended: Ended, *, brief: bool) -> tuple[int, list[str]]:
    """Resume: the steps that were trained again, and the differences from the undisturbed run."""
    folder = run_folder(place)
    there = list_checkpoints(folder / "checkpoints")
    newest = step_of(there[0]) if there else 0
    again = ground.run(place, "--resume", brief=brief)
    if again.exit != 0:
        return 0, [f"--resume ended with {again.exit or again.signal}: {last_line(again)}"]
    lost = ended.steps + again.steps - STEPS
    problems = differences(folder, expected)
    if again.steps != STEPS - newest:
        problems.append(f"{again.steps} steps were trained from checkpoint {newest} on")
    return lost, problems + left_over(folder)


def differences(folder: Path, expected: Expected) -> list[str]:
    """The differences of a finished run from the undisturbed one."""
    problems = [f"{name} differs" for name in FILES if not same_tensors(folder / name, expected.tensors[name])]
    try:
        if losses(folder) != expected.losses:
            steps = [row["step"] for row in rows(folder)]
            problems.append(f"metrics.jsonl differs (steps {steps})")
        if validation_loss(folder) != expected.validation_loss:
            problems.append(f"validation.jsonl differs {validation_loss(folder)}")
        if read_document(folder / "run.json")["status"] != "done":
            problems.append("run.json is not done")
    except (OSError, ValueError) as error:
        problems.append(f"a record cannot be read: {error}")
    return problems


def nearly(folder: Path, expected: Expected) -> list[str]:
    """Where the exported weights differ by more than rounding."""
    problems = []
    for name in FILES:
        for key, value in load_file(folder / name).items():
            wanted = torch.frombuffer(bytearray(expected.tensors[name][key]), dtype=value.dtype).view(value.shape)
            if not torch.allclose(value.float(), wanted.float(), atol=NEAR, rtol=NEAR):
                problems.append(f"{name}: {key} differs")
                break
    return problems


def left_over(folder: Path) -> list[str]:
    """Files and folders of a broken run that the finished run did not remove."""
    pattern = re.compile(r"^\..*\.(part|old)$|^\.tmp")
    found = [path.relative_to(folder).as_posix() for path in folder.rglob(".*") if pattern.search(path.name)]
    return [f"left over: {', '.join(sorted(found))}"] if found else []
