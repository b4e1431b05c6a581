"""Memory of the system or its container. No torch."""

from __future__ import annotations

from pathlib import Path

import psutil


def system_memory() -> tuple[int, int]:
    """Total and free bytes of the system, or of its container if that has fewer."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text("ascii"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        # Inactive pages of files are freed when memory is needed.
        used = int((group / "memory.current").read_text("ascii")) - int(kept["inactive_file"])
    except (OSError, ValueError, KeyError):  # no container, or one without a limit
        return total, available
    return min(total, limit), max(0, min(available, limit - used))
