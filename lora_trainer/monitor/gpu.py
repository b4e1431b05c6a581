"""A GPU's utilization, memory, temperature, power and clocks: from NVML, or from torch on an AMD GPU."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Shares of the highest clock below which a GPU counts as throttled, if it reports a reason. Healthy GPUs reach their
# power limit under load and then run at 0.7 to 0.9 of it.
SLOWED_BY_HEAT, SLOWED_BY_POWER = 0.9, 0.6
# Bits of NVML's reasons for lower clocks. The power limit alone is normal under load.
HEAT = 0x20 | 0x40
POWER = 0x04 | 0x80


@dataclass(frozen=True)
class GPU:
    """One sample. Shares are 0 to 1; watts and clocks (MHz) are None if the GPU does not report them."""

    utilization: float
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


def open_gpus(devices: Sequence[torch.device]) -> tuple[tuple[Callable[[], GPU], ...], str]:
    """A function for each GPU of `devices` that samples it, and why there is none where they cannot be measured.

    All or none of them: an average over some would be taken for that of all.
    """
    import torch

    gpus = [device for device in devices if device.type == "cuda"]
    try:
        found = tuple(_from_torch(device) if torch.version.hip else _from_nvml(device) for device in gpus)
        for sample in found:
            sample()
    except ImportError:
        package = "amdsmi, which comes with ROCm" if torch.version.hip else "pip install 'lora-trainer[gpu]'"
        return (), f"a package is missing: {package}"
    except Exception as error:  # noqa: BLE001  a driver's library may fail in any way, and nothing depends on it
        return (), f"the driver does not answer: {str(error) or type(error).__name__}"
    return found, ""


def _from_nvml(device: torch.device) -> Callable[[], GPU]:
    """Raises ImportError without the package nvidia-ml-py, and whatever NVML raises."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    return lambda: _sample(pynvml, handle)


def _from_torch(device: torch.device) -> Callable[[], GPU]:
    """Through torch, which asks amdsmi on an AMD GPU; that reports neither limits nor reasons for lower clocks."""
    import torch

    def query(function: Callable[[torch.device], float]) -> float | None:
        try:
            return float(function(device))
        except Exception:  # noqa: BLE001  GPUs differ in what they report
            return None

    def sample() -> GPU:
        free, total = torch.cuda.mem_get_info(device)
        watts = query(torch.cuda.power_draw)  # in milliwatts
        return GPU(
            utilization=torch.cuda.utilization(device) / 100.0,
            memory=1.0 - free / total,
            celsius=query(torch.cuda.temperature) or 0.0,
            watts=None if watts is None else watts / 1000.0,
            clock=query(torch.cuda.clock_rate),
        )

    return sample


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
        utilization=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        memory=memory.used / memory.total,
        celsius=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        watts=None if watts is None else watts / 1000.0,
        watts_limit=None if limit is None else limit / 1000.0,
        clock=query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        clock_most=query("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        reasons=int(query("nvmlDeviceGetCurrentClocksThrottleReasons") or 0),
    )


def nvidia_gpus() -> tuple[Callable[[], dict[str, Any]], ...]:
    """A function for each NVIDIA GPU of this machine that describes it now, without torch; none where NVML is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # noqa: BLE001  a driver's library may fail in any way, and nothing depends on it
        return ()

    def describe(index: int, handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "name": str(pynvml.nvmlDeviceGetName(handle))}
        try:
            now = _sample(pynvml, handle)
            total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        except Exception:  # noqa: BLE001  the same
            return found
        found |= {
            "utilization": now.utilization,
            "celsius": now.celsius,
            "watts": now.watts,
            "watts_limit": now.watts_limit,
        }
        return {**found, "memory_total": total, "memory_used": round(now.memory * total), "throttled": now.throttled}

    return tuple(partial(describe, index, handle) for index, handle in enumerate(handles))
