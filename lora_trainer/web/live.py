"""`/api/live`: what changes, as server-sent events. One watcher for all pages, which reads only files that changed.

It runs while somebody listens. What it keeps is one row for each run and a place in the files of those that train.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from lora_trainer.core.errors import Problem
from lora_trainer.core.io import finite
from lora_trainer.jobs.job_state import QueuedJob
from lora_trainer.monitor.trackers import EVENTS, METRICS, VALIDATION
from lora_trainer.web.children import Child
from lora_trainer.web.machine_now import Machine
from lora_trainer.web.queue_document import RunQueue
from lora_trainer.web.run_columns import Tail
from lora_trainer.web.run_rows import RunRows
from lora_trainer.web.safety import JSON, Refusal
from lora_trainer.web.tasks import TaskList

EVERY_SECONDS = 1.0
MACHINE_SECONDS = 5.0
SIGN_OF_LIFE_SECONDS = 15.0
MOST_LISTENERS = 64
MOST_WAITING = 256  # messages for a page that does not read them: it is let go, and comes again
MOST_ROWS = 500  # of a file in one message
FILES = {"metrics": METRICS, "validation": VALIDATION, "events": EVENTS}

router = APIRouter(prefix="/api", default_response_class=JSON)
Waiting = asyncio.Queue["str | None"]


@dataclass
class Followed:
    """A run that trains, and where in its files the next rows begin."""

    tails: Mapping[str, Tail]


class Watcher:
    """Looks once a second for what changed, and tells those who listen."""

    def __init__(self, runs: RunRows, queue: RunQueue, machine: Machine, tasks: TaskList) -> None:
        self.runs, self.queue, self.machine, self.tasks = runs, queue, machine, tasks
        self._task_rows: dict[str, dict[str, Any]] | None = None
        self._rows: dict[str, dict[str, Any]] | None = None
        self._followed: dict[str, Followed] = {}
        self._queue: tuple[list[QueuedJob], list[Child]] | None = None
        self._machine_at = 0.0
        self._is_broken = False
        self.is_leaving: Callable[[], bool] = lambda: False
        self._listeners: set[Waiting] = set()
        self._task: asyncio.Task[None] | None = None

    def looked(self) -> list[dict[str, Any]]:
        """The same. After a look that failed, as in a folder that cannot be read, pages ask for everything again."""
        try:
            found = self.look()
        except Exception:  # noqa: BLE001  pages would wait forever
            if not self._is_broken:
                traceback.print_exc()
            self._is_broken = True
            self._rows = self._queue = self._task_rows = None
            return []
        was_broken, self._is_broken = self._is_broken, False
        return [{"reconnected": True}, *found] if was_broken else found

    def look(self) -> list[dict[str, Any]]:
        """What changed since the last look; nothing at the first one, of which pages ask by themselves."""
        rows = {row["id"]: row for row in self.runs.rows()}
        before, self._rows = self._rows, rows
        found: list[dict[str, Any]] = []
        if before is not None:
            changed = [row for name, row in rows.items() if before.get(name) != row]
            gone = [name for name in before if name not in rows]
            if changed or gone:
                found.append({"runs": changed, "removed": gone})
        found.extend(self._new_rows(rows))
        queue = self.queue.jobs(), self.queue.workers()
        if self._queue not in (None, queue):
            found.append({"queue": self.queue.document()})
        self._queue = queue
        tasks = {row["id"]: row for row in self.tasks.rows()}
        if self._task_rows is not None:
            found.extend({"task": row} for name, row in tasks.items() if self._task_rows.get(name) != row)
        self._task_rows = tasks
        if time.monotonic() - self._machine_at >= MACHINE_SECONDS:
            self._machine_at = time.monotonic()
            found.append({"machine": self.machine.document()})
        return found

    def _new_rows(self, rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The rows that live runs wrote, and at last those of runs that ended since."""
        live = {name for name, row in rows.items() if row["is_live"]}
        found = []
        for name in [*live, *(self._followed.keys() - live)]:
            if name not in self._followed:
                folder = Path(rows[name]["folder"])
                tails = {kind: Tail(folder / file, from_end=True) for kind, file in FILES.items()}
                self._followed[name] = Followed(tails)
                continue
            read = {kind: tail.read() for kind, tail in self._followed[name].tails.items()}
            news: dict[str, Any] = {kind: new[-MOST_ROWS:] for kind, (new, _) in read.items() if new}
            if any(is_new or len(new) > MOST_ROWS for new, is_new in read.values()):
                news["is_incomplete"] = True  # the page asks for all of it again
            if news:
                found.append({"run": name, **news})
            if name not in live:
                del self._followed[name]
        return found

    async def listen(self) -> AsyncIterator[str]:
        """Messages as text of server-sent events, until the listener leaves."""
        waiting: Waiting = asyncio.Queue(MOST_WAITING)
        self._listeners.add(waiting)
        if self._task is None or self._task.done():
            self._rows = self._queue = self._task_rows = None
            self._task = asyncio.create_task(self._watch())
        try:
            yield "retry: 2000\n\n"
            while True:
                try:
                    message = await asyncio.wait_for(waiting.get(), SIGN_OF_LIFE_SECONDS)
                except TimeoutError:
                    message = ": still here\n\n"
                if message is None:
                    return
                yield message
        finally:
            self._listeners.discard(waiting)

    async def _watch(self) -> None:
        while self._listeners:
            for found in await asyncio.to_thread(self.looked):
                message = f"data: {json.dumps(finite(found), allow_nan=False, default=str)}\n\n"
                for waiting in list(self._listeners):
                    if waiting.full():
                        self._let_go(waiting)
                    else:
                        waiting.put_nowait(message)
            if self.is_leaving():  # the server waits for its answers before it ends
                for waiting in list(self._listeners):
                    self._let_go(waiting)
            await asyncio.sleep(EVERY_SECONDS)
        self._followed.clear()

    def _let_go(self, waiting: Waiting) -> None:
        if waiting.full():
            waiting.get_nowait()
        waiting.put_nowait(None)
        self._listeners.discard(waiting)

    @property
    def is_full(self) -> bool:
        return len(self._listeners) >= MOST_LISTENERS


@router.get("/live")
async def live(request: Request) -> Response:
    """Server-sent events: `{"runs": rows that changed, "removed": ids}`, `{"run": id, "metrics": new rows, ...}`,
    `{"queue": ...}`, `{"task": row}`, `{"machine": ...}`."""
    watcher: Watcher = request.app.state.server.watcher
    if watcher.is_full:
        raise Refusal(503, Problem("too_many_listeners", f"{MOST_LISTENERS} pages are open.", "Close some."))
    return StreamingResponse(watcher.listen(), media_type="text/event-stream")
