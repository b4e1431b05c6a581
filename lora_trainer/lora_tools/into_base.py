"""Merge LoRAs into a base model, written in its own layout and types, one layer at a time.

W' = W + sum of weight * change, in fp32, rounded once to the stored type. Memory holds one layer and the LoRAs.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.core.disk import free_bytes, size_words
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.io import atomic_path, flush_file, flush_folder
from lora_trainer.core.tensorfile import METADATA, hash_of_tensors, read_tensor_header, rewrite_tensors
from lora_trainer.lora_format.low_rank import LayerRow
from lora_trainer.lora_format.metadata import HASH
from lora_trainer.lora_format.tensor_file import DTYPES
from lora_trainer.lora_tools.base_layers import BaseLayers, misfits_of, read_base, refuse_unwritable
from lora_trainer.lora_tools.lora_inputs import MERGED_FROM, ORIGIN, LoraInput, ToolResult, with_weight
from lora_trainer.models.folder import files_of_part

if TYPE_CHECKING:
    from lora_trainer.lora_format.layer_updates import LayerUpdate
    from lora_trainer.models.places import Place

OF_OTHER_TENSORS = ("sshs_model_hash", "sshs_legacy_hash", HASH)  # header entries that a changed tensor makes wrong
COARSE = 0.1  # error of a layer from which users are warned
ROOM = 1 << 26  # bytes beside the files themselves
AT_ONCE = 1 << 22  # numbers of a layer that are added at once


@dataclass
class Merging:
    """The LoRAs and what was measured: of each changed layer the rounding error, as a share of its change."""

    changes: Mapping[str, Sequence[tuple[float, LayerUpdate]]]  # by module, with the weight of each
    shapes: Mapping[str, tuple[int, ...]]  # of the modules' weights
    layers: list[LayerRow] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def change(self, modules: Mapping[str, Place]) -> Callable[[dict[str, Any], bytearray], None]:
        """The function that adds the changes of `modules` to the bytes of the tensor that they are rows of."""

        def add(entry: dict[str, Any], content: bytearray) -> None:
            stored = torch.frombuffer(content, dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
            for name, place in modules.items():
                self._add(name, place, stored)

        return add

    def _add(self, name: str, place: Place, stored: Tensor) -> None:
        """Add one module's change to its rows of a stored tensor [rows, …], in place."""
        wide = torch.float64 if stored.dtype == torch.float64 else torch.float32
        spans = place.rows or ((0, len(stored)),)
        change = self._sum(name, wide, partial(_weight, stored, spans, place.transposed, self.shapes[name]))
        size, missed, first = float(change.norm()), 0.0, 0
        if place.transposed:
            change = change.t()
        limit = torch.finfo(stored.dtype).max
        step = max(1, AT_ONCE // max(1, stored[:1].numel()))
        for begin, end in spans:
            for row in range(begin, end, step):
                part = stored[row : min(row + step, end)]
                exact = part.to(wide) + change[first : first + len(part)].reshape(part.shape)
                first += len(part)
                if stored.dtype.itemsize == 1:
                    exact = exact.clamp(-limit, limit)  # as fp8 checkpoints are made; NaN stays
                if not bool((exact.abs() <= limit).all()):
                    self.broken.append(name)
                part.copy_(exact)
                missed += float((part.to(wide) - exact).double().square().sum())
        rank = sum(update.rank for _, update in self.changes[name])
        self.layers.append(LayerRow(name, rank, rank, 1.0, math.sqrt(missed) / size if size else 0.0))

    def _sum(self, name: str, dtype: torch.dtype, weight_of: Callable[[], Tensor]) -> Tensor:
        """The change of a module's weight by all files, each as if it were the only one."""
        total: Tensor | None = None
        for weight, update in self.changes[name]:
            change = update.delta(weight_of() if update.needs_weight else None).to(dtype) * weight
            total = change if total is None else total.add_(change.reshape(total.shape))
        assert total is not None
        return total


def _weight(stored: Tensor, spans: Sequence[tuple[int, int]], transposed: bool, shape: tuple[int, ...]) -> Tensor:
    """A module's weight in fp32 and in its own shape, of its rows of a stored tensor."""
    rows = torch.cat([stored[begin:end] for begin, end in spans]).float()
    return (rows.t() if transposed else rows).reshape(shape)


def merge_into(base: Path, inputs: Sequence[LoraInput], weights: Sequence[float], target: Path) -> ToolResult:
    """Write the base model with the LoRAs merged in: a file to a file, a folder to a new folder.

    Raises UsageError with all problems before anything is written, and for a result that its types cannot hold.
    """
    layers = read_base(base, "--into")
    inputs, weights, notes = with_weight(inputs, weights)
    problems = [problem for each in inputs for problem in misfits_of(each.path.name, each.weights, layers)]
    modules = sorted({name for each in inputs for name in each.weights.modules})
    problems += refuse_unwritable(layers, modules)
    if problems:
        raise UsageError(problems)
    _refuse_full_disk(base, target)
    merging = Merging(
        {
            name: [
                (weight, each.weights.modules[name])
                for each, weight in zip(inputs, weights, strict=True)
                if name in each.weights.modules
            ]
            for name in modules
        },
        layers.shapes,
    )
    named = [{"name": each.path.name, "weight": weight} for each, weight in zip(inputs, weights, strict=True)]
    origin = {
        ORIGIN: json.dumps({"command": "merge", "base": base.name, "files": named}, sort_keys=True),
        MERGED_FROM: ", ".join([base.name, *(each.path.name for each in inputs)]),
    }
    if base.is_dir():
        _folder(layers, merging, origin, target)
    else:
        with atomic_path(target) as temporary:
            _file(base, temporary, {name: layers.weights[name] for name in merging.changes}, merging, origin)
            _refuse_broken(merging)
    return ToolResult((target,), tuple(merging.layers), (*notes, *_notes(layers, merging, inputs)))


def _file(source: Path, target: Path, places: Mapping[str, Place], merging: Merging, origin: Mapping[str, str]) -> None:
    """Write one file with the changed layers that lie in it, and read it back."""
    by_key: dict[str, dict[str, Place]] = {}
    for name, place in places.items():
        by_key.setdefault(place.key, {})[name] = place
    header = read_tensor_header(source)
    metadata = {key: value for key, value in header.get(METADATA, {}).items() if key not in OF_OTHER_TENSORS}
    change = {key: merging.change(modules) for key, modules in by_key.items()}
    written = rewrite_tensors(source, target, {**metadata, **origin}, change, HASH)
    if hash_of_tensors(target) != written:
        raise OSError(f"{target.name} reads back differently from what was written")


def _folder(base: BaseLayers, merging: Merging, origin: Mapping[str, str], target: Path) -> None:
    """Copy a diffusers folder, with the files of changed layers merged; the new folder is whole or absent."""
    by_file: dict[Path, dict[str, Place]] = {}
    for name in merging.changes:
        by_file.setdefault(base.weights[name].file, {})[name] = base.weights[name]
    with _new_folder(target) as temporary:
        for source in _files_of(base.path):
            copy = temporary / source.relative_to(base.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source in by_file:
                _file(source, copy, by_file.pop(source), merging, origin)
            else:
                shutil.copyfile(source, copy)
            flush_file(copy)
        assert not by_file, sorted(map(str, by_file))
        _refuse_broken(merging)


def _files_of(folder: Path) -> list[Path]:
    """The files that a pipeline is loaded from: those beside `model_index.json`, and each part's own."""
    beside = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in (".json", ".md", ".txt")]
    parts = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return [*beside, *(file for part in parts for file in files_of_part(part))]


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` that becomes it when the block succeeds, and is removed otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:32]}.", suffix=".part", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(target)
        flush_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_broken(merging: Merging) -> None:
    if merging.broken:
        message = f"{counted(len(merging.broken), 'layer')} would not be finite in the base model's type (first: {merging.broken[0]})."
        raise UsageError(
            Problem("weights_too_large", message, "Use a smaller weight, or a base model in bf16 or fp32.")
        )


def _refuse_full_disk(base: Path, target: Path) -> None:
    """Raise UsageError where the result does not fit on the disk, with both numbers."""
    needed = sum(path.stat().st_size for path in (_files_of(base) if base.is_dir() else [base])) + ROOM
    if 0 < (free := free_bytes(target.parent)) < needed:
        message = f"{target} needs {size_words(needed)}, and its disk has {size_words(free)} free."
        raise UsageError(Problem("disk_full", message, "Make room, or name a folder on another disk."))


def _notes(base: BaseLayers, merging: Merging, inputs: Sequence[LoraInput]) -> Iterator[str]:
    if any(each.weights.embeddings for each in inputs):
        yield "learned tokens are not merged: a base model has no place for them. Keep their files."
    coarse = [layer for layer in merging.layers if layer.error > COARSE]
    if coarse:
        worst = max(coarse, key=lambda layer: layer.error)
        yield (
            f"the base model's type rounds {counted(len(coarse), 'layer')} by more than {COARSE:.0%} of the change "
            f"(up to {worst.error:.0%}, {worst.name}): a checkpoint in fp16 or fp32 keeps more of it than one in bf16 or fp8."
        )
    files = {place.file for place in base.weights.values()}
    if base.path.is_file() and any(key.startswith("model_ema.") for file in files for key in read_tensor_header(file)):
        yield "the EMA weights of the checkpoint (model_ema.) are copied unchanged; programs use the others."
