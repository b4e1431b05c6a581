"""What the routes of the server share."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.web.children import Children
from lora_trainer.web.dataset_index import DatasetIndexes
from lora_trainer.web.live import Watcher
from lora_trainer.web.lora_list import LoraList
from lora_trainer.web.machine_now import Machine
from lora_trainer.web.planner import Planner
from lora_trainer.web.queue_document import RunQueue
from lora_trainer.web.run_columns import MetricsOfRuns
from lora_trainer.web.run_list import OWN, RunList
from lora_trainer.web.run_rows import RunRows
from lora_trainer.web.safety import Token
from lora_trainer.web.tasks import TaskList

RECEIVED_AT_ONCE = 8


@dataclass(frozen=True)
class ServerOptions:
    """`output` is the folder of runs, `datasets` that of the datasets that may be edited (beside it, if not set); `roots`
    are the folders that may be read, too; `token` is of another address."""

    output: Path
    roots: tuple[Path, ...] = ()
    token: Token | None = None
    datasets: Path | None = None


@dataclass(frozen=True)
class ServerState:
    """Folders, and what is kept between requests."""

    options: ServerOptions
    changing: threading.Lock = field(default_factory=threading.Lock)  # held while runs or jobs are added
    metrics: MetricsOfRuns = field(default_factory=MetricsOfRuns)
    planner: Planner = field(default_factory=Planner)
    receiving: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(RECEIVED_AT_ONCE)
    )  # files that are sent

    @property
    def output(self) -> Path:
        return self.options.output

    @property
    def datasets(self) -> Path:
        """The folder of the datasets that may be edited. It is made when something is written."""
        return self.options.datasets or self.output.with_name("datasets")

    @property
    def own(self) -> Path:
        """The server's own folder."""
        return self.output / OWN

    def request_file(self, run: str) -> Path:
        """Where the request of a run that was started here is kept, beside its config."""
        return self.own / "configs" / f"{run}.json"

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders that may be read: those of the options, of the runs and of the datasets, and what is built in."""
        return (*self.options.roots, self.output, self.datasets, BASE_FOLDER.parent)

    @cached_property
    def runs(self) -> RunList:
        return RunList(self.output)

    @cached_property
    def loras(self) -> LoraList:
        return LoraList(self.output, self.own, self.roots, self.runs.rows)

    @cached_property
    def children(self) -> Children:
        return Children(self.own / "started")

    @cached_property
    def queue(self) -> RunQueue:
        return RunQueue(self.output, self.children)

    @cached_property
    def run_rows(self) -> RunRows:
        return RunRows(self.output, self.runs, self.children)

    @cached_property
    def tasks(self) -> TaskList:
        return TaskList(self.own / "tasks")

    @cached_property
    def indexes(self) -> DatasetIndexes:
        return DatasetIndexes(self.own / "datasets")

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.output)

    @cached_property
    def watcher(self) -> Watcher:
        return Watcher(self.run_rows, self.queue, self.machine, self.tasks)


def state_of(request: Request) -> ServerState:
    found: ServerState = request.app.state.server
    return found


State = Annotated[ServerState, Depends(state_of)]
