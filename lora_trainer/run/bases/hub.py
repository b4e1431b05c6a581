"""Models of a hub: found in the user's Hugging Face cache, else downloaded into it. No torch.

A model that is complete in the cache is used without a request. All requests are in `hub_requests.py`, through the public
functions of huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.bounded import TextError, read_json_object
from lora_trainer.core.disk import free_bytes, size_words
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.models.folder import index_among, index_path
from lora_trainer.run.bases.hub_files import (
    MOST_SMALL_BYTES,
    choose_files,
    choose_parts,
    files_in,
    is_plain,
    parts_in,
)
from lora_trainer.run.bases.hub_refusals import (
    explaining_refusals,
    incomplete,
    no_parts,
    no_pipeline,
    no_such_file,
    not_here,
)
from lora_trainer.run.bases.hub_requests import (
    COMMIT,
    cached_repository,
    fetch_file,
    is_offline,
    list_files,
    range_reader,
)

if TYPE_CHECKING:
    from lora_trainer.run.bases.names import HubModel

REVISION = re.compile(r"\w[\w./-]{0,200}", re.ASCII)
MOST_INDEX_BYTES = 1 << 20
ROOM = 1.01  # of what is fetched: file systems need some for themselves

Say = Callable[[str], None]
_HEADERS: dict[tuple[Path, HubModel], Snapshot] = {}  # header-only files of checkpoints, until this process ends


@dataclass(frozen=True)
class Snapshot:
    """A repository's files at a commit; of one that is not `whole` the configs alone are here."""

    folder: Path
    commit: str
    whole: bool = False


def find_snapshot(model: HubModel, *, weights: bool, without_t5: bool, offline: bool, say: Say) -> Snapshot:
    """The model's files, from the cache where they are whole there, else from the hub; without `weights` configs alone,
    and of a single checkpoint its header.

    Raises UsageError for a model that the hub has not, holds back, or holds as pickles only, for a disk too full, and
    with `offline` for one that is not here.
    """
    # A revision or a file could lead elsewhere.
    if model.revision is not None and (not REVISION.fullmatch(model.revision) or ".." in model.revision):
        message = f"model.revision = {model.revision!r} is no branch, tag or commit."
        raise UsageError(
            Problem(
                "revision_invalid", message, "Leave it empty for the newest, or name a commit of 40 hexadecimal digits."
            )
        )
    if model.file is not None and not is_plain(model.file):
        raise UsageError(
            Problem(
                "model_name_invalid",
                f"{model} names no file of a repository.",
                "Name it as owner/name/file.safetensors.",
            )
        )
    found = cached(model)
    if found is not None:
        for whole in (True, False)[: 1 if weights else 2]:
            if not _lacking(found, model, weights=whole, without_t5=without_t5):
                return replace(found, whole=whole)
    if offline or is_offline():
        if found is not None and _parts_here(found, model, weights=weights):
            return replace(found, whole=weights)
        lacks = () if found is None else _lacking(found, model, weights=weights, without_t5=without_t5)
        raise UsageError(not_here(model, _storage(model).parent, lacks))
    if not weights and (known := _HEADERS.get((_storage(model), model))) is not None:
        return known
    with explaining_refusals(model):
        return _fetched(model, weights=weights, without_t5=without_t5, say=say)


def complete_in_cache(model: HubModel) -> Path | None:
    """The model's folder, or file, in the cache if all of it is there; makes no request."""
    found = cached(model)
    if found is None or _lacking(found, model, weights=True, without_t5=False):
        return None
    return found.folder / (model.file or "")


def cached(model: HubModel) -> Snapshot | None:
    """What the cache has of the model, whole or not."""
    storage = _storage(model)
    commit = model.asked
    if not COMMIT.fullmatch(commit):
        try:
            commit = (storage / "refs" / commit).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    folder = storage / "snapshots" / commit
    return Snapshot(folder, commit) if COMMIT.fullmatch(commit) and folder.is_dir() else None


def _storage(model: HubModel) -> Path:
    return cached_repository(model.name)


def _lacking(found: Snapshot, model: HubModel, *, weights: bool, without_t5: bool) -> tuple[str, ...]:
    """What the cache lacks of the model, in words."""
    if model.file is not None:
        return () if (found.folder / model.file).is_file() else (f"{model.file} is missing",)
    if model.parts:
        return choose_parts(files_in(found.folder), model.parts, weights=weights).lacking
    if not (index := index_path(found.folder)).is_file():
        return (f"{index.name} is missing",)
    return choose_files(files_in(found.folder), _index(found.folder), weights=weights, without_t5=without_t5).lacking


