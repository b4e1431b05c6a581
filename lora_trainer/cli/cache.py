"""`lora-trainer cache status` and `cache prune`: describe the caches, and remove what is not used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lora_trainer.core.compilations import KEPT_DAYS, compilations_kept, prune_compilations
from lora_trainer.core.disk import size_words
from lora_trainer.core.errors import DONE, Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.io import user_cache_folder
from lora_trainer.models.places import laid_out_kept, prune_laid_out


def status_command(folder: Path | None, as_json: bool = False) -> int:
    """Print the entries and bytes of a cache folder, by default the user's."""
    from lora_trainer.data.caches.pruning import cache_status

    status = cache_status(named(folder))
    document, lines = status.to_json(), status.lines
    if folder is None:
        place, size = compilations_kept()
        document["compiled"] = {"folder": str(place), "bytes": size}
        if size:
            lines.append(f"{place}: {size_words(size)} of compiled blocks")
        models, count, in_bytes = laid_out_kept()
        document["laid_out"] = {"folder": str(models), "models": count, "bytes": in_bytes}
        if count:
            lines.append(f"{models}: {counted(count, 'laid-out model')}, {size_words(in_bytes)}")
    sys.stdout.write((json.dumps(document, indent=2, ensure_ascii=False) if as_json else "\n".join(lines)) + "\n")
    return DONE


def named(folder: Path | None) -> Path:
    """The folder, else the user's, which need not exist yet. Raises UsageError if `folder` does not exist."""
    if folder is not None and not folder.is_dir():
        raise UsageError(
            Problem("folder_missing", f"There is no folder {folder}.", "Without it, your own cache is used.")
        )
    return folder or user_cache_folder()


def prune_command(folder: Path | None, limit_gb: float | None = None, *, verify: bool = False) -> int:
    """Tidy a cache, and remove the least recently used entries above the limit (default: 50 GB)."""
    from lora_trainer.data.caches.pruning import DEFAULT_LIMIT, cache_clean

    if limit_gb is not None and limit_gb < 0:
        raise UsageError(
            Problem(
                "limit_out_of_range",
                f"--limit-gb {limit_gb:g} is negative.",
                "0 removes everything, 50 is the default.",
            )
        )
    limit = DEFAULT_LIMIT if limit_gb is None else int(limit_gb * 10**9)
    lines = cache_clean(named(folder), limit, verify=verify).lines
    if folder is None and (pruned := prune_compilations())[0]:
        lines.append(f"compiled blocks unused for {KEPT_DAYS} days: {size_words(pruned[1])} removed")
    if folder is None and (gone := prune_laid_out())[0]:
        lines.append(
            f"{counted(gone[0], 'laid-out model')} whose files are gone or changed, or unused for long: {size_words(gone[1])} removed"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    return DONE
