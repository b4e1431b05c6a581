"""Train one LoRA: `accelerate launch scripts/train_lora.py --preset 12gb`.

The same arguments as `lora-trainer train`; see `lora-trainer train --help`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from lora_trainer.__main__ import entry

PR_SET_PDEATHSIG = 1  # prctl(2)
MOST_THREADS = 8


def launched() -> bool:
    return any(name.startswith("ACCELERATE_") for name in os.environ)


def stop_with_launcher() -> None:
    """Get SIGTERM when `accelerate launch` ends: it does not pass signals on, and an orphan would train on unseen."""
    if sys.platform == "linux" and launched():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def use_the_cores() -> None:
    """Undo the one thread that `accelerate launch` allows each process unless told otherwise; torch reads this once."""
    if launched() and os.environ.get("OMP_NUM_THREADS") == "1":
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        os.environ["OMP_NUM_THREADS"] = str(max(1, min(MOST_THREADS, (os.cpu_count() or 1) // processes)))


def stay_on_this_machine() -> None:
    """Processes of one machine talk over its loopback: gloo would listen on the address that the host's name has."""
    if sys.platform == "linux" and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


if __name__ == "__main__":
    stop_with_launcher()
    stay_on_this_machine()
    use_the_cores()
    raise SystemExit(entry(["train", *sys.argv[1:]]))
