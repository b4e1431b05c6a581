"""Latents and text-encoder outputs on disk: planned without encoders, filled with them.

`plan_latents` and `plan_texts` say what is there, what must be built and why;
`fill_latents` and `fill_texts` build it. So encoders are loaded only when something is
missing. Keys depend on the picture's content, its fit, the encoder and the precision,
never on names or places.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.io import read_json, write_json
from lora_trainer.data.buckets import Bucket
from lora_trainer.data.entries import DamagedEntryError, entry_path, read_entry, touch, write_entry
from lora_trainer.data.pixels import read_pixels
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import View

# Part of every key: raise it when pictures are brought to their bucket in another way.
TRANSFORM = "lanczos-cover-centre-1"
RECOLOURED = "recoloured-1"  # likewise, of recoloured views

# In the order in which they are looked for: the first that differs is the reason.
REASONS = {
    "content": ("picture changed", "pictures changed"),
    "caption": ("caption changed", "captions changed"),
    "size": ("size changed", "sizes changed"),
    "encoder": ("encoder changed", "encoder changed"),
    "dtype": ("precision changed", "precision changed"),
}
PLURALS = dict(REASONS.values())

Item = TypeVar("Item")
Record = dict[str, str]  # what an entry depends on, by the names of REASONS
Progress = Callable[[int, int], None]  # (entries done, entries to build)


@dataclass(frozen=True)
class CachePlan(Generic[Item]):
    """What is cached and what must be built. `keys` stands in the order of `items`."""

    kind: str  # "latents" or "texts"
    folder: Path
    dtype: torch.dtype
    items: tuple[Item, ...]
    keys: tuple[str, ...]
    missing: tuple[int, ...]  # indices of items to build, each key once
    reasons: tuple[str, ...]  # in the order of `missing`
    records: dict[str, Record]  # by source path, remembered when filled

    @property
    def filled(self) -> Filled:
        """How it stands once what is missing has been built."""
        entries = len(set(self.keys))
        return Filled(self.kind, entries - len(self.missing), len(self.missing), dict(Counter(self.reasons)))


@dataclass(frozen=True)
class Filled:
    """What a fill did, in distinct entries."""

    kind: str
    reused: int
    rebuilt: int
    reasons: dict[str, int]

    @property
    def line(self) -> str:
        """`31 latents: 24 reused, 7 rebuilt (5 new, 2 pictures changed)`."""
        text = f"{self.reused + self.rebuilt} {self.kind}: {self.reused} reused, {self.rebuilt} rebuilt"
        if not self.reasons:
            return text
        ranked = sorted(self.reasons.items(), key=lambda entry: (-entry[1], entry[0]))
        named = [f"{count} {PLURALS.get(reason, reason) if count > 1 else reason}" for reason, count in ranked]
        return f"{text} ({', '.join(named)})"


def _key(record: Record) -> str:
    """Name of an entry: 64 hex digits."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode("utf-8")).hexdigest()


def _view_text(view: View) -> str:
    """What a view does to a picture; what it leaves alone is not named, so that such keys stay when ways are added."""
    fit = view.fit
    text = f"{fit.resized_width}x{fit.resized_height}+{fit.left}+{fit.top} {fit.bucket} {TRANSFORM}"
    if view.flip:
        text += " mirrored"
    return f"{text} {RECOLOURED} {view.colour}" if view.colour else text


def plan_latents(
    shown: Sequence[tuple[Sample, View]], folder: Path, encoder_key: str, dtype: torch.dtype
) -> CachePlan[tuple[Sample, View]]:
    """Which latents of so many (sample, view) are cached. Writes nothing."""
    items = tuple(shown)
    records = [
        {"content": sample.content, "size": _view_text(view), "encoder": encoder_key, "dtype": str(dtype)}
        for sample, view in items
    ]

    def sound(tensors: Mapping[str, Tensor], index: int) -> bool:
        mean, spread, bucket = tensors.get("mean"), tensors.get("spread"), items[index][1].fit.bucket
        return mean is not None and spread is not None and mean.dtype == dtype and _fits(mean, spread, bucket)

    return _plan("latents", folder, dtype, items, records, _named(items), sound)


def _named(items: Sequence[tuple[Sample, View]]) -> list[str]:
    """The path of each, with a number from a picture's second view on: what is remembered goes by it."""
    seen: Counter[str] = Counter()
    names = []
    for sample, _ in items:
        path = str(sample.path)
        names.append(f"{path}#{seen[path]}" if seen[path] else path)
        seen[path] += 1
    return names


def plan_texts(
    samples: Sequence[Sample], extra: Sequence[str], folder: Path, encoder_key: str, dtype: torch.dtype
) -> CachePlan[str]:
    """Which captions are cached: those of the samples, then `extra` ones, then the empty one. Writes nothing."""
    captions = (*(sample.caption for sample in samples), *extra, "")
    records = [{"caption": caption, "encoder": encoder_key, "dtype": str(dtype)} for caption in captions]
    sources = [str(sample.path) for sample in samples] + [f"caption:{caption}" for caption in (*extra, "")]

    def sound(tensors: Mapping[str, Tensor], index: int) -> bool:
        del index
        return all(not tensor.is_floating_point() or tensor.dtype == dtype for tensor in tensors.values())

    return _plan("texts", folder, dtype, captions, records, sources, sound)


