"""Read and write checkpoints: everything that resuming needs, in safetensors and JSON, whole or absent.

A checkpoint is written into a hidden folder, flushed, read back and only then renamed, so that a folder named
`step-…` is always complete. It is renamed again before it is deleted. Readers change nothing: a writer may be running.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lora_trainer.core.disk import what_helps
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.io import flush_file, flush_folder, rename_over
from lora_trainer.lora_format.tensor_file import DamagedFile, read_sealed, verify_sealed, write_sealed
from lora_trainer.training.state import TrainState

VERSION = 8  # 7 always had the optimizer's state; 6 had no end by a search; 5 had no losses before training; 4 and 3 had other names; 2 and 1 had no checksums, and 1 no average
ADAPTER, OPTIMIZER, STATE = "adapter.safetensors", "optimizer.safetensors", "state.json"
AVERAGE = "average.safetensors"
FINISHED = re.compile(r"(?P<name>step-[0-9]+)|\.(?P<aside>step-[0-9]+)\.old")
SEAL = "sha256"  # of all of `state.json` but itself


class NewerVersion(UsageError):
    """A whole checkpoint that a later version of this program wrote, and that cannot be read here."""


class Damaged(UsageError):
    """A checkpoint that has changed since it was written, or is missing."""


WEIGHTS_ONLY = "it holds weights without the optimizer's state (checkpoint.save_state=false)"


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the `last`, those of steps to keep `for_good`, and the `best` by validation loss."""

    last: int
    regular: Callable[[int], bool]  # a step at the interval, which a run rolls back to
    for_good: Callable[[int], bool] = lambda step: False
    best: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """What a resumed run starts from. `optimizer` is a torch state dict.

    Without it (`checkpoint.save_state=false`) nothing can be resumed, and `adapter` holds the weights that would be exported.
    """

    state: TrainState
    adapter: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    scaler: dict[str, Any] | None
    settings: dict[str, Any]
    average: dict[str, Tensor] | None = None  # of the adapter, where the run keeps one


