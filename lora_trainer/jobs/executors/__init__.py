"""Where the jobs of a batch run: one module for each executor, loaded when it is chosen.

An engine gives each job to one process on one of its machines, `lora-trainer batch work OUTPUT --job NAME`, and reads from
the store how it ended. A process that starts twice, or that the engine lost, does no harm: a job has one holder.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from lora_trainer.core.errors import Problem, UsageError, nearest

if TYPE_CHECKING:
    from lora_trainer.jobs.job_store import JobStore


@dataclass(frozen=True)
class ExecutorOptions:
    """`jobs`: how many at once. `values`: those of `--executor-option KEY=VALUE`."""

    jobs: int = 1
    values: Mapping[str, str] = field(default_factory=dict)


class Executor(Protocol):
    """What the module of an executor has.

    With `IS_SHARED` the jobs are files, for several machines. With `CONTINUES` they continue when `submit` is stopped.
    """

    IS_SHARED: bool
    CONTINUES: bool

    def check(self, options: ExecutorOptions) -> None:
        """Raise UsageError, before anything is written, with all that is wrong: a package that is missing, a cluster that
        cannot be reached, unknown options, more GPUs than there are."""

    def submit(self, store: JobStore, options: ExecutorOptions) -> int | None:
        """Run the jobs that wait until none does; the exit code of a signal that stopped this."""

    def cancel(self, store: JobStore, names: Collection[str]) -> None:
        """Take jobs that are not to begin any more out of the engine's own queue."""


EXECUTORS = {name: f"lora_trainer.jobs.executors.{name}" for name in ("local", "ray", "slurm")}


def executor(name: str) -> Executor:
    """The executor of that name. Raises UsageError where there is none."""
    if name not in EXECUTORS:
        raise UsageError(
            Problem("unknown_executor", f"There is no executor {name}.", f"{nearest(name, EXECUTORS)}".strip())
        )
    return cast("Executor", importlib.import_module(EXECUTORS[name]))
