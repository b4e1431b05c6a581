"""Which process of a distributed run this is, without loading torch."""

from __future__ import annotations

import os


def is_main_process() -> bool:
    """Whether this process prints and writes files for all of them."""
    return int(os.environ.get("RANK", "0") or 0) == 0


def launched() -> bool:
    """Whether `accelerate launch`, or torch's own launcher, started this process."""
    return any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in os.environ)


def processes_here() -> int:
    """Number of processes of this run on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and int(local) else 1
