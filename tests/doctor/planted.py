"""Machines with one fault each, stated as facts, and faults of a real machine, with the line that `doctor` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lora_trainer.doctor.examine import before
from lora_trainer.doctor.facts import (
    DiskFacts,
    HubFacts,
    KnownAnswer,
    MachineFacts,
    PresentGpu,
    SmiGpu,
    SystemFacts,
    TorchDevice,
    TorchFacts,
)
from lora_trainer.doctor.lines import Diagnosis, DoctorLine, plain_text
from lora_trainer.monitor.gpu import GPU, HEAT

GIB = 2**30
SYSTEM = SystemFacts(
    release="6.8",
    python=(3, 12, 4),
    cpus=16,
    cpus_available=16.0,
    cpus_busy=0.5,
    memory=64 * GIB,
    memory_available=60 * GIB,
    shared_memory=32 * GIB,
    open_files=4096,
    open_files_hard=4096,
    time=2e9,
    newest_file=1.9e9,
    clock_source="tsc",
)
RTX = TorchDevice("NVIDIA GeForce RTX 4090", 23.6, (8, 9))
CUDA = TorchFacts(
    version="2.13.0+cu130",
    build="cuda",
    toolkit="13.0",
    devices=(RTX,),
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
)
SMI = SmiGpu(RTX.name, "580.95.05", 24564.0, 12.0, True, 450.0, 450.0)
SAMPLE = GPU(utilization=0.0, memory=0.01, celsius=35.0, watts=20.0, watts_limit=450.0, clock=210.0, clock_most=3105.0)
DISK = DiskFacts("cache", "cache", 500 * 10**9, 10**12, 900e6, 2e9)
# A machine that is as it should be.
HEALTHY = MachineFacts(
    system=SYSTEM,
    gpus=(PresentGpu("NVIDIA", "/dev/nvidia0"),),
    smi=(SMI,),
    sample=SAMPLE,
    torch=CUDA,
    answers=tuple(
        KnownAnswer("cuda", dtype, operation, 1e-4, 8e-3)
        for dtype in ("float32", "bfloat16", "float16")
        for operation in ("matmul", "convolution", "attention")
    ),
    attention={"sdpa": None, "flash": None, "xformers": "xformers is not installed (pip install xformers)"},
    attention_on="cuda in bfloat16",
    disks=(DISK, replace(DISK, use="output", folder="runs")),
    hub=HubFacts(has_token=True),
    versions={"torch": "2.13.0+cu130", "diffusers": "0.42.1", "nvidia-ml-py": "13.615.71"},
    tested={"torch": "2.13.0", "diffusers": "0.42.1", "nvidia-ml-py": "13.615.71"},
    requires=("torch>=2.8,<3", "diffusers>=0.42,<0.43"),
)
CPU_BUILD = TorchFacts(version="2.13.0+cpu")
ROCM = TorchFacts("2.13.0+rocm6.4", build="rocm", toolkit="6.4", devices=(TorchDevice("AMD Radeon RX 7900 XTX", 24.0),))
XPU = TorchFacts("2.13.0+xpu", build="xpu", toolkit="20250301", devices=(TorchDevice("Intel(R) Arc(TM) A770", 15.9),))


def torch_with(**changes: object) -> Callable[[MachineFacts], MachineFacts]:
    return lambda facts: replace(facts, torch=replace(facts.torch, **changes))


def system_with(**changes: object) -> Callable[[MachineFacts], MachineFacts]:
    return lambda facts: replace(facts, system=replace(facts.system, **changes))


def smi_with(**changes: object) -> Callable[[MachineFacts], MachineFacts]:
    return lambda facts: replace(facts, smi=(replace(SMI, **changes),))


def facts_with(**changes: object) -> Callable[[MachineFacts], MachineFacts]:
    return lambda facts: replace(facts, **changes)


def disk_with(**changes: object) -> Callable[[MachineFacts], MachineFacts]:
    return lambda facts: replace(facts, disks=(replace(DISK, **changes), *facts.disks[1:]))


def variable(name: str, value: str) -> Callable[[MachineFacts], MachineFacts]:
    return lambda facts: replace(facts, environment={name: value})


def without_gpu(facts: MachineFacts, torch: TorchFacts, *gpus: PresentGpu, **changes: object) -> MachineFacts:
    """A machine whose torch sees what `torch` has, with these GPUs."""
    kept = replace(facts, torch=torch, gpus=gpus, smi=(), sample=None, versions={"torch": torch.version})
    return replace(kept, **changes)


NVIDIA = PresentGpu("NVIDIA", "/dev/nvidia0")
SLOWED = replace(SAMPLE, utilization=1.0, celsius=91.0, watts=300.0, clock=1400.0, reasons=HEAT)
# Fault: how the healthy machine is changed. Each gives one line that is no `ok`.
STATED: Mapping[str, Callable[[MachineFacts], MachineFacts]] = {
    "NVIDIA GPU, torch's CPU build": lambda facts: without_gpu(facts, CPU_BUILD, NVIDIA, smi=(SMI,)),
    "NVIDIA GPU without a driver": lambda facts: without_gpu(
        facts, replace(CUDA, devices=()), PresentGpu("NVIDIA", "PCI 0000:01:00.0", has_driver=False)
    ),
    "GPU hidden by a variable": lambda facts: without_gpu(
        facts,
        replace(CUDA, devices=()),
        NVIDIA,
        smi=(SMI,),
        environment={"CUDA_VISIBLE_DEVICES": "7"},
    ),
    "MIG without an instance": lambda facts: without_gpu(
        facts, replace(CUDA, devices=()), NVIDIA, smi=(replace(SMI, name="NVIDIA A100", has_mig=True),)
    ),
    "AMD GPU, torch's CUDA build": lambda facts: without_gpu(
        facts, replace(CUDA, devices=()), PresentGpu("AMD", "/dev/kfd")
    ),
    "Intel GPU, torch's XPU build": lambda facts: without_gpu(facts, XPU, PresentGpu("Intel", "/dev/dri/renderD128")),
    "driver too old for torch's CUDA": smi_with(driver="550.54.14"),
    "nvidia-smi fails": facts_with(
        smi=(), smi_failure="exit code 18: Failed to initialize NVML: Driver/library version mismatch"
    ),
    "GPU older than torch's build": torch_with(
        devices=(replace(RTX, name="NVIDIA GeForce GTX 1080", capability=(6, 1)),)
    ),
    "GPU newer than torch's build": torch_with(devices=(replace(RTX, name="a newer GPU", capability=(13, 0)),)),
    "GPU without bf16": torch_with(devices=(replace(RTX, name="NVIDIA T4", capability=(7, 5), has_bf16=False),)),
    "GPU throttled by heat": facts_with(sample=SLOWED),
    "power cap": smi_with(watts_limit=250.0),
    "persistence off": smi_with(has_persistence=False),
    "another program on the GPU": smi_with(memory_used=18000.0),
    "broken GPU memory": smi_with(ecc_errors=3.0),
    "wrong results": facts_with(
        answers=(*HEALTHY.answers[:4], KnownAnswer("cuda", "bfloat16", "convolution", 0.31, 6.25e-2))
    ),
    "results that are not numbers": facts_with(
        answers=(KnownAnswer("cuda", "float16", "attention", float("nan"), 8e-3),)
    ),
    "an operation that fails": facts_with(
        answers=(KnownAnswer("cuda", "float32", "matmul", failure="CUBLAS_STATUS_NOT_INITIALIZED"),)
    ),
    "attention that does not run": facts_with(
        attention={"sdpa": "sdpa does not run on cuda in bfloat16 at head size 40", "math": None}
    ),
    "attention with wrong gradients": facts_with(
        attention={"sdpa": None, "xformers": "xformers gives gradients that are 3.1% off, more than 0.8%"}
    ),
    "torch cannot be imported": lambda facts: replace(
        without_gpu(facts, TorchFacts(failure="libcudart.so.13: cannot open shared object file")),
        answers=(),
        attention={},
    ),
    "diffusers outside of its range": facts_with(versions=HEALTHY.versions | {"diffusers": "0.35.0"}),
    "a library that does not load": facts_with(broken={"xformers": "does not load (undefined symbol)"}),
    "another torch than tested": facts_with(versions=HEALTHY.versions | {"torch": "2.9.1"}),
    "old Python": system_with(python=(3, 10, 12)),
    "32-bit Python": system_with(bits=32),
    "container with 2 GiB": system_with(container="docker", memory_limit=2 * GIB),
    "container with half a CPU": system_with(container="kubernetes", cpus_available=0.5, cpus_busy=0.0),
    "other programs use the CPUs": system_with(cpus_busy=15.0),
    "little memory is free": system_with(memory_available=GIB),
    "docker's shared memory": system_with(container="docker", shared_memory=64 * 2**20),
    "few open files": system_with(open_files=512),
    "a limited address space": system_with(address_space=32 * GIB),
    "faketime": system_with(clock_shift="LD_PRELOAD=libfaketime.so.1"),
    "a clock in the past": system_with(time=1.5e9),
    "a virtual clock that runs fast": system_with(clock_rate=1.5),
    "a slow clock source": system_with(clock_source="acpi_pm"),
    "full disk": disk_with(free=200 * 10**6),
    "disk too small for the run": disk_with(needed=600 * 10**9),
    "slow disk": disk_with(read=4e6),
    "hub does not answer": facts_with(hub=HubFacts(asked=True, failure="timed out", has_token=True)),
    "more threads than CPUs": variable("OMP_NUM_THREADS", "64"),
    "memory pool of your own": variable("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128"),
    "TF32 overridden": variable("NVIDIA_TF32_OVERRIDE", "0"),
    "CUDA libraries of the system first": variable("LD_LIBRARY_PATH", "cuda-12.4/lib64"),
    "extensions built for other GPUs": variable("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX"),
    "NCCL without direct copies": lambda facts: replace(
        facts, torch=replace(CUDA, devices=(RTX, RTX)), smi=(SMI, SMI), environment={"NCCL_P2P_DISABLE": "1"}
    ),
}

# Faults of a real machine: how each is planted, and the line, with <folder> for the test's folder.
REAL = {
    "CUDA_LAUNCH_BLOCKING": (
        "CUDA_LAUNCH_BLOCKING=1",
        (
            "warning CUDA_LAUNCH_BLOCKING: 1, the CPU waits for every kernel, so the GPU idles in "
            "between (wanted: not set)"
        ),
    ),
    "CUDA_CACHE_DISABLE": (
        "CUDA_CACHE_DISABLE=1",
        (
            "warning CUDA_CACHE_DISABLE: 1, kernels for a GPU newer than torch's build are compiled again "
            "at each start, which takes minutes (wanted: not set)"
        ),
    ),
    "a pool setting that is none": (
        "PYTORCH_ALLOC_CONF=expandable_segments",
        (
            "error   PYTORCH_ALLOC_CONF: expandable_segments, torch refuses 'expandable_segments' without "
            "a value (wanted: not set)"
        ),
    ),
    "no temporary folder": (
        "TMPDIR names a file",
        "error   TMPDIR: <folder>/file, <folder>/file is no folder that can be written to (wanted: not set)",
    ),
    "cache folder inside a file": (
        "cache.dir=<folder>/file/cache",
        "error   cache disk: <folder>/file/cache: not a directory (wanted: a folder that can be written to)",
    ),
    "few open files (ulimit -n 200)": ("ulimit -n 200", "error   open files: 200 (wanted: 1024 or more)"),
    "small files only (ulimit -f)": (
        "ulimit -f 1024",
        "error   size of a file: at most 1.0 MB (wanted: no limit)",
    ),
    "a disk that refuses 8 MB": (
        "ulimit -f 1024",
        "error   output disk: runs: file too large (wanted: a folder that can be written to)",
    ),
    "a config of kohya": (
        "--config <folder>/kohya.toml",
        (
            "error   settings: --config <folder>/kohya.toml is a file of another trainer (kohya config). "
            "(wanted: settings that a run accepts)"
        ),
    ),
    "an attention backend that is missing": (
        "hardware.attention_backend=flash3",
        (
            "error   attention backend: hardware.attention_backend=flash3: flash3 is not installed (the folder hopper of "
            "FlashAttention's sources). (wanted: flash3)"
        ),
    ),
    "a changed LoRA file": (
        "one byte of cat.safetensors",
        "error   files: cat.safetensors: sshs_model_hash differs from its content (wanted: as it was written)",
    ),
    "a changed checkpoint": (
        "one byte of its adapter",
        (
            "error   files: checkpoints/step-000006: adapter.safetensors is not what was written: its checksum differs "
            "(wanted: as it was written)"
        ),
    ),
    "a LoRA file that is gone": (
        "cat.diffusers.safetensors deleted",
        "error   files: cat.diffusers.safetensors: is missing (wanted: as it was written)",
    ),
    "a record that is damaged": (
        "run.json cut off",
        "error   status: run.json is damaged or missing (wanted: a record)",
    ),
    "a run that was killed": (
        "status running, no process",
        "error   status: killed at step 6: the record says running, and no process trains here (wanted: a finished run)",
    ),
}


def faults_of(facts: MachineFacts) -> list[DoctorLine]:
    """The lines of a machine that are no `ok`."""
    return [line for line in before(facts) if line.level != "ok"]


def fault_table() -> str:
    """Every planted fault with the lines that `doctor` prints, as Markdown."""
    rows = ["| fault | planted by | line |", "|---|---|---|"]
    for fault, (by, line) in REAL.items():
        rows.append(f"| {fault} | {by} | {' '.join(line.split())} |")
    for fault, plant in STATED.items():
        lines = faults_of(plant(HEALTHY))
        shown = [" ".join(line.split()) for line in plain_text(Diagnosis((("before", tuple(lines)),)))[1:-1]]
        rows.append(f"| {fault} | facts | {'<br>'.join(shown)} |")
    return "\n".join(row.replace("<folder>", "FOLDER") for row in rows)
