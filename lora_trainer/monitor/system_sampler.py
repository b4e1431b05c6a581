"""Sample the GPUs and the host in a thread beside the loop, which takes averages and writes them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lora_trainer.monitor.system import HostMeter

if TYPE_CHECKING:
    from lora_trainer.monitor.gpu import GPU

SAMPLES_PER_ROW = 5  # of the GPU, which reports the latest second or less
NEARLY = 0.99  # of an interval: threads wake up a little early or late


@dataclass(frozen=True)
class SystemSample:
    """The GPUs at the end of `seconds`, in the order of the local processes; and the host since it was last read."""

    seconds: float
    gpus: tuple[GPU, ...]
    host: dict[str, float]


class SystemSampler:
    """Samples in a thread of its own between `start` and `stop`; `every` is the seconds of a row, 0 samples nothing.

    The thread shares only a queue with the loop, so neither waits for the other.
    """

    def __init__(self, every: float) -> None:
        self._every, self._stopped = every, threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: deque[SystemSample] = deque()
        self.latest: SystemSample | None = None

    def start(self, gpus: Sequence[Callable[[], GPU]]) -> None:
        """Call it in the thread that trains: that one's CPU time is measured."""
        if self._every <= 0 or self._thread is not None:
            return
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, args=(tuple(gpus), HostMeter()), name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None

    def add(self, sample: SystemSample) -> None:
        """Queue a sample for the next `take`."""
        self.latest = sample
        self._samples.append(sample)

    def forget(self) -> None:
        """Drop what was not taken, such as samples of the time before the first step."""
        self._samples.clear()

    def take(self) -> dict[str, Any] | None:
        """The averages of all samples since the last call that returned any; None until an interval is full."""
        found = list(self._samples)
        if not found or sum(sample.seconds for sample in found) < NEARLY * self._every:
            return None
        for _ in found:
            self._samples.popleft()
        return averaged(found)

    def _run(self, gpus: tuple[Callable[[], GPU], ...], host: HostMeter) -> None:
        before = time.monotonic()
        period = self._every / SAMPLES_PER_ROW if gpus else self._every
        for number in itertools.count(1):
            if self._stopped.wait(period):
                return
            try:
                seen = tuple(sample() for sample in gpus)
            except Exception:  # noqa: BLE001  a GPU that stops answering is not measured again; the run continues
                seen = gpus = ()
            values = dict[str, float]()
            if not gpus or number % SAMPLES_PER_ROW == 0:  # counters of the host cover the whole interval
                with contextlib.suppress(Exception):  # a system that reports nonsense must not end the thread
                    values = host.read()
            now = time.monotonic()
            self.add(SystemSample(now - before, seen, values))
            before = now


def averaged(samples: Sequence[SystemSample]) -> dict[str, Any]:
    """A row of system.jsonl without its step: means over the time of the samples, only of what was measured.

    Of several GPUs: mean utilization and clock, most memory and heat, sum of watts; `gpus` has each one's own.
    """
    row: dict[str, Any] = {"seconds": round(sum(sample.seconds for sample in samples), 3)}
    count = min(len(sample.gpus) for sample in samples)
    gpus = [gpu_means([sample.gpus[index] for sample in samples]) for index in range(count)]
    if gpus:
        combine: dict[str, Callable[[Iterable[float]], float]] = {"memory": max, "celsius": max, "watts": sum}
        for name in gpus[0]:
            values = [gpu[name] for gpu in gpus if name in gpu]
            row[f"gpu_{name}"] = round(combine.get(name, fmean)(values), 4)
    if len(gpus) > 1:
        row["gpus"] = gpus
    for name in dict.fromkeys(name for sample in samples for name in sample.host):
        pairs = [(sample.host[name], sample.seconds) for sample in samples if name in sample.host]
        total = sum(seconds for _, seconds in pairs)
        row[name] = round(sum(value * seconds for value, seconds in pairs) / total, 4) if total > 0 else pairs[-1][0]
    return row


def gpu_means(samples: Sequence[GPU]) -> dict[str, float]:
    """The means of one GPU's samples, of what it reports."""
    found = {
        "utilization": [gpu.utilization for gpu in samples],
        "memory": [gpu.memory for gpu in samples],
        "celsius": [gpu.celsius for gpu in samples],
        "watts": [gpu.watts for gpu in samples if gpu.watts is not None],
        "clock_mhz": [gpu.clock for gpu in samples if gpu.clock is not None],
        "throttled": [float(gpu.throttled is not None) for gpu in samples if gpu.clock_most],
    }
    return {name: round(fmean(values), 4) for name, values in found.items() if values}
