"""Which process of a distributed run this is, without loading torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

CPU_VARIABLE = "ACCELERATE_USE_CPU"  # `accelerate launch` sets it by `use_cpu` of its config, and by --cpu


def is_main_process() -> bool:
    """Whether this process prints and writes files for all of them."""
    return int(os.environ.get("RANK", "0") or 0) == 0


def launched() -> bool:
    """Whether something started this process as one of several, or by `accelerate launch` or torch's own launcher.

    SLURM and `deploy/launch.sh` set the number of processes only. Users set `CPU_VARIABLE` themselves.
    """
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    names = os.environ.keys() - {CPU_VARIABLE}
    return several or any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in names)


def processes_here(unless_set: int = 1) -> int:
    """Number of processes of this run on this machine; `unless_set` where the launcher does not say."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and int(local) else unless_set


def cpu_requested(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment says to compute on the CPU, whatever GPU there is."""
    return environment.get(CPU_VARIABLE, "").strip().lower() in ("1", "true", "t", "yes", "y", "on")
