"""`lora-trainer cache status` and `cache clean`: what the caches hold, and pruning them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.io import user_cache_folder


def status_command(folder: Path | None, as_json: bool = False) -> int:
    """Say how many entries and bytes a cache folder holds; the user's own when none is named."""
    from lora_trainer.data.caches.upkeep import cache_status

    status = cache_status(named(folder))
    if as_json:
        sys.stdout.write(json.dumps(status.to_json(), indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n".join(status.lines) + "\n")
    return DONE


def named(folder: Path | None) -> Path:
    """The folder, or the user's own, which may not be there yet. Raises UsageError for one that is not there."""
    if folder is not None and not folder.is_dir():
        raise UsageError(Problem(f"There is no folder {folder}.", "Leave it out for the user's own cache."))
    return folder or user_cache_folder()


def clean_command(folder: Path | None, limit_gb: float | None = None, *, verify: bool = False) -> int:
    """Put a cache in order, and remove the least recently used above the limit, 50 GB when none is named."""
    from lora_trainer.data.caches.upkeep import DEFAULT_LIMIT, cache_clean

    if limit_gb is not None and limit_gb < 0:
        raise UsageError(Problem(f"--limit-gb {limit_gb:g} is negative.", "0 removes everything, 50 is the default."))
    limit = DEFAULT_LIMIT if limit_gb is None else int(limit_gb * 10**9)
    sys.stdout.write("\n".join(cache_clean(named(folder), limit, verify=verify).lines) + "\n")
    return DONE
