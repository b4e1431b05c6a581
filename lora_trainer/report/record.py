"""`run.json`: a run's settings, course and results. Files are named relative to the run's folder."""

from __future__ import annotations

import glob
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lora_trainer.core.disk import current, write_with_retry
from lora_trainer.core.io import read_json, write_json

FILE = "run.json"
BEFORE_AFTER = "before_after"  # the key of the file of sample images with and without the LoRA, and its name
SHOWN_EVENTS = 200
TABLES = ("config", "files", "pinned", "seconds")  # parts that a run which continues reads
PHASES = ("cache", "train", "validate", "total")
Status = Literal["running", "done", "refused", "unresolved", "failed", "stopped"]


@dataclass(frozen=True)
class Record:
    """The document. `seconds` has `PHASES`, over all sessions; `samples` names the recipes of sample images."""

    name: str
    status: Status = "running"
    exit_code: int | None = None
    started: float = 0.0  # seconds since 1970, of the first session
    reason: str | None = None
    sessions: int = 1  # 2 after one --resume
    gates_enforced: bool = False
    steps: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    pinned: dict[str, list[Any]] = field(default_factory=dict)  # settings: as set, and as in `config.toml`
    scores: dict[str, float | None] = field(default_factory=lambda: {"dataset": None, "lora": None})
    outcome: str | None = None  # of the LoRA's verdict: passed, refused or unresolved; None where it was not measured
    files: dict[str, str | None] = field(default_factory=lambda: {"kohya": None, "diffusers": None, "report": None})
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    changed: tuple[str, ...] = ()  # differences from the session before, or from the run that it repeats
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    data_hash: str = ""
    model: dict[str, str] = field(default_factory=dict)
    arithmetic: dict[str, float] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    dataset: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    released: dict[str, Any] = field(default_factory=dict)  # step, val_loss, reason
    training: dict[str, Any] = field(default_factory=dict)
    sample_counts: dict[str, Any] = field(default_factory=dict)  # a summary of `sample_counts.csv`
    memory: dict[str, float] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)  # of system.jsonl, and by the last session's watches
    setup: dict[str, Any] = field(default_factory=dict)  # settings that explain an idle GPU (monitor/idle.py)
    samples: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()  # LoRA files of `checkpoint.export_every_n_steps`
    checkpoints: dict[str, Any] = field(default_factory=dict)  # of the last session: number, sizes and times
    events: tuple[dict[str, Any], ...] = ()  # of events.jsonl, the newest `SHOWN_EVENTS`

    def with_seconds(self, **seconds: float) -> Record:
        """The same with durations added to what earlier sessions of the run took."""
        added = {name: round(self.seconds.get(name, 0.0) + value, 3) for name, value in seconds.items()}
        return replace(self, seconds={**self.seconds, **added})


def write_record(folder: Path, record: Record) -> None:
    """Write it, waiting where the disk refuses. If the folder is deleted later, it is written again."""
    run = current()

    def again() -> None:
        write_json(folder / FILE, asdict(replace(record, steps=max(record.steps, run.step))))

    run.keep(FILE, again)
    write_with_retry(FILE, folder, lambda: write_json(folder / FILE, asdict(record)))


def latest(folder: Path, record: Record) -> Record:
    """The record as the session last wrote it; `record` where that cannot be read."""
    try:
        return Record(**(read_record(folder) or {}))
    except TypeError:
        return record


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a run folder, or None where there is no run.

    A folder with checkpoints but no readable record counts as a failed run.
    """
    path = folder / FILE
    if not path.is_file() and not any(folder.glob("checkpoints/step-*")):
        return None
    try:
        document: Any = read_json(path)
    except (ValueError, OSError):
        return {"status": "failed", "steps": 0}
    if not isinstance(document, dict):
        return {"status": "failed", "steps": 0}
    # A part of another type is as good as missing.
    return {name: part for name, part in document.items() if name not in TABLES or isinstance(part, dict)}


def step_files(folder: Path) -> list[Path]:
    """The LoRA files of single steps that a run exported, oldest first. Names have six digits, and more from a million on."""
    written = folder.glob(f"weights/{glob.escape(folder.name)}-step-*.safetensors")
    return sorted(written, key=lambda path: (len(path.name), path.name))
