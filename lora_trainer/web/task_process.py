"""The process of a task: runs a command of lora-trainer, keeps its document, and writes down how it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lora_trainer.core.io import write_json

DOCUMENT, END = "document.json", "end.json"


def run(folder: Path, module: str, arguments: Sequence[str]) -> None:
    """Run the command, `lora_trainer` or another module; its standard output is the document, and its standard error that of
    this process, a log.
    """
    with open(folder / DOCUMENT, "wb") as document:
        started: list[subprocess.Popen[bytes]] = []
        is_stopped = threading.Event()

        def stop(number: int, frame: FrameType | None) -> None:
            is_stopped.set()
            for each in started:
                each.terminate()

        signal.signal(signal.SIGTERM, stop)  # first: a command that has just begun must not stay behind
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=document
        )
        started.append(process)
        if is_stopped.is_set():
            process.terminate()
        code = process.wait()
    # A signal that ended it counts as in a shell.
    write_json(folder / END, {"exit_code": code if code >= 0 else 128 - code, "ended": time.time()})


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
