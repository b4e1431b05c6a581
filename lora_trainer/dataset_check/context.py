"""The input of the dataset checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.findings import Finding, printable

if TYPE_CHECKING:
    from lora_trainer.config.schema import CaptionsSection
    from lora_trainer.data.alike import Alike
    from lora_trainer.data.buckets import ResizeCrop
    from lora_trainer.data.images.measures import Seen
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.views import Framing


@dataclass(frozen=True)
class CheckContext:
    """All that checks may read. `fits`, `seen` and the places in `alike` are in the order of the samples.

    `rules` are the caption settings of each source; empty where there are none. `known_words` and `count_tokens` are as in
    `DatasetGate`.
    """

    samples: tuple[Sample, ...]
    fits: tuple[ResizeCrop, ...]
    framings: tuple[Framing, ...]  # of each source
    seen: tuple[Seen, ...]
    read_findings: tuple[Finding, ...]
    alike: Alike
    allow_upscale: bool
    caption_limit: int | None
    rules: tuple[CaptionsSection, ...] = ()
    learned_tokens: tuple[str, ...] = ()  # of textual inversion
    num_vectors: int = 1  # embeddings of each, and so its tokens in a caption
    known_words: frozenset[str] = frozenset()
    count_tokens: Callable[[str], int] | None = None
    masks: Mapping[str, Seen] = field(default_factory=dict)  # measures of mask files, by their content


Check = Callable[[CheckContext], list[Finding]]


def beside(other: Path, path: Path) -> str:
    """How a file is named from where another lies: its name alone in the same folder."""
    try:
        return printable(Path(os.path.relpath(other, path.parent)).as_posix())
    except ValueError:  # on another drive
        return printable(str(other))
