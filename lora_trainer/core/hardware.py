"""GPU, CPUs and package versions of this machine. Torch is imported only where a docstring says so."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import platform
import re
import sys
import uuid
from collections.abc import Collection
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.version import __version__

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "bitsandbytes",
    "pytorch-optimizer",
    "xformers",
    "numpy",
    "pillow",
)


training_gpu = 0  # the index of the GPU on which a single process trains; each of several has its own


def cuda_memory_gib() -> float | None:
    """Memory of the CUDA GPU that trains in GiB, or None without one. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(training_gpu).total_memory) / 2**30


def visible_gpus() -> list[str]:
    """The names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES. Imports torch."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def describe_idle_gpus(used: Collection[int], use_them: str) -> str | None:
    """A line that names the GPUs beside those of the `used` indices, and how to use them; None where there are none. Imports torch."""
    idle = [name for index, name in enumerate(visible_gpus()) if index not in used]
    if not idle:
        return None
    names = f"GPU {idle[0]} is" if len(idle) == 1 else f"GPUs {', '.join(idle)} are"
    return f"{names} idle. {use_them.format(gpu=idle[0])}"


@cache
def this_machine() -> str:
    """A name under which process numbers can be compared: of this machine until it restarts, and of one container.

    Host names would not do: containers may share the host's, and several machines may have the same.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux
        return f"{uuid.getnode():x}"


def trim_heap() -> None:
    """Return freed memory to the system where the C library keeps it, which glibc does with what many small requests left."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def available_cpus() -> int:
    """CPUs that this process may use: those it is bound to, at most what its container allows."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def cpu_quota(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that Linux grants this process: the least quota of its control groups (version 1 or 2) and all above them.

    None where there is no quota, and on other systems.
    """
    try:
        lines = groups.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / "cpu" if controllers else mount
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            try:
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text("ascii").split()
                found.append(int(quota) / int(period))
            except (OSError, ValueError):  # no such group in this container's view, or "max"
                continue
    return min((cpus for cpus in found if cpus > 0), default=None)  # -1: no quota, in version 1


def free_memory(device: torch.device) -> None:
    """Free memory that nothing refers to; pipelines have reference cycles. Imports torch for a GPU."""
    gc.collect()
    trim_heap()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def package_versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    # A checkout that is not installed has no metadata of its own.
    found = {"python": platform.python_version(), "lora-trainer": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_machine() -> dict[str, str | int | float | None]:
    """System, CPUs, their libraries and the GPU, for the run's record. Imports torch."""
    import torch

    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    gpu = torch.cuda.get_device_name(training_gpu) if torch.cuda.is_available() else None
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),  # sums on a CPU are split by it
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # the instructions that torch's own code uses
        "onednn": onednn[1] if onednn else None,
        "gpu": gpu,
        "gpu_gib": cuda_memory_gib(),
    }
