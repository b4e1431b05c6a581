"""`run.json`: a run's settings, course and results. Files are named relative to the run's folder."""

from __future__ import annotations

import glob
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lora_trainer.config.schema import Config
from lora_trainer.core.disk import current, write_with_retry
from lora_trainer.core.io import read_json, write_json

RECORD = "run.json"
BEFORE_AFTER = "before_after"  # the key of the file of sample images with and without the LoRA, and its name
SHOWN_EVENTS = 200
PHASES = ("cache", "train", "validate", "total")
Status = Literal["running", "done", "refused", "unresolved", "failed", "stopped"]
UNFINISHED = ("running", "stopped", "failed")


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
    copied_to: str | None = None  # the copy of the LoRA in another program's folder
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

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """The record of a run's folder; None where there is no run.

        Whatever is missing or of another type has its default, so a record that is torn reads as one of a run that failed; and
        so does that of a folder with checkpoints and no `run.json`.
        """
        path = folder / RECORD
        if not path.is_file() and not any(folder.glob("checkpoints/step-*")):
            return None
        record = cls(folder.resolve().name, status="failed")
        try:
            document = read_json(path)
        except (ValueError, OSError):
            return record
        if not isinstance(document, dict):
            return record
        kinds = _kinds_of_parts()
        parts = {
            name: _usable(kinds[name], value, getattr(record, name))
            for name, value in document.items()
            if name in kinds
        }
        return replace(record, **parts)

    def write(self, folder: Path) -> None:
        """Write it, waiting where the disk refuses. If the folder is deleted later, it is written again."""
        run = current()

        def again() -> None:
            write_json(folder / RECORD, asdict(replace(self, steps=max(self.steps, run.step))))

        run.keep(RECORD, again)
        write_with_retry(RECORD, folder, lambda: write_json(folder / RECORD, asdict(self)))

    @property
    def is_finished(self) -> bool:
        """Whether all of its steps are trained and its LoRA is exported."""
        return self.status not in UNFINISHED

    @property
    def keeps_state(self) -> bool:
        """Whether the run can be resumed from its checkpoints: from all but those of `checkpoint.save_state=false`."""
        return self.setting("checkpoint.save_state") is not False

    @property
    def planned_steps(self) -> int | None:
        """The steps that the run will train; None before they are known."""
        total = self.arithmetic.get("total")
        return None if total is None else int(total)

    def section(self, name: str) -> dict[str, Any]:
        """A section of the run's settings; empty where the record has none."""
        values = self.config.get(name)
        return values if isinstance(values, dict) else {}

    def setting(self, name: str) -> Any:
        """The value of a setting, by `section.key`; None where the record has none."""
        section, _, key = name.partition(".")
        return self.section(section).get(key)

    def read_config(self) -> Config | None:
        """The run's settings; None where the record has none, or none that this version understands."""
        try:
            return Config.model_validate(self.config) if self.config else None
        except ValidationError:
            return None

    def with_seconds(self, **seconds: float) -> Record:
        """The same with durations added to what earlier sessions of the run took."""
        added = {name: round(self.seconds.get(name, 0.0) + value, 3) for name, value in seconds.items()}
        return replace(self, seconds={**self.seconds, **added})


def latest(folder: Path, record: Record) -> Record:
    """The record as the session last wrote it; `record` where that cannot be read."""
    written = Record.read(folder)
    return record if written is None or not written.config else written


def _usable(kind: Any, value: Any, default: Any) -> Any:
    """A part of the document where it is of its `kind`, else its default; of tables and lists each entry by itself."""
    if get_origin(kind) is dict:
        entries = value if isinstance(value, dict) else {}
        return default | {name: entry for name, entry in entries.items() if _is_of(get_args(kind)[1], entry)}
    if get_origin(kind) is tuple:
        listed = value if isinstance(value, list) else []
        return tuple(entry for entry in listed if _is_of(get_args(kind)[0], entry))
    return value if _is_of(kind, value) else default


def _is_of(kind: Any, value: Any) -> bool:
    try:
        _type_adapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def _kinds_of_parts() -> dict[str, Any]:
    return get_type_hints(Record)


@cache
def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def step_files(folder: Path) -> list[Path]:
    """The LoRA files of single steps that a run exported, oldest first. Names have six digits, and more from a million on."""
    written = folder.glob(f"weights/{glob.escape(folder.name)}-step-*.safetensors")
    return sorted(written, key=lambda path: (len(path.name), path.name))