def flatten(value: Any, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """Split nested dicts and lists into their tensors by path, not copied, and the rest for JSON.

    Keys that are numbers stay numbers: an optimizer's state has such keys.
    """
    if isinstance(value, Tensor):
        return {prefix: value.detach()}, {"tensor": prefix}
    if isinstance(value, Mapping):
        tensors: dict[str, Tensor] = {}
        rows = []
        for key, item in value.items():
            found, rest = flatten(item, f"{prefix}/{key}")
            tensors |= found
            rows.append([key, rest])
        return tensors, {"dict": rows}
    if isinstance(value, list | tuple):
        parts = [flatten(item, f"{prefix}/{index}") for index, item in enumerate(value)]
        kind = "list" if isinstance(value, list) else "tuple"
        return {name: tensor for found, _ in parts for name, tensor in found.items()}, {
            kind: [rest for _, rest in parts]
        }
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no value for these
        return {}, {"float": str(value)}
    return {}, {"value": value}


def unflatten(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    ((kind, content),) = rest.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unflatten(item, tensors) for key, item in content}
    if kind == "list":
        return [unflatten(item, tensors) for item in content]
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in content)
    if kind == "float":
        return float(content)
    return content


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-000123`, read it back, and return it. Leaves nothing incomplete.

    Raises TrainingFailed when the disk refuses, or it reads back otherwise.
    """
    target = folder / step_name(checkpoint.state.step)
    try:
        put_in_place(target, partial(write_parts, checkpoint=checkpoint))
    except (OSError, DamagedFile) as error:
        raise TrainingFailed(
            Problem(
                "checkpoint_not_written",
                f"The checkpoint of step {checkpoint.state.step} could not be written ({error}).",
                f"{resume_hint(folder)} {what_helps(error)}.",
            )
        ) from error
    return target


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Copy a checkpoint into another folder, whole or not at all. Raises OSError, and DamagedFile where it reads back otherwise."""

    def copy_parts(hidden: Path) -> None:
        names = {*read_state(source)["files"], STATE}
        if foreign := names - {ADAPTER, OPTIMIZER, AVERAGE, STATE}:
            raise DamagedFile(f"{STATE} names {min(foreign)[:80]!r}, which is no file of a checkpoint")
        for name in names:
            shutil.copyfile(source / name, hidden / name)
            flush_file(hidden / name)

    put_in_place(folder / source.name, copy_parts)


def put_in_place(target: Path, fill: Callable[[Path], None]) -> None:
    """Make a checkpoint's folder: `fill` a hidden one, verify its digests, and give it its name. Raises OSError, DamagedFile."""
    folder = target.parent
    hidden, aside = folder / f".{target.name}.part", aside_of(target)
    folder.mkdir(parents=True, exist_ok=True)
    put_back(folder)
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir()
        fill(hidden)
        flush_folder(hidden)
        for name, digest in read_state(hidden)["files"].items():
            verify_sealed(hidden / name, name, digest)
        if target.exists():  # the same step, trained again: aside first, so that one of the two is always there
            rename_over(target, aside)
        rename_over(hidden, target)
        flush_folder(folder)
    except BaseException:
        put_back(folder)
        raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(OSError):
        remove(aside)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, renamed first: a crash midway leaves nothing that looks like one.

    Raises OSError when it is still there.
    """
    hidden = checkpoint.with_name(f".{checkpoint.name.removeprefix('.')}.part")
    shutil.rmtree(hidden, ignore_errors=True)
    rename_over(checkpoint, hidden)
    flush_folder(checkpoint.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def aside_of(checkpoint: Path) -> Path:
    """Where a checkpoint waits while another of its step takes its place."""
    return checkpoint.with_name(f".{checkpoint.name}.old")


def put_back(folder: Path) -> None:
    """Restore checkpoints that were set aside for another of the same step; delete them where that exists.

    Only for the process that owns the folder.
    """
    for aside in folder.glob(".step-*.old"):
        target = folder / aside.name.removeprefix(".").removesuffix(".old")
        with contextlib.suppress(OSError):
            if target.exists():
                remove(aside)
            else:
                rename_over(aside, target)


def resume_hint(folder: Path) -> str:
    """What is on the disk and how to resume, for an error message."""
    newest, passed_over = newest_valid(folder)
    if newest is not None:
        return f"{newest[0]} is safe: --resume continues from there."
    weights = next((path for path, why in passed_over.items() if why == WEIGHTS_ONLY), None)
    return (
        f"{weights} is safe: it holds weights, to use but not to resume." if weights else "Nothing had been saved yet."
    )


def write_parts(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the files of a checkpoint, each flushed. `state.json` names the others with their digests."""
    parts, rest = {ADAPTER: checkpoint.adapter}, None
    if checkpoint.optimizer is not None:
        parts[OPTIMIZER], rest = flatten(checkpoint.optimizer)
    if checkpoint.average is not None:
        parts[AVERAGE] = checkpoint.average
    document = {
        "version": VERSION,
        "state": checkpoint.state.to_json(),
        "optimizer": rest,
        "scaler": checkpoint.scaler,
        "settings": checkpoint.settings,
        "files": {name: write_sealed(folder / name, part, name) for name, part in parts.items()},
    }
    with open(folder / STATE, "wb") as file:
        file.write(sealed_text(document))
        file.flush()
        os.fsync(file.fileno())


def sealed_text(document: Mapping[str, Any]) -> bytes:
    """A JSON document with a digest of itself as its last entry."""
    text = json.dumps(document)
    return json.dumps({**document, SEAL: hashlib.sha256(text.encode("utf-8")).hexdigest()}).encode("utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """The document of `state.json`; an earlier version names its files without digests.

    Raises OSError, DamagedFile, NewerVersion, and ValueError or KeyError for what is no such document.
    """
    raw = (folder / STATE).read_bytes()
    try:
        document: dict[str, Any] = json.loads(raw)
    except RecursionError:
        raise DamagedFile(f"{STATE} is nested too deeply") from None
    seal = document.pop(SEAL, None)
    sound = sealed_text(document) == raw
    if document["version"] > VERSION and (sound or seal is None):
        message = f"{folder} is a checkpoint of version {document['version']}, and this program reads up to {VERSION}."
        raise NewerVersion(
            Problem(
                "checkpoint_too_new",
                message,
                "Continue with the newer program that wrote it, or choose another --name.",
            )
        )
    if document["version"] < 3 and seal is None:
        averages = (AVERAGE,) if document.get("average") else ()
        return document | {"files": dict.fromkeys((ADAPTER, OPTIMIZER, *averages))}
    if not sound:
        raise DamagedFile(f"{STATE} is not what was written: its checksum differs")
    return document


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint, set aside or not. Raises UsageError when it is damaged, incomplete or of a newer version."""
    for place in (folder, aside_of(folder)):  # in the order in which a writer uses them; it ends at the first
        with contextlib.suppress(Damaged):
            return read_parts(place, folder.name)
    return read_parts(folder, folder.name)


def read_parts(folder: Path, name: str) -> Checkpoint:
    """The checkpoint called `name` that a folder holds. Raises Damaged, and NewerVersion."""
    try:
        document = read_state(folder)
        state = TrainState.from_json(document["state"])
        if name != step_name(state.step):
            raise DamagedFile(f"it holds step {state.step}")
        if foreign := set(document["files"]) - {ADAPTER, OPTIMIZER, AVERAGE}:
            raise DamagedFile(f"{STATE} names {min(foreign)[:80]!r}, which is no file of a checkpoint")
        parts = {name: read_sealed(folder / name, name, digest) for name, digest in document["files"].items()}
        return Checkpoint(
            state=state,
            adapter=parts[ADAPTER],
            optimizer=None if document["optimizer"] is None else unflatten(document["optimizer"], parts[OPTIMIZER]),
            scaler=document["scaler"],
            settings=document["settings"],
            average=parts.get(AVERAGE),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(
            Problem("checkpoint_damaged", f"{folder} is damaged ({reason(error)}).", "Delete it; an older one is used.")
        ) from error


def reason(error: BaseException | None) -> str:
    """What is wrong with a checkpoint, with the name of the file, for a message."""
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {(error.strerror or str(error)).lower()}".removeprefix(": ")
    if isinstance(error, DamagedFile):
        return str(error)
    return f"{STATE} cannot be read: {type(error).__name__}: {error}"


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, newest first; one that is set aside, by its own name."""
    found = [FINISHED.fullmatch(path.name) for path in folder.glob("*")]
    return sorted({folder / (match["name"] or match["aside"]) for match in found if match}, key=step_of, reverse=True)


def newest_valid(
    folder: Path, wanted: Callable[[int], bool] = lambda step: True, *, weights_suffice: bool = False
) -> tuple[tuple[Path, Checkpoint] | None, dict[Path, str]]:
    """The newest checkpoint of a wanted step that can be resumed, and those passed over, with reasons.

    Passed over are damaged ones, and those without the optimizer's state unless `weights_suffice`. Raises NewerVersion
    for one that is newer and not damaged, but of a version that cannot be read here.
    """
    passed_over: dict[Path, str] = {}
    for path in filter(lambda path: wanted(step_of(path)), list_checkpoints(folder)):
        try:
            found = read_checkpoint(path)
        except Damaged as error:
            passed_over[path] = reason(error.__cause__)
            continue
        if found.optimizer is not None or weights_suffice:
            return (path, found), passed_over
        passed_over[path] = WEIGHTS_ONLY
    return None, passed_over


def prune(folder: Path, keep: Keep, newest: int) -> None:
    """Delete all checkpoints but those to `keep` up to step `newest`, which was just written.

    The newest one of a regular step is kept too: a run rolls back to it, wherever it was stopped since. Later ones
    are deleted: a run that rolled back to this step could not read them.
    """
    there = list_checkpoints(folder)
    earlier = [path for path in there if step_of(path) <= newest]
    kept = {*earlier[: keep.last], *[path for path in earlier if keep.regular(step_of(path))][:1]}
    kept |= {path for path in earlier if keep.for_good(step_of(path))}
    if keep.best:
        losses = {path: val_loss_of(path) for path in earlier}
        ranked = sorted((loss, -step_of(path), path) for path, loss in losses.items() if math.isfinite(loss))
        kept |= {path for _, _, path in ranked[: keep.best]}
    for path in there:
        if path not in kept:
            with contextlib.suppress(OSError):
                remove(path)


def val_loss_of(checkpoint: Path) -> float:
    """The validation loss of a checkpoint's own step, weighted as the training loss; infinite where it has none."""
    try:
        state = read_state(checkpoint)["state"]
        loss = float(state["weighted_val_loss"]) if state["validated_step"] == step_of(checkpoint) else math.inf
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NewerVersion):
        return math.inf
    return loss if math.isfinite(loss) else math.inf


def drop_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of steps later than `step`, newest first. Raises OSError when one is still there."""
    put_back(folder)
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            remove(path)
