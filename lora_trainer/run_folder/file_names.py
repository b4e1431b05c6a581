"""The names of the files that a run's folder has."""

from __future__ import annotations

PROGRESS = "progress.json"
LOCK = ".lock"
SOFT_LOCK = ".lock.held"  # where the file system has no locks: names its owner
LOCKS = (LOCK, SOFT_LOCK)
