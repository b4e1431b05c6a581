"""Train one LoRA: `accelerate launch scripts/train_lora.py --preset 12gb`.

The same arguments as `lora-trainer train`; see `lora-trainer train --help`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from lora_trainer.cli.main import main

PR_SET_PDEATHSIG = 1  # prctl(2)


def stop_with_launcher() -> None:
    """Get SIGTERM when `accelerate launch` ends: it does not pass signals on, and an orphan would train on unseen."""
    if sys.platform == "linux" and any(name.startswith("ACCELERATE_") for name in os.environ):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    stop_with_launcher()
    raise SystemExit(main(["train", *sys.argv[1:]]))
