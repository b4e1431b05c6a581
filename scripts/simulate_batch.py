"""Simulate a batch of many jobs on many machines that die: the queue's own code, with a simulated clock and no training.

    python scripts/simulate_batch.py --jobs 10000 --workers 64

Each worker has a `JobStore` of its own on one folder, as on a machine of its own, and claims, gives signs of life, saves
checkpoints, dies, comes back and records ends as `batch work` does. Time passes from event to event: the times of files are
set to it. Prints the time to the last end beside what no schedule can beat, and what the folder was asked for.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lora_trainer.jobs import job_store
from lora_trainer.jobs.job_state import SEVERAL_MACHINES, SILENT_SECONDS, Ending, NewJob, QueuedJob
from lora_trainer.jobs.job_store import JobStore

MINUTE = 60.0
CHECKPOINT_SECONDS = 5 * MINUTE
RESTART_SECONDS = 10 * MINUTE  # until a dead machine is there again
FROZEN_SECONDS = 15 * MINUTE  # that a machine is silent for, and then continues as if nothing had happened
LOOK_SECONDS = 60.0  # of the workers that stay when nothing waits, for jobs of machines that die
STAYING = 2
DONE = Ending(0, None, {"dataset": 1.0, "lora": 1.0}, "passed")


class Clock:
    """The simulated time, which files get too."""

    def __init__(self) -> None:
        self.now = 1_000_000_000.0

    def stamp(self, path: Path) -> None:
        os.utime(path, (self.now, self.now))


class SimulatedStore(JobStore):
    """The jobs as one machine sees them, on a disk with the simulated clock."""

    def __init__(self, output: Path, clock: Clock) -> None:
        self.clock = clock
        super().__init__(output)

    def _now(self) -> float:
        return self.clock.now

    def sign_of_life(self, job: QueuedJob) -> bool:
        is_given = super().sign_of_life(job)
        self.clock.stamp(self._progress(job))
        return is_given


@dataclass
class Worker:
    """A machine. `job` is what it trains; `life` counts how often it was started."""

    name: str
    store: SimulatedStore
    job: QueuedJob | None = None
    began: float = 0.0
    life: int = 0


@dataclass
class Found:
    """What the simulation saw."""

    ended: Counter[str] = field(default_factory=Counter)
    trained_seconds: float = 0.0
    deaths: int = 0
    frozen: int = 0
    late: int = 0  # ends of jobs that somebody else had taken meanwhile, which were not recorded
    claims: int = 0
    retried: int = 0  # jobs that died three times


class Simulation:
    """`jobs` of about `minutes` each on `workers` machines, of which a `risk` share of the attempts is lost."""

    def __init__(self, output: Path, jobs: int, workers: int, minutes: float, risk: float, seed: int) -> None:
        self.clock, self.draw, self.risk = Clock(), random.Random(seed), risk
        self.seconds = {f"job-{at:05d}": MINUTE * minutes * self.draw.lognormvariate(0.0, 0.5) for at in range(jobs)}
        self.left = dict(self.seconds)  # after the last checkpoint
        self.found, self.events, self.turn = Found(), list[tuple[float, int, str, Worker, Any]](), 0
        exclusive = job_store.create_entry

        def create(target: Path, text: str) -> bool:
            is_made = exclusive(target, text)
            if is_made:
                self.clock.stamp(target)
            return is_made

        self.patches = (
            patch.object(job_store, "create_entry", create),
            patch.object(job_store, "this_process", lambda: self.holder),
            patch("os.fsync", lambda descriptor: None),  # of the real disk
        )
        for each in self.patches:
            each.start()
        jobs = [NewJob(name, Path("/data", name), document={"name": name}) for name in self.seconds]
        SimulatedStore(output, self.clock).enlist(jobs, {SEVERAL_MACHINES: True})
        self.workers = [Worker(f"machine {at:02d}", SimulatedStore(output, self.clock)) for at in range(workers)]

    def run(self) -> float:
        """Until every job has ended; the simulated seconds that it took."""
        start = self.clock.now
        for worker in self.workers:
            self.at(0.0, "look", worker)
        while self.events and len(self.found.ended) < len(self.seconds):
            self.clock.now, _, what, worker, about = heapq.heappop(self.events)
            getattr(self, what)(worker, about)
        for each in self.patches:
            each.stop()
        return self.clock.now - start

    def at(self, seconds: float, what: str, worker: Worker, about: Any = None) -> None:
        """Call a method for a worker so many seconds from now; `about` is the life or attempt that it is for."""
        self.turn += 1
        heapq.heappush(self.events, (self.clock.now + seconds, self.turn, what, worker, about))

    def look(self, worker: Worker, _: None) -> None:
        """A worker without a job claims one."""
        self.holder = json.dumps([worker.name, worker.life, 0.0, worker.name])
        job = worker.store.claim()
        if job is None:
            if worker in self.workers[:STAYING]:
                failed = [each.name for each in worker.store.read_jobs() if each.status == "failed"]
                worker.store.put_back(failed)  # as `batch retry` does: three machines died on each
                self.found.retried += len(failed)
                self.at(LOOK_SECONDS, "look", worker)
            return
        self.found.claims += 1
        worker.job, worker.began, worker.life = job, self.clock.now, worker.life + 1
        worker.store.sign_of_life(job)
        needed = self.left[job.name]
        if self.draw.random() < self.risk:
            self.at(needed * self.draw.random(), self.draw.choice(("die", "freeze")), worker, worker.life)
        self.at(needed, "end", worker, worker.life)
        self.at(SILENT_SECONDS / 3, "live", worker, worker.life)

    def live(self, worker: Worker, life: int) -> None:
        """A sign of life, and the look at the claim that goes with it."""
        if worker.life == life and worker.job is not None:
            if worker.store.read_claim(worker.job) == "lost":  # it was silent for too long: it stops
                self.found.late += 1
                self.drop(worker)
                self.at(0.0, "look", worker)
                return
            worker.store.sign_of_life(worker.job)
            self.at(SILENT_SECONDS / 3, "live", worker, life)

    def die(self, worker: Worker, life: int) -> None:
        if worker.life == life and worker.job is not None:
            self.found.deaths += 1
            self.drop(worker)
            self.at(RESTART_SECONDS, "look", worker)

    def freeze(self, worker: Worker, life: int) -> None:
        """The machine hangs: all that it was to do comes late."""
        if worker.life == life and worker.job is not None:
            self.found.frozen += 1
            mine = [event for event in self.events if event[3] is worker]
            self.events = [event for event in self.events if event[3] is not worker]
            for when, turn, what, _, about in mine:
                self.events.append((when + FROZEN_SECONDS, turn, what, worker, about))
            heapq.heapify(self.events)

    def drop(self, worker: Worker) -> None:
        """The worker's job is not its own any more; what it saved stays."""
        assert worker.job is not None
        trained = self.clock.now - worker.began
        name = worker.job.name
        self.left[name] = min(self.left[name], self.seconds[name] - trained // CHECKPOINT_SECONDS * CHECKPOINT_SECONDS)
        self.found.trained_seconds += trained
        worker.job, worker.life = None, worker.life + 1

    def end(self, worker: Worker, life: int) -> None:
        """A job is trained; its end counts only if it is still this worker's."""
        if worker.life != life or worker.job is None:
            return
        job, worker.job = worker.job, None
        self.found.trained_seconds += self.clock.now - worker.began
        if worker.store.finish(job, DONE) is None:
            self.found.late += 1
        else:
            self.found.ended[job.name] += 1
        self.look(worker, None)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what is asked of the disk inside the block: opened files, links, renames."""
    found: Counter[str] = Counter()
    is_on = [True]

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on[0] and event in ("open", "os.link", "os.rename", "os.remove"):
            found[event] += 1

    sys.addaudithook(hear)
    yield found
    is_on[0] = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=60.0, help="median time of a job")
    parser.add_argument("--risk", type=float, default=0.05, help="share of the attempts whose machine dies or hangs")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, counting() as disk:
        simulation = Simulation(Path(folder), asked.jobs, asked.workers, asked.minutes, asked.risk, asked.seed)
        disk.clear()
        took, found = simulation.run(), simulation.found
        states = Counter(job.status for job in simulation.workers[0].store.read_jobs())
    work = sum(simulation.seconds.values())
    bound = max(work / asked.workers, max(simulation.seconds.values()))
    doubled = sum(count > 1 for count in found.ended.values())
    print(
        f"{asked.jobs} jobs, {asked.workers} machines: {dict(states)}, {doubled} recorded twice, {found.claims} attempts"
    )
    print(
        f"{found.deaths} machines died, {found.frozen} hung for 15 minutes, {found.late} late ends were not recorded, "
        f"{found.retried} jobs died three times and were put back"
    )
    print(
        f"time {took / 3600:.1f} h; without deaths no schedule is under {bound / 3600:.1f} h: {took / bound:.3f} times that"
    )
    print(f"lost to deaths and repeated: {100 * (found.trained_seconds / work - 1):.1f} % of the work")
    asks = ", ".join(f"{disk[name] / found.claims:.0f} {name}" for name in sorted(disk))
    print(f"the disk, for each attempt (signs of life included): {asks}; simulated in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
