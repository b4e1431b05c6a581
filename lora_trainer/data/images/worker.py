"""The loop of a worker process: jobs from standard input, a line each; results to standard output."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import warnings

from lora_trainer.data.images.jobs import JOBS

IDLE_SECONDS = 20.0  # then it ends by itself


def main() -> None:
    """Run jobs until standard input ends, or none came for a while."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles interruptions
    warnings.simplefilter("ignore")
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a decoder prints is no result
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
            found = [JOBS[job](each) for each in what]  # none of "hello"
            replies.write(json.dumps(found).encode("ascii") + b"\n")
            replies.flush()
            last = time.monotonic()
    os._exit(0)
