"""A GPU's load, memory, temperature, power and clocks, from NVML where it is available."""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SAMPLE_EVERY = 30.0  # seconds
# Shares of the highest clock below which a GPU counts as throttled, if it reports a reason. Healthy GPUs reach their
# power limit under load and then run at 0.7 to 0.9 of it.
SLOWED_BY_HEAT, SLOWED_BY_POWER = 0.9, 0.6
# Bits of NVML's reasons for lower clocks. The power limit alone is normal under load.
HEAT = 0x20 | 0x40
POWER = 0x04 | 0x80


@dataclass(frozen=True)
class GPU:
    """One sample. Shares are 0 to 1; watts and clocks (MHz) are None if the GPU does not report them."""

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
        """Why the GPU is throttled, with its figures; None if it is not."""
        if self.clock is None or not self.clock_most:
            return None
        share = self.clock / self.clock_most
        clocks = f"{self.clock:.0f} of {self.clock_most:.0f} MHz"
        if self.reasons & HEAT and share < SLOWED_BY_HEAT:
            return f"heat limits the GPU to {clocks} ({self.celsius:.0f} degrees). Cool it, or clean its fans."
        if self.reasons & POWER and share < SLOWED_BY_POWER and self.watts is not None:
            limit = f" of {self.watts_limit:.0f}" if self.watts_limit else ""
            return (
                f"power limits the GPU to {clocks} ({self.watts:.0f}{limit} W). Check its power limit and its cables."
            )
        return None


def spills() -> bool:
    """Whether the driver moves what does not fit on the GPU to system memory: on Windows and in WSL."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def open_gpu(device: torch.device) -> Callable[[], GPU] | None:
    """A function that samples the GPU of `device`; None without a GPU, NVML or the package nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        _sample(pynvml, handle)
    except Exception:  # noqa: BLE001  a driver's library may fail in any way, and nothing depends on it
        return None
    return lambda: _sample(pynvml, handle)


def _sample(nvml: Any, handle: Any) -> GPU:
    """Raises whatever NVML raises if load, memory or temperature cannot be read."""

    def query(name: str, *arguments: Any) -> float | None:
        try:
            return float(getattr(nvml, name)(handle, *arguments))
        except Exception:  # noqa: BLE001  GPUs differ in what they report
            return None

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    watts, limit = query("nvmlDeviceGetPowerUsage"), query("nvmlDeviceGetEnforcedPowerLimit")
    return GPU(
        utilisation=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        memory=memory.used / memory.total,
        celsius=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        watts=None if watts is None else watts / 1000.0,
        watts_limit=None if limit is None else limit / 1000.0,
        clock=query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        clock_most=query("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        reasons=int(query("nvmlDeviceGetCurrentClocksThrottleReasons") or 0),
    )


class GPUWatch:
    """Samples a GPU every 30 s in its own thread, between `start` and `stop`."""

    def __init__(self, every: float = SAMPLE_EVERY) -> None:
        self._every, self._stopped = every, threading.Event()
        self._thread: threading.Thread | None = None
        self.samples: list[GPU] = []

    def start(self, sample: Callable[[], GPU] | None) -> None:
        """Does nothing without `sample`."""
        if sample is None:
            return
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, args=(sample,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None

    def _run(self, sample: Callable[[], GPU]) -> None:
        while not self._stopped.wait(self._every):
            try:
                self.samples.append(sample())
            except Exception:  # noqa: BLE001  a GPU that stops answering ends this thread, never the run
                return
