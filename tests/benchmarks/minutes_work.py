"""What the processes of `scripts/gpu_minutes.py` do in its tests. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEVICE = "a GPU of the tests"


def describe(*, rehearse: bool) -> dict[str, Any]:
    return {"device": DEVICE, "versions": {"torch": "0"}, "reason": None, "process": os.getpid()}


def describe_no_gpu(*, rehearse: bool) -> dict[str, Any]:
    return describe(rehearse=rehearse) | {"reason": "torch 0 is built without CUDA"}


def process_of(*, rehearse: bool) -> list[dict[str, Any]]:
    return [{"name": "process", "is_right": True, "process": os.getpid()}]


def fail(*, rehearse: bool) -> list[dict[str, Any]]:
    raise ValueError("a planted fault")


def end(*, rehearse: bool) -> list[dict[str, Any]]:
    os._exit(9)


def hang(path: str, *, rehearse: bool) -> list[dict[str, Any]]:
    """Never answer, with a child in a process group of its own that never ends either; its number is in the file."""
    code = "import time; time.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    Path(path).write_text(str(child.pid), encoding="ascii")
    time.sleep(3600)
    return []
