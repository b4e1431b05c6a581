"""`/api/machine`: GPUs, CPU, memory and disk now; `/api/browse`: folders and models that a run can be made of."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from fastapi import APIRouter, Request, Response

from lora_trainer.core.errors import Problem
from lora_trainer.core.hardware import available_cpus, package_versions
from lora_trainer.data.sources.names import is_image
from lora_trainer.monitor.gpu import nvidia_gpus
from lora_trainer.monitor.system import system_memory
from lora_trainer.web.safety import JSON, Refusal, allowed

MOST_ENTRIES = 2000
CPU_SECONDS, FIRST_SECONDS = 1.0, 0.1  # over which its load is measured
MODELS = (".safetensors", ".gguf")
DATA = (".tar", ".parquet", ".jsonl", ".csv", ".tsv", ".toml")

router = APIRouter(prefix="/api", default_response_class=JSON)


class Machine:
    """What this machine has, and how busy it is. Any thread may call its methods."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._lock = threading.Lock()
        self._gpus: tuple[Any, ...] | None = None
        self._versions: dict[str, str] | None = None
        self._cpu = (time.monotonic(), psutil.cpu_percent(FIRST_SECONDS) / 100.0)

    def document(self) -> dict[str, Any]:
        with self._lock:
            if self._gpus is None:
                self._gpus = nvidia_gpus()
            gpus = [gpu() for gpu in self._gpus]
            if time.monotonic() - self._cpu[0] >= CPU_SECONDS:  # else it is of a moment, and of who asked last
                self._cpu = (time.monotonic(), psutil.cpu_percent() / 100.0)
        total, free = system_memory()
        disk = shutil.disk_usage(next(each for each in (self.output, *self.output.parents) if each.exists()))
        return {
            "gpus": gpus,
            "cpu": {"count": available_cpus(), "used": self._cpu[1]},
            "memory": {"total": total, "free": free},
            "disk": {"folder": str(self.output), "total": disk.total, "free": disk.free},
        }

    def versions(self) -> dict[str, str]:
        with self._lock:
            if self._versions is None:
                self._versions = package_versions()
            return self._versions


@router.get("/machine")
def show_machine(request: Request) -> Response:
    """How busy this machine is now; the versions of packages."""
    machine: Machine = request.app.state.server.machine
    return JSON({**machine.document(), "versions": machine.versions()})


@router.get("/browse")
def browse(request: Request, path: str | None = None) -> Response:
    """Folders, model files and data files in a folder, never outside of the allowed ones; without a path those."""
    roots: tuple[Path, ...] = request.app.state.server.roots
    if path is None:
        entries = [
            {"name": str(root), "path": str(root), "kind": "folder"} for root in dict.fromkeys(roots) if root.is_dir()
        ]
        return JSON({"path": None, "parent": None, "entries": entries, "left_out": 0})
    folder = allowed(path, roots)
    try:
        with os.scandir(folder) as listed:
            found = sorted(listed, key=lambda entry: entry.name.casefold())
    except OSError as error:
        message = f"{folder} cannot be listed: {error.strerror}."
        raise Refusal(404, Problem("folder_unreadable", message, "Choose another folder.")) from None
    rows, images = [], 0
    for entry in found:
        images += is_image(entry.name)
        if (kind := kind_of(entry)) is not None and is_allowed(entry.path, roots):
            rows.append({"name": entry.name, "path": str(folder / entry.name), "kind": kind})
    parent = str(folder.parent) if is_allowed(folder.parent, roots) else None
    rows.sort(key=lambda row: row["kind"] not in ("folder", "model folder"))
    left_out = max(0, len(rows) - MOST_ENTRIES)
    return JSON(
        {"path": str(folder), "parent": parent, "images": images, "entries": rows[:MOST_ENTRIES], "left_out": left_out}
    )


def kind_of(entry: os.DirEntry[str]) -> str | None:
    """What a picker shows of an entry; None for the rest, and for what is hidden."""
    if entry.name.startswith(".") or not entry.name.isprintable():
        return None
    try:
        if entry.is_dir():
            return "model folder" if os.path.isfile(os.path.join(entry.path, "model_index.json")) else "folder"
    except OSError:
        return None
    ending = os.path.splitext(entry.name)[1].lower()
    return "model" if ending in MODELS else "data" if ending in DATA else None


def is_allowed(path: Path | str, roots: tuple[Path, ...]) -> bool:
    try:
        allowed(path, roots)
    except Refusal:
        return False
    return True
