"""Which process of a distributed run this is, without loading torch."""

from __future__ import annotations

import os


def is_main_process() -> bool:
    """Whether this process prints and writes files for all of them."""
    return int(os.environ.get("RANK", "0") or 0) == 0


def launched() -> bool:
    """Whether something started this process as one of several, or by `accelerate launch` or torch's own launcher.

    SLURM and `deploy/launch.sh` set the number of processes only.
    """
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    return several or any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in os.environ)


def processes_here() -> int:
    """Number of processes of this run on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and int(local) else 1
