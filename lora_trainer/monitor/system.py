"""Memory of the system or its container, and the load of its CPU and disks. No torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

MB = 10**6


def system_memory() -> tuple[int, int]:
    """Total and free bytes of the system, or of its container if that has fewer."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text("ascii"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        # Inactive pages of files are freed when memory is needed.
        used = int((group / "memory.current").read_text("ascii")) - int(kept["inactive_file"])
    except (OSError, ValueError, KeyError):  # no container, or one without a limit
        return total, available
    return min(total, limit), max(0, min(available, limit - used))


class HostMeter:
    """Measures what the host did between two calls of `read`. Create it in the thread that trains."""

    def __init__(self) -> None:
        self._process, self._thread_seconds = psutil.Process(), clock_of_this_thread()
        self._before = self._counters()

    def read(self) -> dict[str, float]:
        """Shares from 0 to 1 of `cpu`, `io_wait`, `main_thread` (of one core), `system_memory`, `swap` in use; MB/s of
        disks and of swap; and the memory of this process in GiB. What the system does not report is missing.
        """
        before, now = self._before, self._counters()
        self._before = now
        row = rates(before, now)
        total, available = system_memory()
        row["system_memory"] = 1.0 - available / total
        with contextlib.suppress(OSError, RuntimeError, psutil.Error):
            row["swap"] = psutil.swap_memory().percent / 100.0
        with contextlib.suppress(OSError, psutil.Error):
            row["process_memory_gib"] = self._process.memory_info().rss / 2**30
        return row

    def _counters(self) -> dict[str, float]:
        """Seconds of `wall`, of all CPUs (`all`, `idle`, `waiting`) and of the training thread, and bytes."""
        found = {"wall": time.monotonic()}
        times = psutil.cpu_times()
        # The user's time includes that of guests.
        fields = [getattr(times, name) for name in times._fields if name not in ("guest", "guest_nice")]
        found |= {"all": sum(fields), "idle": times.idle}
        if hasattr(times, "iowait"):
            found["waiting"] = times.iowait
        with contextlib.suppress(OSError):  # the thread has ended
            if self._thread_seconds is not None:
                found["thread"] = self._thread_seconds()
        with contextlib.suppress(OSError, RuntimeError, psutil.Error):  # not in every container
            if (disks := psutil.disk_io_counters()) is not None:
                found |= {"disk_read": disks.read_bytes, "disk_write": disks.write_bytes}
        with contextlib.suppress(OSError, RuntimeError, psutil.Error):
            swapped = psutil.swap_memory()
            found["swapped"] = swapped.sin + swapped.sout
        return found


def rates(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Shares and MB/s between two sets of counters that have what the system reports."""
    spent = {name: max(0.0, now[name] - before[name]) for name in now if name in before}
    row, seconds, cpu = dict[str, float](), spent["wall"], spent["all"]
    if cpu > 0:
        waiting = spent.get("waiting", 0.0)
        row["cpu"] = max(0.0, 1.0 - (spent["idle"] + waiting) / cpu)
        row |= {"io_wait": waiting / cpu} if "waiting" in spent else {}
    if seconds > 0:
        row |= {"main_thread": min(1.0, spent["thread"] / seconds)} if "thread" in spent else {}
        for counter, name in (("disk_read", "disk_read"), ("disk_write", "disk_write"), ("swapped", "swap")):
            row |= {f"{name}_mb_s": spent[counter] / seconds / MB} if counter in spent else {}
    return row


def clock_of_this_thread() -> Callable[[], float] | None:
    """A function for any thread that returns the CPU seconds of this one; None where the system has no such clock."""
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS and Windows
        return None
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)
