"""What the checks look at."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lora_trainer.config.schema import CaptionsSection
from lora_trainer.core.findings import Finding, printable
from lora_trainer.data.alike import Alike
from lora_trainer.data.buckets import ResizeCrop
from lora_trainer.data.images.measures import Seen
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import Framing


@dataclass(frozen=True)
class Looked:
    """All that checks may look at. `fits` and `seen` stand in the order of the samples, and so do the places in `alike`.

    `rules` says of each source how its captions are changed; empty where nobody says.
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
    words: tuple[str, ...] = ()  # new ones, whose embeddings are learned
    word_vectors: int = 1  # embeddings of each, and so places that it takes of a caption
    masks: Mapping[str, Seen] = field(default_factory=dict)  # what mask files show, by their content


Check = Callable[[Looked], list[Finding]]


def beside(other: Path, path: Path) -> str:
    """How a file is named from where another lies: its name alone in the same folder."""
    try:
        return printable(Path(os.path.relpath(other, path.parent)).as_posix())
    except ValueError:  # on another drive
        return printable(str(other))
