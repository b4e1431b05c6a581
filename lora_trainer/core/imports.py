"""Faster imports: hide optional libraries that a run does not use, and pause garbage collection.

diffusers and peft import bitsandbytes, torchao and xformers if they are installed, which takes a second and 50 MB.
A command hides them: a name that is None in `sys.modules` is not found.

Garbage collection takes a sixth of the time while imports create a million objects that all stay.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

OPTIONAL = ("bitsandbytes", "torchao", "xformers")
PROBE_FOR_OPTIONAL = ("accelerate", "diffusers", "peft", "transformers")
_ours: list[bool] = []
_hidden: set[str] = set()
_broken: dict[str, str] = {}  # libraries whose import failed, and why
MOST_REASON = 150  # characters
PARTS = {"bitsandbytes": "optim"}  # that a whole library has


def own_process() -> None:
    """Declare that this process runs only one command, so that libraries may be hidden in it.

    Not if one of the probing libraries is imported already (a notebook, `runpy`): it may know what is installed, and
    would fail when it imports that.
    """
    _ours[:] = [True] if sys.modules.keys().isdisjoint(PROBE_FOR_OPTIONAL) else []


def hide(names: Collection[str]) -> None:
    """Make libraries that are not imported yet seem not installed; in a command's own process only.

    Libraries hidden before that are not in `names` are found again: a batch's next run may need them.
    """
    if not _ours:
        return
    for name in _hidden.difference(names):
        if sys.modules.get(name, name) is None:
            del sys.modules[name]
    _hidden.clear()
    _hidden.update(name for name in names if sys.modules.get(name) is None and name not in _broken)
    sys.modules.update(dict.fromkeys(_hidden))  # type: ignore[arg-type]  # the import system wants None


@contextmanager
def shown(name: str) -> Iterator[None]:
    """Inside the block a hidden library is found; afterwards it is hidden again unless it was imported."""
    hidden = name in _hidden and sys.modules.get(name, name) is None
    if hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        if hidden and name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]  # as above


def is_installed(name: str) -> bool:
    """Whether a library can be found, hidden or not; nothing is imported."""
    if sys.modules.get(name) is not None:
        return True
    with shown(name):
        return find_spec(name) is not None


def why_unusable(name: str) -> str | None:
    """`is not installed`, or why the import of an installed library fails; None where it is imported.

    diffusers and peft import what they find, and would fail with it: a broken library is not found from then on.
    """
    if name in _broken:
        return _broken[name]
    if not is_installed(name):
        return "is not installed"
    try:
        with shown(name), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of no concern to who asks
            module = import_module(name)
            lacks_part = name in PARTS and not hasattr(module, PARTS[name])
            if module.__file__ is None or lacks_part:  # what uninstalling left
                raise ImportError("its files are not complete")
    except (Exception, SystemExit) as error:  # noqa: BLE001  built for another version or system, it may raise anything
        text = " ".join(str(error).split()) or type(error).__name__
        _broken[name] = f"does not load ({text[:MOST_REASON]})"
        sys.modules[name] = None  # type: ignore[assignment]  # as above
        return _broken[name]
    return None


@contextmanager
def importing() -> Iterator[None]:
    """Pause garbage collection inside the block; it never scans the objects that exist at its end."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _ours:
            gc.freeze()
        if was:
            gc.enable()
