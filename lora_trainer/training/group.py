"""Heartbeats between the processes of a run: that they are alive, where they wait, that a signal came.

A thread of each process writes its heartbeat into a store in the main process, and reads those of the others, several
times a second. So a process that works is waited for, however long it draws or saves. A dead one is not: its heartbeat
stops, or the store is gone with the main process.
"""

from __future__ import annotations

import _thread
import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.interrupt import signal_that_came

EVERY_SECONDS = 0.1
LEFT_SECONDS = 5.0  # after which the last heartbeat of a process that left has surely arrived
FIX = "See the last lines of the other process."


class ProcessLost(TrainingFailed):
    """Another process of this run is dead, or has sent no heartbeat for too long. Every process left reports it."""

    every_process_reports = True

    def __init__(self, what: str) -> None:
        super().__init__(Problem("process_lost", f"{what}.", FIX))
        if not _leaving:  # library threads that wait for the lost process must not keep this one alive
            _leaving.append(True)
            atexit.register(_leave_for_good)


_leaving: list[bool] = []


def _leave_for_good() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ProcessLost.exit_code)


@dataclass(frozen=True)
class Heartbeat:
    """What a process reports. `beat` changes while it lives; `waits` counts the barriers that it has reached."""

    beat: int = 0
    waits: int = 0
    signal: int | None = None
    left: bool = False


class Group:
    """This process among `world`. Waiting raises ProcessLost `timeout` seconds after another's last heartbeat."""

    def __init__(self, rank: int, world: int, device: torch.device, timeout: float) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self._mine = self._written = Heartbeat()
        self._heard = {other: (time.monotonic(), Heartbeat()) for other in range(world) if other != rank}
        self._gone: str | None = None  # why the store in the main process is unreachable,
        self._gone_at = 0.0  # and since when
        self._passed_on = False  # the signal of another process
        self._over, self._news = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._store = _shared_store(rank, device, timeout)
        self._thread = threading.Thread(target=self._exchange, name="group", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    def meet(self) -> None:
        """Return when all processes are here."""
        with self._lock:
            self._mine = replace(self._mine, waits=self._mine.waits + 1)
        self._news.set()
        waits = self._mine.waits
        # A process that left before its own arrival is written could die unseen, and the others would wait for it.
        self.wait_until(
            lambda: self._written.waits >= waits and all(each.waits >= waits for _, each in self._heard.values())
        )

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, awake for signals. Raises ProcessLost where another process is lost."""
        pause = 0.0
        while not ready():
            self.raise_if_lost()
            time.sleep(pause)
            pause = min(pause + 0.0001, 0.005)

    def raise_if_lost(self) -> None:
        """Raise ProcessLost where another process is dead, silent for too long, or has left early."""
        now = time.monotonic()
        for other, (heard, heartbeat) in self._heard.items():
            if heartbeat.left and now - heard > LEFT_SECONDS:
                raise ProcessLost(f"Process {other} of {self.world} has left the run")
            if now - heard > self.timeout:
                raise ProcessLost(f"Process {other} of {self.world} has sent no heartbeat for {now - heard:.0f} s")
        if self._gone is not None and now - self._gone_at > LEFT_SECONDS:
            raise ProcessLost(f"The main process is gone: {self._gone}")

    def leave(self) -> None:
        """Announce the end, so that no other process takes this one for lost."""
        if self._over.is_set():
            return
        with self._lock:
            self._mine = replace(self._mine, left=True)
        self._over.set()
        self._news.set()
        self._thread.join(timeout=2.0)

    def _exchange(self) -> None:
        others = [str(other) for other in self._heard]
        try:
            while True:
                over = self._over.is_set()
                with self._lock:
                    mine = self._mine = replace(self._mine, beat=self._mine.beat + 1, signal=signal_that_came())
                self._store.set(str(self.rank), json.dumps(asdict(mine)))
                self._written = mine
                for other, line in zip(self._heard, self._store.multi_get(others), strict=True):
                    self._receive(other, Heartbeat(**json.loads(line)))
                if over:
                    return
                self._news.wait(EVERY_SECONDS)
                self._news.clear()
        except Exception as error:  # noqa: BLE001  whatever it is, no heartbeat arrives any more
            self._gone_at = time.monotonic()
            self._gone = str(error).splitlines()[0] if str(error) else type(error).__name__

    def _receive(self, other: int, heartbeat: Heartbeat) -> None:
        if heartbeat != self._heard[other][1]:
            self._heard[other] = (time.monotonic(), heartbeat)
        if (
            heartbeat.signal is not None
            and signal_that_came() is None
            and not self._passed_on
            and not self._over.is_set()
        ):
            self._passed_on = True
            _thread.interrupt_main(signal.Signals(heartbeat.signal))  # as if it had come here


def _shared_store(rank: int, device: torch.device, timeout: float) -> Any:
    """A store in the main process for all of them; a collective distributes its port."""
    limit = timedelta(seconds=max(timeout, 1.0))
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    open_store = partial(dist.TCPStore, host, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    port = torch.zeros(1, dtype=torch.long, device=device)
    store: Any = None
    if rank == 0:
        store = open_store(port=0, is_master=True)
        for each in range(int(os.environ["WORLD_SIZE"])):
            store.set(str(each), json.dumps(asdict(Heartbeat())))
        port += store.port
    dist.all_reduce(port)
    return store or open_store(port=int(port), is_master=False)
