"""Imports that take no longer than they must.

Others import libraries merely because they are installed: diffusers and peft ask whether bitsandbytes, torchao and
xformers are there, and import them whole if so, a second and 50 MB for what most runs have no use for. A command hides
those from them as Python's import system has it: a name that is None in `sys.modules` is not found.

Python looks for garbage again and again while a million objects are made that all stay: a sixth of the time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

OPTIONAL = ("bitsandbytes", "torchao", "xformers")
LOOK_FOR_OPTIONAL = ("accelerate", "diffusers", "peft", "transformers")
_ours: list[bool] = []
_hidden: set[str] = set()


def own_process() -> None:
    """Say that this process does nothing but one command: what libraries find in it concerns nobody else.

    A process that imported one of these libraries before (a notebook, `runpy`) is not ours alone: the library may know
    already what is installed, and would fail when it imports that.
    """
    _ours[:] = [True] if sys.modules.keys().isdisjoint(LOOK_FOR_OPTIONAL) else []


def hide(names: Collection[str]) -> None:
    """Let libraries that are not imported yet seem not to be installed; in a command's own process only.

    What was hidden before and is not among them is found again: a batch's next run may have a use for it.
    """
    if not _ours:
        return
    for name in _hidden.difference(names):
        if sys.modules.get(name, name) is None:
            del sys.modules[name]
    _hidden.clear()
    _hidden.update(name for name in names if sys.modules.get(name) is None)
    sys.modules.update(dict.fromkeys(_hidden))  # type: ignore[arg-type]  # None is what the import system asks for


@contextmanager
def shown(name: str) -> Iterator[None]:
    """Inside the block a hidden library is found; it is hidden again where nobody imported it meanwhile."""
    hidden = name in _hidden and sys.modules.get(name, name) is None
    if hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        if hidden and name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]  # as above


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
