"""The order for one run: its settings, folder, console and flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.launch import is_main_process
from lora_trainer.data.images.remote import is_url
from lora_trainer.models.families import FAMILIES
from lora_trainer.monitor.console import Console as PlainConsole
from lora_trainer.run.inputs import data_sources
from lora_trainer.run_folder.progress import Watch, unwatched
from lora_trainer.training.steering import Steering

if TYPE_CHECKING:  # it loads torch
    from rich.console import Console

    from lora_trainer.config.layers import Resolved
    from lora_trainer.config.schema import Config
    from lora_trainer.models.family import Family
    from lora_trainer.training.run_group import Member

LONGEST_NAME = 200  # bytes; file systems allow 255, and endings and temporary names need their share
WINDOWS = re.compile(r'[<>:"|?*]|[. ]$')


@dataclass(frozen=True)
class Order:
    """Lines are printed to `console`; `watch` is called with the run's progress.

    With `enforce_gates` a dataset or a LoRA that scores below its gate is refused; without,
    only data that cannot be trained on. `verbose` also prints details that are otherwise only recorded.
    """

    resolved: Resolved
    folder: Path
    console: Console
    watch: Watch = unwatched
    families: Mapping[str, Family] = field(default_factory=lambda: FAMILIES)
    resume: bool = False
    enforce_gates: bool = False
    verbose: bool = False
    differences: tuple[str, ...] = ()  # from the run that is resumed or repeated
    steering: Steering = field(default_factory=Steering)
    member: Member | None = None  # of a group of runs that train on one base

    @property
    def config(self) -> Config:
        return self.resolved.config


def make_order(
    resolved: Resolved,
    *,
    resume: bool = False,
    enforce_gates: bool = False,
    verbose: bool = False,
    console: Console | None = None,
    watch: Watch = unwatched,
) -> Order:
    """The order for a run in its own folder; by default it prints on stdout, from the main process only.

    Raises UsageError for a name that no folder can have.
    """
    console = console or plain_console(quiet=not is_main_process())
    return Order(
        resolved,
        run_folder(resolved.config),
        console,
        watch,
        resume=resume,
        enforce_gates=enforce_gates,
        verbose=verbose,
    )


def run_folder(config: Config) -> Path:
    """OUTPUT/NAME; the default name is the data folder's."""
    name = config.run.name or _name_of(data_sources(config)[0].path)
    if name in (".", "..") or "/" in name or "\\" in name or not name.isprintable() or not _holds(name):
        raise UsageError(
            Problem(
                "name_invalid",
                f"--name {name!r} is no name of a folder.",
                "Use a plain name, and set the folder with --output.",
            )
        )
    if (size := len(os.fsencode(name))) > LONGEST_NAME:
        message = f"--name {name[:40]}… has {size} bytes; its files' names leave room for {LONGEST_NAME}."
        raise UsageError(Problem("name_too_long", message, "Use a shorter one."))
    return Path(config.run.output).expanduser() / name


def _holds(name: str) -> bool:
    """Whether a folder can have this name; Windows reserves names of devices, streams and patterns."""
    return name == name.rstrip(" ") and not (
        os.name == "nt" and (WINDOWS.search(name) or PureWindowsPath(name).is_reserved())
    )


def _name_of(source: str) -> str:
    """A run's name from its data: `cats-{000..009}.tar` makes `cats`."""
    stem = Path(urlsplit(source).path).stem if is_url(source) else Path(source).resolve().stem
    return re.sub(r"[-_. ]*\{[^{}]*\}", "", stem) or stem


def plain_console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """A console that prints text as it is: captions and file names may contain rich's markup."""
    return PlainConsole(quiet=quiet, stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
