"""Rules for every test: one thread, no network, no shared cache, GPU tests only on a GPU, no outside signals."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import settings

from lora_trainer.core.interrupt import Interrupt

# Before any test imports torch: tests run in parallel, and two threads each would compete for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Tests start many processes, and each would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Importing libraries and rewriting assertions creates millions of objects and hardly any garbage.
gc.disable()

# A slow machine is no failure, and the same tests run everywhere.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")

CHECKOUT = Path(__file__).resolve().parents[1]


# Windows lets only some users make links.
needs_links = pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")


def matches(name: str, pattern: str) -> bool:
    """Whether a test's name, with its parameters in brackets, matches a pattern. Only `*` is special."""
    return fnmatchcase(name, pattern.replace("[", "[[]"))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `slow.toml` names; skip tests marked `gpu` where there is no CUDA device.

    Torch is imported only if one of those was collected.
    """
    slow = tomllib.loads((CHECKOUT / "tests" / "slow.toml").read_text("utf-8"))
    for item in items:
        patterns = slow.get(item.path.relative_to(CHECKOUT).as_posix(), ())
        if any(matches(item.name, pattern) for pattern in patterns):
            item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Collect garbage from here on."""
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen_libraries() -> None:
    """Freeze objects of earlier imports, so that garbage collection does not walk through them.

    That took a third of a second with torch loaded, and a run collects several times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def new_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that do not exist yet. `mktemp` would list all that it made before, thousands of times."""
    place = tmp_path_factory.mktemp("cache")
    return (place / str(number) for number in count())


@pytest.fixture(autouse=True)
def own_cache_folder(new_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has its own cache folder."""
    folder = next(new_folders)
    folder.mkdir()
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def signals_are_the_tests_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A signal from outside, as `timeout` sends it, ends the session.

    A run in this process would take it for its user's and save, and an innocent test would fail.
    """
    kill, raise_signal, caught = os.kill, signal.raise_signal, Interrupt.caught
    own, others = list[int](), list[str]()

    def killed(process: int, number: int) -> None:
        if process == os.getpid():
            own.append(number)
            if os.name != "posix":  # there os.kill ends the process and runs no handler
                raise_signal(number)
                return
        kill(process, number)

    def raised(number: int) -> None:
        own.append(number)
        raise_signal(number)

    def record_signal(interrupt: Interrupt, number: int, frame: FrameType | None) -> None:
        if number in own:
            own.remove(number)
        else:
            others.append(signal.Signals(number).name)
        caught(interrupt, number, frame)

    monkeypatch.setattr(os, "kill", killed)
    monkeypatch.setattr(signal, "raise_signal", raised)
    monkeypatch.setattr(Interrupt, "caught", record_signal)
    yield
    if others:
        request.session.shouldfail = f"{others[0]} came from outside while {request.node.nodeid} ran"


@pytest.fixture
def checkout() -> Path:
    """The repository's root."""
    return CHECKOUT