def _fits(mean: Tensor, spread: Tensor, bucket: Bucket) -> bool:
    """Latents [C, h, w] of the bucket's shape, and a spread for each value."""
    return (
        mean.ndim == 3 and mean.shape == spread.shape and mean.shape[1] * bucket.width == mean.shape[2] * bucket.height
    )


def _plan(
    kind: str,
    folder: Path,
    dtype: torch.dtype,
    items: tuple[Item, ...],
    records: Sequence[Record],
    sources: Sequence[str],
    sound: Callable[[Mapping[str, Tensor], int], bool],
) -> CachePlan[Item]:
    keys = tuple(_key(record) for record in records)
    remembered = _remembered(folder, kind, sources)
    missing: list[int] = []
    reasons: list[str] = []
    for index in {key: index for index, key in reversed(list(enumerate(keys)))}.values():
        try:
            if sound(read_entry(entry_path(folder, kind, keys[index])), index):
                continue
            reason = "damaged"
        except DamagedEntryError:
            reason = "damaged"
        except FileNotFoundError:
            reason = _why(remembered.get(sources[index]), records[index])
        missing.append(index)
        reasons.append(reason)
    order = sorted(range(len(missing)), key=missing.__getitem__)
    return CachePlan(
        kind,
        folder,
        dtype,
        items,
        keys,
        tuple(missing[place] for place in order),
        tuple(reasons[place] for place in order),
        dict(zip(sources, records, strict=True)),
    )


def _why(before: Record | None, now: Record) -> str:
    if before is None:
        return "new"
    changed = (phrases[0] for name, phrases in REASONS.items() if before.get(name) != now.get(name))
    return next(changed, "removed")


def _index_path(folder: Path, kind: str, source_folder: str) -> Path:
    named = hashlib.sha256(source_folder.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return folder / "index" / f"{kind}-{named}.json"


def _source_folder(source: str) -> str:
    return "captions" if source.startswith("caption:") else str(Path(source).parent)


def _read_index(path: Path) -> dict[str, Record]:
    """What is remembered of one folder. The index only explains, so a damaged one counts as none."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: record for name, record in value.items() if isinstance(record, dict)}


def _remembered(folder: Path, kind: str, sources: Sequence[str]) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for source_folder in {_source_folder(source) for source in sources}:
        found.update(_read_index(_index_path(folder, kind, source_folder)))
    return found


def _remember(plan: CachePlan[Item]) -> None:
    folders: dict[str, dict[str, Record]] = {}
    for source, record in plan.records.items():
        folders.setdefault(_source_folder(source), {})[source] = record
    for source_folder, records in folders.items():
        path = _index_path(plan.folder, plan.kind, source_folder)
        before = _read_index(path)
        if before | records != before:
            write_json(path, before | records)


def fill_latents(
    plan: CachePlan[tuple[Sample, View]],
    encode_image: Callable[[Tensor], tuple[Tensor, Tensor]],
    batch: int,
    progress: Progress | None = None,
) -> Filled:
    """Build the missing latents, `batch` pictures of one bucket at a time.

    `encode_image` takes pixels [B, 3, H, W] in [-1, 1] (float32, CPU) and gives mean and
    spread, each [B, C, h, w]. Raises DatasetRefused for a picture that cannot be read or
    has changed since it was listed, TrainingFailed for latents that are not finite.
    """
    groups: dict[Bucket, list[int]] = {}
    for index in plan.missing:
        groups.setdefault(plan.items[index][1].fit.bucket, []).append(index)
    done = 0
    for group in groups.values():
        for start in range(0, len(group), batch):
            chunk = group[start : start + batch]
            pixels = torch.stack([read_pixels(*plan.items[index]) for index in chunk])
            mean, spread = encode_image(pixels)
            for place, index in enumerate(chunk):
                tensors = {"mean": mean[place].to(plan.dtype), "spread": spread[place].to(plan.dtype)}
                _keep(plan, index, tensors, plan.items[index][0].path.name)
            done += len(chunk)
            if progress is not None:
                progress(done, len(plan.missing))
    return _finish(plan)


def fill_texts(
    plan: CachePlan[str],
    encode_text: Callable[[Sequence[str]], Mapping[str, Tensor]],
    batch: int,
    progress: Progress | None = None,
) -> Filled:
    """Build the missing captions. `encode_text` takes B captions and gives tensors with B first.

    Raises TrainingFailed for values that are not finite.
    """
    for start in range(0, len(plan.missing), batch):
        chunk = plan.missing[start : start + batch]
        encoded = encode_text([plan.items[index] for index in chunk])
        for place, index in enumerate(chunk):
            tensors = {
                name: tensor[place].to(plan.dtype) if tensor.is_floating_point() else tensor[place]
                for name, tensor in encoded.items()
            }
            _keep(plan, index, tensors, repr(plan.items[index]))
        if progress is not None:
            progress(start + len(chunk), len(plan.missing))
    return _finish(plan)


def _keep(plan: CachePlan[Item], index: int, tensors: Mapping[str, Tensor], name: str) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        message = f"The encoder gave values that are not finite for {name}."
        raise TrainingFailed(Problem(message, "Set memory.base_precision=fp32, or bf16 in place of fp16."))
    write_entry(entry_path(plan.folder, plan.kind, plan.keys[index]), tensors)


def _finish(plan: CachePlan[Item]) -> Filled:
    built = {plan.keys[index] for index in plan.missing}
    for key in set(plan.keys) - built:
        touch(entry_path(plan.folder, plan.kind, key))
    _remember(plan)
    return plan.filled
