"""Train one LoRA: `accelerate launch scripts/train_lora.py --preset 12gb`.

The same arguments as `lora-trainer train`; see `lora-trainer train --help`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from lora_trainer.__main__ import entry
from lora_trainer.core.launch import launched

PR_SET_PDEATHSIG = 1  # prctl(2)


def stop_with_launcher() -> None:
    """Get SIGTERM when `accelerate launch` ends: it does not pass signals on, and an orphan would keep training."""
    if sys.platform == "linux" and launched():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def stay_on_this_machine() -> None:
    """Make processes of one machine use its loopback: gloo would listen on the address of the host's name."""
    if sys.platform == "linux" and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


if __name__ == "__main__":
    stop_with_launcher()
    stay_on_this_machine()
    raise SystemExit(entry(["train", *sys.argv[1:]]))
