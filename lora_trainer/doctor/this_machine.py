"""Read what the system reports of itself: GPUs, limits, memory, clocks, versions. No torch."""

from __future__ import annotations

import contextlib
import csv
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil

from lora_trainer.core.hardware import PACKAGES, cpu_quota
from lora_trainer.doctor.facts import MachineFacts, PresentGpu, SmiGpu, SystemFacts, Vendor
from lora_trainer.doctor.variables import VARIABLES
from lora_trainer.monitor.system import system_memory
from lora_trainer.training.threads import choose_threads, cpus_in_use

VENDORS: Mapping[str, Vendor] = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
DISPLAY, ACCELERATOR = "0x03", "0x12"  # classes of devices on the bus
INSIDE_THE_CPU = "0000:00:02.0"  # where Intel's integrated graphics are
SMI_FIELDS = (
    "name,driver_version,memory.total,memory.used,persistence_mode,power.limit,power.default_limit,"
    "mig.mode.current,ecc.errors.uncorrected.volatile.total"
)
SMI_SECONDS = 20.0
MIB = 2**20
UNLIMITED = 2**60  # bytes: control groups of version 1 give a number near 2^63 for no limit
OTHER_PACKAGES = ("huggingface-hub", "tokenizers", "pydantic", "nvidia-ml-py")