def _parts_here(found: Snapshot, model: HubModel, *, weights: bool) -> bool:
    """Whether some of the wanted parts are complete here and the others are absent: these are reported later."""
    names = files_in(found.folder)
    here = parts_in(names, model.parts)
    return bool(here) and not choose_parts(names, here, weights=weights).lacking


def _index(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(index_path(folder), MOST_INDEX_BYTES)
    except TextError as error:
        raise UsageError(
            Problem("file_unreadable", f"{index_path(folder)} {error}.", "Delete that file; it is fetched again.")
        ) from error


def _fetched(model: HubModel, *, weights: bool, without_t5: bool, say: Say) -> Snapshot:
    commit, sizes = list_files(model, say)
    folder = _storage(model) / "snapshots" / commit
    if model.file is not None:
        if model.file not in sizes:
            raise UsageError(no_such_file(model, sizes))
        if weights:
            _fetch_all(model, commit, [model.file], sizes, say)
        else:
            from lora_trainer.run.bases.hub_header import make_placeholder

            # A file in the checkpoint's place that has its header alone.
            size = sizes[model.file]
            say(f"reading the header of {model} at {commit[:12]} from the hub: the file has {size_words(size)}")
            read = range_reader(model, commit, model.file, size, say)
            folder = make_placeholder(f"{model.name}/{model.file}", size, read) / model.name
    else:
        if model.parts:
            if not (parts := parts_in(sizes, model.parts)):
                raise UsageError(no_parts(model, sizes))
            chosen = choose_parts(sizes, parts, weights=weights)
        else:
            if (index := index_among(sizes)) not in sizes:
                raise UsageError(no_pipeline(model, sizes))
            fetch_file(model, commit, index, _small(model, index, sizes), say)
            chosen = choose_files(sizes, _index(folder), weights=weights, without_t5=without_t5)
        if chosen.lacking:
            raise UsageError(incomplete(model, chosen))
        for name in chosen.small:
            _small(model, name, sizes)
        _fetch_all(model, commit, chosen.names, sizes, say)
    _note_commit(model, commit)
    found = Snapshot(folder, commit, whole=weights)
    if model.file is not None and not weights:
        _HEADERS.update({(_storage(model), each): found for each in (model, replace(model, revision=commit))})
    return found


def fetch_matching(model: HubModel, patterns: Sequence[str], say: Say) -> Path:
    """The folder of a repository's files at its top that match any of the patterns; what is not here is fetched, the smallest first.

    So where the largest file is here, a stopped download has left nothing out. Raises UsageError as `find_snapshot`.
    """
    with explaining_refusals(model):
        commit, sizes = list_files(model, say)
        at_top = [name for name in sizes if "/" not in name]
        names = [name for name in at_top if any(fnmatchcase(name, pattern) for pattern in patterns)]
        _fetch_all(model, commit, sorted(names, key=lambda name: (sizes[name], name)), sizes, say)
        _note_commit(model, commit)
    return _storage(model) / "snapshots" / commit


def _note_commit(model: HubModel, commit: str) -> None:
    """Write down which commit a branch or tag was, as the hub's own library does."""
    if COMMIT.fullmatch(model.asked):
        return
    path = _storage(model) / "refs" / model.asked
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit, encoding="ascii")


def _fetch_all(model: HubModel, commit: str, names: Iterable[str], sizes: Mapping[str, int], say: Say) -> None:
    """Fetch what is not here yet. Raises UsageError before the first when the disk has no room for all of them."""
    folder = _storage(model) / "snapshots" / commit
    left = {name: sizes[name] for name in names if not (folder / name).exists()}
    arrived = sum(part.stat().st_size for part in (_storage(model) / "blobs").glob("*.part"))
    needed, free = max(0, sum(left.values()) - arrived), free_bytes(folder)
    if needed * ROOM > free:
        message = (
            f"{model} needs {size_words(needed)}, and the disk of {_storage(model).parent} has {size_words(free)} free."
        )
        raise UsageError(Problem("disk_full", message, "Free some space, or set HF_HOME to a folder on another disk."))
    if left:
        say(f"fetching {model} at {commit[:12]} from the hub: {size_words(needed)} in {counted(len(left), 'file')}")
    for name, size in left.items():
        fetch_file(model, commit, name, size, say)


def _small(model: HubModel, name: str, sizes: Mapping[str, int]) -> int:
    """A file's bytes. Raises UsageError for a config that no config is as large as."""
    if sizes[name] > MOST_SMALL_BYTES:
        message = (
            f"{name} of {model} has {size_words(sizes[name])}; a config has at most {size_words(MOST_SMALL_BYTES)}."
        )
        raise UsageError(Problem("model_config_too_large", message, "Choose another model."))
    return sizes[name]
