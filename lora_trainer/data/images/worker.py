"""The loop of a worker process: each request is a job and what it is done with, and its answer the results."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
import warnings

from lora_trainer.core.json_process import open_streams, send
from lora_trainer.data.images.jobs import JOBS

IDLE_SECONDS = 20.0  # then it ends by itself


def main() -> None:
    """Run jobs until the requests end, or none came for a while."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles interruptions
    warnings.simplefilter("ignore")
    requests, answers = open_streams()
    busy = threading.Lock()
    last = time.monotonic()

    def leave_when_idle() -> None:
        while True:
            time.sleep(IDLE_SECONDS / 4)
            if busy.acquire(blocking=False):
                if time.monotonic() - last > IDLE_SECONDS:
                    os._exit(0)
                busy.release()

    gc.freeze()
    threading.Thread(target=leave_when_idle, daemon=True).start()
    while line := requests.readline():
        with busy:
            job, what = json.loads(line)
            send(answers, [JOBS[job](each) for each in what])  # none of "hello"
            last = time.monotonic()
    os._exit(0)
