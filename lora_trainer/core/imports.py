"""Imports that take no longer than they must.

Others import libraries merely because they are installed: diffusers and peft ask whether bitsandbytes, torchao and
xformers are there, and import them whole if so, a second and 50 MB for what most runs have no use for. A command hides
those from them as Python's import system has it: a name that is None in `sys.modules` is not found.

Python looks for garbage again and again while a million objects are made that all stay: a sixth of the time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

OPTIONAL = ("bitsandbytes", "torchao", "xformers")
_ours: list[bool] = []


def own_process() -> None:
    """Say that this process does nothing but one command: what libraries find in it concerns nobody else."""
    _ours.append(True)


def hide(names: Iterable[str]) -> None:
    """Let libraries that are not imported yet seem not to be installed; in a command's own process only."""
    if _ours:
        sys.modules.update((name, None) for name in names if name not in sys.modules)  # type: ignore[misc]


@contextmanager
def importing() -> Iterator[None]:
    """While open nobody looks for garbage; what was made until then is never looked through again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _ours:
            gc.freeze()
        if was:
            gc.enable()
