"""What a verdict measures of the base model alone, kept on the disk: entries of the cache, of kind `features`.

An entry has what one batch of work gave: raw features and latents, from which verdicts compute their parts. It is named by
the content that it depends on, so that it is never out of date: it matches or is not found.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.data.caches.entries import mark_used, read_entry, write_entries
from lora_trainer.lora_format.tensor_file import DamagedFile

KIND = "features"

Entry = Mapping[str, Tensor]
Part = str | Tensor | Mapping[str, Tensor]


def digest_of(*parts: Part) -> str:
    """The sha256 of texts, and of tensors with their types, shapes and bytes, in their order."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Mapping):
            raw = digest_of(*(each for name in sorted(part) for each in (name, part[name]))).encode()
        elif isinstance(part, str):
            raw = part.encode("utf-8", "surrogatepass")
        else:
            values = part.detach().cpu().contiguous()
            found.update(f"{values.dtype} {tuple(values.shape)};".encode())
            raw = values.flatten().view(torch.uint8).numpy().tobytes()
        found.update(f"{len(raw)}:".encode())
        found.update(raw)
    return found.hexdigest()


@dataclass(frozen=True)
class BaseFeatures:
    """The entries of one base model in a cache folder. `model` names everything that all of them depend on."""

    folder: Path
    model: str

    def read_or_make(self, key: str, make: Callable[[], Entry]) -> Entry:
        """The entry of a key, a digest of what else it depends on; made now where it is missing or damaged.

        Values that are not finite, and what the disk refuses, are not kept: they are made each time.
        """
        name = digest_of(self.model, key)
        with contextlib.suppress(OSError, DamagedFile):
            found = read_entry(self.folder, KIND, name)
            mark_used(self.folder, KIND, [name])
            return found
        made = make()
        if all(bool(torch.isfinite(each).all()) for each in made.values()):
            with contextlib.suppress(OSError):
                write_entries(self.folder, KIND, [name], {each: value[None] for each, value in made.items()})
        return made
