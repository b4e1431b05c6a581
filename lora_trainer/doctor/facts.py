"""What is known of a machine, read once. Checks take these values, so any machine can be stated as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lora_trainer.monitor.gpu import GPU

Vendor = Literal["NVIDIA", "AMD", "Intel", "Apple"]
Build = Literal["cpu", "cuda", "rocm", "xpu", "mps"]
BUILDS: Mapping[Vendor, Build] = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "xpu", "Apple": "mps"}


@dataclass(frozen=True)
class PresentGpu:
    """A GPU that the system shows, whatever torch sees, and where it was found.

    Without `has_driver` it is on the bus, but no driver made its device files. `integrated`: a part of the CPU.
    """

    vendor: Vendor
    found_in: str
    has_driver: bool = True
    integrated: bool = False


@dataclass(frozen=True)
class SmiGpu:
    """A GPU as `nvidia-smi` reports it; None where it reports nothing. Memory is in MiB."""

    name: str
    driver: str
    memory: float | None = None
    memory_used: float | None = None
    has_persistence: bool | None = None
    watts_limit: float | None = None
    watts_default: float | None = None
    has_mig: bool = False
    ecc_errors: float | None = None  # uncorrected, since the driver was loaded


@dataclass(frozen=True)
class TorchDevice:
    """A device that torch sees; `capability` is that of CUDA."""

    name: str
    gib: float | None = None
    capability: tuple[int, int] | None = None
    has_bf16: bool = True


@dataclass(frozen=True)
class TorchFacts:
    """The build of torch and the devices that it sees. `failure` is why it cannot be imported.

    `toolkit` is the version of CUDA or ROCm that it was built for, `complaint` what it said while it looked for GPUs.
    """

    version: str = ""
    failure: str = ""
    build: Build = "cpu"
    toolkit: str = ""
    devices: tuple[TorchDevice, ...] = ()
    architectures: tuple[str, ...] = ()  # such as sm_90 and compute_90
    complaint: str = ""
    has_onednn: bool = True
    instructions: str = ""  # that torch's own code uses on this CPU


@dataclass(frozen=True)
class KnownAnswer:
    """A small computation, forward and backward, compared with float64 on the CPU. Errors are relative norms."""

    device: str
    dtype: str
    operation: str
    off: float = 0.0
    allowed: float = 0.0
    failure: str = ""

    @property
    def right(self) -> bool:
        return not self.failure and self.off <= self.allowed  # not where it is NaN


@dataclass(frozen=True)
class DiskFacts:
    """The disk of a folder that a run writes to, measured with a few MB. `needed` are the bytes that a run will write."""

    use: str
    folder: str
    free: int
    total: int
    write: float | None = None  # bytes a second, flushed
    read: float | None = None  # bytes a second, not from memory where the system allows that
    failure: str = ""
    needed: int | None = None


@dataclass(frozen=True)
class SystemFacts:
    """The system, its CPUs, memory (bytes) and limits. None: no limit, or not known."""

    system: str = "Linux"
    release: str = ""
    machine: str = "x86_64"
    python: tuple[int, int, int] = (3, 11, 0)
    bits: int = 64
    is_wsl: bool = False
    container: str = ""  # its kind, or empty
    cpus: int = 1
    cpus_available: float = 1.0
    cpus_busy: float = 0.0
    threads: str = ""  # that a run would use, and why
    memory: int = 0
    memory_available: int = 0
    memory_limit: int | None = None  # of the container
    swap: int = 0
    shared_memory: int | None = None
    open_files: int | None = None
    open_files_hard: int | None = None
    file_size: int | None = None
    address_space: int | None = None
    time: float = 0.0  # seconds since 1970
    newest_file: float = 0.0  # of the package: the clock cannot be behind it
    clock_rate: float = 1.0  # seconds of the calendar clock in a second of the monotonic one
    clock_source: str = ""
    clock_shift: str = ""  # what moves this process's clock


@dataclass(frozen=True)
class HubFacts:
    """Whether the hub answers; `asked` is false where no request was made."""

    asked: bool = False
    endpoint: str = "https://huggingface.co"
    seconds: float | None = None
    failure: str = ""
    has_token: bool = False


@dataclass(frozen=True)
class MachineFacts:
    """All of it. `versions` and `tested` are by package; `requires` are the ranges that this package declares."""

    system: SystemFacts = field(default_factory=SystemFacts)
    gpus: tuple[PresentGpu, ...] = ()
    smi: tuple[SmiGpu, ...] = ()
    smi_failure: str = ""
    sample: GPU | None = None  # of the first GPU, now
    torch: TorchFacts = field(default_factory=TorchFacts)
    answers: tuple[KnownAnswer, ...] = ()
    attention: Mapping[str, str | None] = field(default_factory=dict)  # backend to why it does not run
    attention_on: str = ""  # device and precision
    disks: tuple[DiskFacts, ...] = ()
    hub: HubFacts = field(default_factory=HubFacts)
    versions: Mapping[str, str] = field(default_factory=dict)
    tested: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)  # installed libraries that do not load, and why
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable_gpus(self) -> tuple[PresentGpu, ...]:
        """Those that should train: without the ones that are part of a CPU."""
        return tuple(gpu for gpu in self.gpus if not gpu.integrated)

    @property
    def memory_limit(self) -> int:
        """Bytes of memory that this process may use."""
        limit = self.system.memory_limit
        return self.system.memory if limit is None else min(limit, self.system.memory)
