"""The trackers that `run.trackers` can name: a file of this folder each, and a line of this table. No torch.

A file has a function `open_tracker(run: TrackedRun) -> Tracker` (`interface.py`). It is imported when a run uses it, and
its library with it. It may have a function `abandon()`, called when the run ends without its tracker: what its library
does at the end of the process must not take longer than the run waited.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from lora_trainer.core.errors import Problem


@dataclass(frozen=True)
class TrackerKind:
    """The library that a tracker imports, what pip installs for it, the name that people know it by, and settings it reads."""

    library: str
    requirement: str
    title: str
    reads: Collection[str] = ()


TRACKERS = {
    "tensorboard": TrackerKind("tensorboard", "tensorboard", "TensorBoard"),
    "wandb": TrackerKind("wandb", "lora-trainer[wandb]", "W&B", ("run.tracker_project", "run.log_artifacts")),
    "trackio": TrackerKind("trackio", "lora-trainer[trackio]", "trackio", ("run.tracker_project",)),
}


def missing_libraries(names: Sequence[str]) -> list[Problem]:
    """A problem for each tracker whose library is not installed; nothing is imported."""
    kinds = {name: TRACKERS[name] for name in names}
    return [
        Problem(
            "library_missing",
            f"run.trackers: {name} is not installed.",
            f"pip install '{kind.requirement}', or leave {name} out of run.trackers.",
        )
        for name, kind in kinds.items()
        if find_spec(kind.library) is None
    ]
