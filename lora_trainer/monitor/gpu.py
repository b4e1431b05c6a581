"""What a GPU says of itself through NVML: load, memory, temperature, power, clocks. Nothing where it cannot be asked."""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LOOKED_EVERY = 30.0  # seconds
# Of its highest clock, under which a GPU that says why is called throttled. Healthy GPUs meet their power limit under
# load, and then run at 0.7 to 0.9 of a clock that they never hold.
SLOWED_BY_HEAT, SLOWED_BY_POWER = 0.9, 0.6
# Bits of NVML's reasons for lower clocks. The power limit alone is usual under load, and no fault.
HEAT = 0x20 | 0x40
POWER = 0x04 | 0x80


@dataclass(frozen=True)
class GPU:
    """One look. Shares are from 0 to 1; watts and clocks (MHz) are None where the GPU does not say."""

    utilisation: float
    memory: float
    celsius: float
    watts: float | None = None
    watts_limit: float | None = None
    clock: float | None = None
    clock_most: float | None = None
    reasons: int = 0

    @property
    def throttled(self) -> str | None:
        """Why the GPU computes slower than it can, with its figures; None where it does not."""
        if self.clock is None or not self.clock_most:
            return None
        share = self.clock / self.clock_most
        clocks = f"{self.clock:.0f} of {self.clock_most:.0f} MHz"
        if self.reasons & HEAT and share < SLOWED_BY_HEAT:
            return f"heat holds the GPU at {clocks} ({self.celsius:.0f} degrees). Cool it, or clean its fans."
        if self.reasons & POWER and share < SLOWED_BY_POWER and self.watts is not None:
            limit = f" of {self.watts_limit:.0f}" if self.watts_limit else ""
            return f"power holds the GPU at {clocks} ({self.watts:.0f}{limit} W). See its power limit and its cables."
        return None


def spills() -> bool:
    """Whether the driver puts into system memory what the GPU has no room for: on Windows, and in Linux inside it."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def open_gpu(device: torch.device) -> Callable[[], GPU] | None:
    """A function that looks at the GPU of `device`; None without a GPU, NVML or the package nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        _look(pynvml, handle)
    except Exception:  # noqa: BLE001  a driver's library may fail in any way, and nothing hangs on it
        return None
    return lambda: _look(pynvml, handle)


def _look(nvml: Any, handle: Any) -> GPU:
    """Raises whatever NVML raises where load, memory or temperature cannot be read."""

    def asked(name: str, *arguments: Any) -> float | None:
        try:
            return float(getattr(nvml, name)(handle, *arguments))
        except Exception:  # noqa: BLE001  each GPU says what it can
            return None

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    watts, limit = asked("nvmlDeviceGetPowerUsage"), asked("nvmlDeviceGetEnforcedPowerLimit")
    return GPU(
        utilisation=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        memory=memory.used / memory.total,
        celsius=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        watts=None if watts is None else watts / 1000.0,
        watts_limit=None if limit is None else limit / 1000.0,
        clock=asked("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        clock_most=asked("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        reasons=int(asked("nvmlDeviceGetCurrentClocksThrottleReasons") or 0),
    )


class GPUWatch:
    """Looks at a GPU every 30 s in a thread of its own, between `start` and `stop`; keeps what it saw."""

    def __init__(self, every: float = LOOKED_EVERY) -> None:
        self._every, self._over = every, threading.Event()
        self._thread: threading.Thread | None = None
        self.seen: list[GPU] = []

    def start(self, look: Callable[[], GPU] | None) -> None:
        """Nothing is looked at where there is no `look`."""
        if look is None:
            return
        self._over.clear()
        self._thread = threading.Thread(target=self._run, args=(look,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None

    def _run(self, look: Callable[[], GPU]) -> None:
        while not self._over.wait(self._every):
            try:
                self.seen.append(look())
            except Exception:  # noqa: BLE001  a GPU that stops answering ends the looking, never the run
                return