def read_machine() -> MachineFacts:
    """Everything but what torch reports and what is measured."""
    smi, smi_failure = ask_nvidia_smi()
    present = present_gpus()
    if smi and not any(gpu.vendor == "NVIDIA" and gpu.has_driver for gpu in present):  # Windows has no device files
        present = (*(PresentGpu("NVIDIA", "nvidia-smi") for _ in smi), *present)
    versions, requires = dict[str, str](), tuple[str, ...]()
    for name in (*PACKAGES, *OTHER_PACKAGES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    with contextlib.suppress(metadata.PackageNotFoundError):
        requires = tuple(metadata.requires("lora-trainer") or ())
    return MachineFacts(
        system=read_system(),
        gpus=present,
        smi=smi,
        smi_failure=smi_failure,
        versions=versions,
        tested=constrained_versions(),
        requires=requires,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def read_system() -> SystemFacts:
    """The system, its CPUs, memory, limits and clocks."""
    calendar, steady = time.time(), time.monotonic()
    quota, (bound, busy) = cpu_quota(), cpus_in_use()  # it measures for a fifth of a second
    rate = (time.time() - calendar) / max(time.monotonic() - steady, 1e-9)
    release = platform.release()
    memory, swap = psutil.virtual_memory(), 0
    with contextlib.suppress(OSError, RuntimeError):
        swap = int(psutil.swap_memory().total)
    allowed, available = system_memory()
    limits, threads = read_limits(), choose_threads(None)
    return SystemFacts(
        system=platform.system(),
        release=release,
        machine=platform.machine(),
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        bits=8 * struct.calcsize("P"),
        is_wsl="microsoft" in release.lower(),
        container=container_kind(),
        cpus=os.cpu_count() or 1,
        cpus_available=bound if quota is None else min(float(bound), quota),
        cpus_busy=busy,
        threads=f"{threads.count}: {threads.reason}",
        memory=int(memory.total),
        memory_available=available,
        memory_limit=min((limit for limit in (allowed, old_memory_limit()) if limit), default=None),
        swap=swap,
        shared_memory=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        open_files=limits.get("NOFILE", (None, None))[0],
        open_files_hard=limits.get("NOFILE", (None, None))[1],
        file_size=limits.get("FSIZE", (None, None))[0],
        address_space=limits.get("AS", (None, None))[0],
        time=time.time(),
        newest_file=Path(__file__).stat().st_mtime,
        clock_rate=rate,
        clock_source=text_of("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_shift=clock_shift(),
    )


def read_limits() -> dict[str, tuple[int | None, int | None]]:
    """The soft and hard limits of this process by name; None is no limit. Empty on Windows."""
    if sys.platform == "win32":
        return {}
    import resource

    limits = {}
    for name in ("NOFILE", "FSIZE", "AS"):
        numbers = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        soft, hard = (None if number == resource.RLIM_INFINITY else number for number in numbers)
        limits[name] = (soft, hard)
    return limits


def text_of(path: str) -> str:
    """A small file of the system, empty where there is none."""
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def old_memory_limit() -> int | None:
    """The limit of this process's control group of version 1, or of one above it."""
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            own = root / path.strip("/")
            folders = [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
            texts = [text_of(str(folder / "memory.limit_in_bytes")) for folder in folders]
            return min((int(text) for text in texts if text.isdigit() and int(text) < UNLIMITED), default=None)
    return None


def container_kind() -> str:
    """`docker`, `podman`, `kubernetes` …, or empty outside of a container."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    for path, kind in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"), ("/.singularity.d", "singularity")):
        if os.path.exists(path):
            return kind
    named = re.search(r"docker|lxc|kubepods|containerd", text_of("/proc/1/cgroup"))
    return named[0] if named else ""


def clock_shift() -> str:
    """What gives this process another time than the machine's: a library, or a time namespace."""
    if "faketime" in os.environ.get("LD_PRELOAD", ""):
        return f"LD_PRELOAD={os.environ['LD_PRELOAD']}"
    shifts = [line.split() for line in text_of("/proc/self/timens_offsets").splitlines()]
    moved = [f"{name} {seconds} s" for name, seconds, *_ in shifts if seconds != "0"]
    return f"a time namespace ({', '.join(moved)})" if moved else ""


def present_gpus() -> tuple[PresentGpu, ...]:
    """GPUs by their device files and on the bus; one entry for each device, or for each vendor where only that is known."""
    found = [PresentGpu("NVIDIA", str(path)) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    if not found and (folders := sorted(Path("/proc/driver/nvidia/gpus").glob("*"))):
        found = [PresentGpu("NVIDIA", str(folder), has_driver=False) for folder in folders]
    if not found and os.path.exists("/dev/dxg") and shutil.which("nvidia-smi"):
        found = [PresentGpu("NVIDIA", "/dev/dxg")]
    if os.path.exists("/dev/kfd"):
        found.append(PresentGpu("AMD", "/dev/kfd"))
    if sys.platform == "darwin" and platform.machine() == "arm64":
        found.append(PresentGpu("Apple", "this Mac", integrated=False))
    known = {gpu.vendor for gpu in found}
    for folder in sorted(Path("/sys/bus/pci/devices").glob("*")):
        vendor = VENDORS.get(text_of(str(folder / "vendor")))
        if vendor is None or vendor in known or not text_of(str(folder / "class")).startswith((DISPLAY, ACCELERATOR)):
            continue
        inside = vendor == "Intel" and folder.name == INSIDE_THE_CPU
        nodes = sorted(folder.glob("drm/renderD*"))
        there = [f"/dev/dri/{node.name}" for node in nodes if os.path.exists(f"/dev/dri/{node.name}")]
        # Only Intel's driver serves programs through these files alone.
        has_driver = bool(there) and vendor == "Intel"
        found.append(PresentGpu(vendor, there[0] if has_driver else f"PCI {folder.name}", has_driver, inside))
    return tuple(found)


def ask_nvidia_smi() -> tuple[tuple[SmiGpu, ...], str]:
    """GPUs as NVIDIA's own program reports them, and why it does not; both empty where it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    command = [program, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return (), f"it did not answer within {SMI_SECONDS:.0f} s"
    except OSError as problem:
        return (), str(problem)
    if done.returncode != 0:
        text = " ".join((done.stdout + done.stderr).split())
        return (), f"exit code {done.returncode}: {text[:200]}"
    rows = [row for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if len(row) > 8]
    return tuple(_smi_gpu([cell.strip() for cell in row]) for row in rows), ""


def _smi_gpu(row: list[str]) -> SmiGpu:
    def number(text: str) -> float | None:
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None

    name, driver, memory, used, persistence, limit, default, mig, ecc = row[:9]
    return SmiGpu(
        name=name,
        driver=driver,
        memory=number(memory),
        memory_used=number(used),
        has_persistence={"Enabled": True, "Disabled": False}.get(persistence),
        watts_limit=number(limit),
        watts_default=number(default),
        has_mig=mig == "Enabled",
        ecc_errors=number(ecc),
    )


def constrained_versions() -> dict[str, str]:
    """The versions of constraints.txt: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    places = (package / "constraints.txt", package.parent / "constraints.txt")
    text = next((place.read_text("utf-8") for place in places if place.is_file()), "")
    pins = (line.partition("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {name.strip().lower().replace("_", "-"): version.strip() for name, _, version in pins}
