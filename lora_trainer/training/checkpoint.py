"""Checkpoints: everything that resuming needs, in safetensors and JSON, whole or absent.

A checkpoint is written into a hidden folder, flushed, read back and only then renamed,
so that a folder named `step-…` is always complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.io import flush_file, flush_folder, read_json
from lora_trainer.training.state import TrainState

VERSION = 2
ADAPTER, OPTIMIZER, STATE = "adapter.safetensors", "optimizer.safetensors", "state.json"
AVERAGE = "average.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What a resumed run starts from. `optimizer` is a torch state dict."""

    state: TrainState
    adapter: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None
    settings: dict[str, Any]
    average: dict[str, Tensor] | None = None  # of the adapter, where the run keeps one


def flatten(value: Any, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """Split nested dicts and lists into their tensors, by path, and the rest, as JSON can hold it.

    Keys that are numbers are remembered as such: an optimizer's state is keyed by them.
    """
    if isinstance(value, Tensor):
        return {prefix: value.detach().cpu().contiguous().clone()}, {"tensor": prefix}
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
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no word for these
        return {}, {"float": str(value)}
    return {}, {"value": value}


def restore(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    ((kind, content),) = rest.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: restore(item, tensors) for key, item in content}
    if kind == "list":
        return [restore(item, tensors) for item in content]
    if kind == "tuple":
        return tuple(restore(item, tensors) for item in content)
    if kind == "float":
        return float(content)
    return content


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-000123`, read it back, and return it. Raises TrainingFailed when the disk refuses."""
    target = folder / step_name(checkpoint.state.step)
    hidden, aside = folder / f".{target.name}.part", folder / f".{target.name}.old"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in (hidden, aside):
            shutil.rmtree(leftover, ignore_errors=True)
        hidden.mkdir()
        write_parts(hidden, checkpoint)
        for path in hidden.iterdir():
            flush_file(path)
        flush_folder(hidden)
        read_checkpoint(hidden)
        if target.exists():  # the same step, trained again: aside first, so that one of the two is always there
            os.replace(target, aside)
        os.replace(hidden, target)
        shutil.rmtree(aside, ignore_errors=True)
        flush_folder(folder)
    except (OSError, SafetensorError, UsageError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise TrainingFailed(
            Problem(
                f"The checkpoint of step {checkpoint.state.step} could not be written ({error}).",
                f"{kept(folder)} Free some room.",
            )
        ) from error
    return target


def kept(folder: Path) -> str:
    """What is safe on the disk, for an error message."""
    newest, _ = newest_valid(folder)
    return f"{newest[0]} is safe: --resume goes on from there." if newest else "Nothing had been saved yet."


def write_parts(folder: Path, checkpoint: Checkpoint) -> None:
    tensors, rest = flatten(checkpoint.optimizer)
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.adapter.items()}, folder / ADAPTER)
    save_file(tensors, folder / OPTIMIZER)
    if checkpoint.average is not None:
        save_file({name: tensor.contiguous() for name, tensor in checkpoint.average.items()}, folder / AVERAGE)
    document = {
        "version": VERSION,
        "state": checkpoint.state.to_json(),
        "optimizer": rest,
        "scaler": checkpoint.scaler,
        "settings": checkpoint.settings,
        "average": checkpoint.average is not None,
    }
    (folder / STATE).write_text(json.dumps(document), encoding="utf-8")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint. Raises UsageError when it is damaged, incomplete or of another version."""
    try:
        document = read_json(folder / STATE)
        if document["version"] != VERSION:
            raise UsageError(Problem(f"{folder} is a checkpoint of version {document['version']}; this is {VERSION}."))
        adapter, optimizer = (load_file(folder / name) for name in (ADAPTER, OPTIMIZER))
        return Checkpoint(
            state=TrainState.from_json(document["state"]),
            adapter=adapter,
            optimizer=restore(document["optimizer"], optimizer),
            scaler=document["scaler"],
            settings=document["settings"],
            average=load_file(folder / AVERAGE) if document["average"] else None,
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError(Problem(f"{folder} is damaged ({error}).", "Delete it; an older one is used.")) from error


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, newest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=step_of, reverse=True)


def newest_valid(
    folder: Path, wanted: Callable[[int], bool] = lambda step: True
) -> tuple[tuple[Path, Checkpoint] | None, list[Path]]:
    """The newest checkpoint of a wanted step that reads back whole, and the damaged ones passed over for it."""
    damaged: list[Path] = []
    for path in filter(lambda path: wanted(step_of(path)), list_checkpoints(folder)):
        try:
            return (path, read_checkpoint(path)), damaged
        except UsageError:
            damaged.append(path)
    return None, damaged


def prune(folder: Path, keep_last: int, newest: int) -> None:
    """Delete all but the last `keep_last` checkpoints up to step `newest`, which was just written.

    Later ones go too: a run that has come back to this step could not read them.
    """
    later = [path for path in list_checkpoints(folder) if step_of(path) > newest]
    earlier = [path for path in list_checkpoints(folder) if step_of(path) <= newest]
    for path in (*later, *earlier[keep_last:]):
        shutil.rmtree(path, ignore_errors=True)
