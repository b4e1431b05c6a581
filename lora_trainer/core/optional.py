"""Libraries that others import merely because they are installed, kept out of a command that has no use for them.

diffusers and peft ask whether these are there, and import them whole if so: a second and a half and 60 MB for
quantised weights that a run does not have. They are hidden as Python's import system has it: a name that is None in
`sys.modules` cannot be imported and is not found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

OPTIONAL = ("bitsandbytes", "torchao", "xformers")
_ours: list[bool] = []


def own_process() -> None:
    """Say that this process does nothing but one command: what libraries find in it concerns nobody else."""
    _ours.append(True)


def hide(names: Iterable[str]) -> None:
    """Let libraries that are not imported yet seem not to be installed; in a command's own process only."""
    if _ours:
        sys.modules.update((name, None) for name in names if name not in sys.modules)  # type: ignore[misc]
