"""Environment variables that change what a run does: one table for `doctor` and for docs/environment.md.

`judge` takes the variable's value and the facts of the machine, and returns what is wrong with it, or None.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from lora_trainer.core.launch import cpu_requested
from lora_trainer.core.quiet import SETTINGS as QUIET
from lora_trainer.doctor.facts import MachineFacts

Complaint = tuple[Literal["warning", "error"], str, str]  # level, what the value does, fix
Judge = Callable[[str, MachineFacts], Complaint | None]
# What lora-trainer sets when it starts, where you set nothing.
OURS: Mapping[str, str] = {**QUIET, "MKL_CBWR": "AUTO,STRICT", "GOMP_SPINCOUNT": "1000"}
GROUPS = {
    "GPUs": "Which GPUs a run sees, and how it starts.",
    "Finding faults": "Useful for finding a fault, slow otherwise.",
    "Memory of the GPU": "A run sets these by itself (`memory.expandable_segments`); what you set wins.",
    "Precision of the GPU": "They override `hardware.tf32`.",
    "Several GPUs (NCCL)": "NCCL finds the fastest way between GPUs by itself. Each of these closes a way; set one only for its reason.",
    "CPU": "Threads and the libraries that compute on a CPU.",
    "Compilation": "torch.compile and extensions.",
    "Hub and caches": "Where files come from and where they are kept.",
    "Libraries": "What other libraries print and load.",
}


@dataclass(frozen=True)
class Variable:
    """`does` is the effect, `when` the reason to set it, `ours` what lora-trainer sets unless you do.

    The value of a `secret` one is never shown.
    """

    group: str
    does: str
    when: str
    ours: str = ""
    judge: Judge | None = None
    secret: bool = False


def is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on", "y")


def on_is(text: str, fix: str) -> Judge:
    """A warning where the variable is on."""
    return lambda value, facts: ("warning", text, fix) if is_on(value) else None


def any_value(text: str, fix: str) -> Judge:
    """A warning wherever the variable is set to something."""
    return lambda value, facts: ("warning", text, fix) if value.strip() else None


def among_gpus(text: str, fix: str) -> Judge:
    """A warning where the variable is on and there are several GPUs."""

    def judge(value: str, facts: MachineFacts) -> Complaint | None:
        several = max(len(facts.torch.devices), len(facts.smi)) > 1
        return ("warning", text, fix) if is_on(value) and several else None

    return judge


def hides_all(name: str) -> Judge:
    """A warning where a list of GPUs names none."""

    def judge(value: str, facts: MachineFacts) -> Complaint | None:
        names_some = bool(value.strip()) and not value.strip().startswith("-")
        if names_some or cpu_requested(facts.environment):
            return None
        return "warning", "it hides every GPU", f"unset {name}, or ACCELERATE_USE_CPU=true where the CPU is wanted"

    return judge


def judge_threads(value: str, facts: MachineFacts) -> Complaint | None:
    """Threads that are no number, or more than the CPUs."""
    cpus = facts.system.cpus_available
    if not value.isdigit() or not int(value):
        return "warning", "it is no number of threads, and is ignored", f"set it to {max(1, min(8, int(cpus)))}"
    if int(value) > max(cpus, 1.0):
        return "warning", f"threads wait for each other on {cpus:g} CPUs", f"set it to {max(1, int(cpus))}, or unset it"
    return None


def judge_allocator(value: str, facts: MachineFacts) -> Complaint | None:
    """Settings of torch's memory pool that are no settings, or lack what a run would set."""
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if wrong := [part for part in parts if ":" not in part]:
        return "error", f"torch refuses {wrong[0]!r} without a value", "write it as name:value, or unset it"
    if "expandable_segments:True" not in value.replace(" ", "") and facts.system.system == "Linux":
        return (
            "warning",
            "it replaces what a run sets, and the pool does not grow in place",
            "add expandable_segments:True, or unset it",
        )
    return None


def judge_architectures(value: str, facts: MachineFacts) -> Complaint | None:
    """A list for building extensions that has no code for a GPU of this machine."""
    listed = {part.removesuffix("+PTX") for part in value.replace(";", " ").split()}
    for device in facts.torch.devices:
        if device.capability is not None and (own := "{}.{}".format(*device.capability)) not in listed:
            fix = f"add {own} before you build an extension; it changes nothing else"
            return "warning", f"extensions built with it have no code for {device.name} ({own})", fix
    return None


def judge_libraries(value: str, facts: MachineFacts) -> Complaint | None:
    """Folders of CUDA that are searched before those that torch brings."""
    if facts.torch.build != "cuda" or "cuda" not in value.lower():
        return None
    return (
        "warning",
        "libraries of another CUDA may be loaded in place of those that torch brings",
        "unset LD_LIBRARY_PATH for training, if errors name cuBLAS, cuDNN or nvrtc",
    )


def judge_folder(value: str, facts: MachineFacts) -> Complaint | None:
    """A folder that cannot be written to; one that does not exist yet is created."""
    place = os.path.abspath(os.path.expanduser(value))
    while not os.path.exists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    if os.path.isdir(place) and os.access(place, os.W_OK):
        return None
    return "error", f"{place} is no folder that can be written to", "name a folder of yours, or unset it"


UNSET_IT = "unset it, unless you are finding a fault"
VARIABLES: Mapping[str, Variable] = {
    "CUDA_VISIBLE_DEVICES": Variable(
        "GPUs",
        "the NVIDIA GPUs that a process sees, by number or UUID; empty or -1 hides all of them",
        "to choose a GPU, or a MIG instance by its UUID",
        "in batches with several workers: one GPU for each",
        hides_all("CUDA_VISIBLE_DEVICES"),
    ),
    "CUDA_DEVICE_ORDER": Variable(
        "GPUs", "numbers GPUs by speed, or with PCI_BUS_ID as nvidia-smi does", "with GPUs of several kinds: PCI_BUS_ID"
    ),
    "HIP_VISIBLE_DEVICES": Variable(
        "GPUs",
        "the same as CUDA_VISIBLE_DEVICES for ROCm",
        "to choose an AMD GPU",
        judge=hides_all("HIP_VISIBLE_DEVICES"),
    ),
    "HSA_OVERRIDE_GFX_VERSION": Variable(
        "GPUs",
        "makes ROCm run an AMD GPU with the code of another one",
        "for an AMD GPU that ROCm does not list; wrong results are possible",
        judge=any_value(
            "the GPU runs code for another one", "compare the known answers of this list; unset it if not needed"
        ),
    ),
    "ZE_AFFINITY_MASK": Variable("GPUs", "the Intel GPUs that a process sees", "to choose an Intel GPU"),
    "ACCELERATE_USE_CPU": Variable(
        "GPUs",
        "trains on the CPU, whatever GPU there is; `accelerate launch` sets it by `use_cpu` of its config",
        "to train on the CPU on purpose: then an unused GPU is no error",
    ),
    "ACCELERATE_MIXED_PRECISION": Variable(
        "GPUs",
        "is `memory.weight_dtype`, above the presets; `accelerate launch` sets it, and others like it",
        "to keep a precision in accelerate's config",
    ),
    "CUDA_LAUNCH_BLOCKING": Variable(
        "Finding faults",
        "the CPU waits for every kernel, so a traceback names the right line; the GPU idles in between",
        "to find which operation raises a CUDA error",
        judge=on_is("the CPU waits for every kernel, so the GPU idles in between", UNSET_IT),
    ),
    "CUDA_CACHE_DISABLE": Variable(
        "Finding faults",
        "kernels that the driver compiles for the GPU are not kept, and are compiled again at each start",
        "almost never: to rule out a damaged cache",
        judge=on_is(
            "kernels for a GPU newer than torch's build are compiled again at each start, which takes minutes", UNSET_IT
        ),
    ),
    "TORCH_SHOW_CPP_STACKTRACES": Variable(
        "Finding faults", "errors of torch show the stack of its C++ code", "for a report to PyTorch"
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Variable(
        "Finding faults",
        "torch asks the driver for each tensor's memory, many times slower; the run's memory limit does not apply",
        "for compute-sanitizer",
        judge=on_is("each tensor is allocated by the driver, and the run's memory limit does not apply", UNSET_IT),
    ),
    **{
        name: Variable(
            "Memory of the GPU",
            text,
            "rarely; `memory.expandable_segments` is the setting for it",
            ours,
            judge_allocator,
        )
        for name, text, ours in (
            ("PYTORCH_ALLOC_CONF", "settings of torch's memory pool", "`expandable_segments:True` on Linux with a GPU"),
            ("PYTORCH_CUDA_ALLOC_CONF", "the older name of PYTORCH_ALLOC_CONF", ""),
            ("PYTORCH_HIP_ALLOC_CONF", "the older name of PYTORCH_ALLOC_CONF for ROCm", ""),
        )
    },
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": Variable(
        "Precision of the GPU",
        "turns TF32 on for fp32 matmuls when torch starts",
        "never here: set `hardware.tf32`",
        judge=on_is("hardware.tf32=false is not what the first matmuls use", "unset it, and set hardware.tf32"),
    ),
    "NVIDIA_TF32_OVERRIDE": Variable(
        "Precision of the GPU",
        "0 turns TF32 off in every library, whatever a program sets",
        "to rule out TF32 as the reason of a difference",
        judge=any_value("hardware.tf32 has no effect", "unset it, and set hardware.tf32"),
    ),
    "CUBLAS_WORKSPACE_CONFIG": Variable(
        "Precision of the GPU",
        "the workspace of cuBLAS; of a fixed size it sums in one order",
        "for deterministic runs",
        "`:4096:8` with `train.deterministic=true`",
    ),
    "NCCL_P2P_DISABLE": Variable(
        "Several GPUs (NCCL)",
        "GPUs do not copy to each other directly, but through system memory",
        "if processes hang at the first step: GPUs without NVLink behind an IOMMU, or a virtual machine",
        judge=among_gpus(
            "GPUs copy through system memory, which is slower", "unset it, unless processes hang without it"
        ),
    ),
    "NCCL_SHM_DISABLE": Variable(
        "Several GPUs (NCCL)",
        "processes of one machine exchange through the network instead of shared memory",
        "in a container whose shared memory cannot be enlarged",
        judge=among_gpus("processes exchange through the network", "unset it, and enlarge /dev/shm"),
    ),
    "NCCL_IB_DISABLE": Variable(
        "Several GPUs (NCCL)",
        "machines exchange over TCP and not over InfiniBand",
        "if InfiniBand is there but not usable; it changes nothing on one machine",
        judge=among_gpus("machines exchange over TCP", "unset it where InfiniBand works"),
    ),
    "NCCL_SOCKET_IFNAME": Variable(
        "Several GPUs (NCCL)",
        "the network interface between machines",
        "if processes on several machines do not find each other",
    ),
    "GLOO_SOCKET_IFNAME": Variable(
        "Several GPUs (NCCL)",
        "the network interface between machines, for processes on CPUs",
        "if processes on several machines do not find each other",
        "`lo` on Linux, where all processes are on one machine",
    ),
    "NCCL_DEBUG": Variable(
        "Several GPUs (NCCL)",
        "INFO prints the ways that NCCL found, a hundred lines for each process",
        "to see why several GPUs are slow or hang",
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Variable(
        "Several GPUs (NCCL)",
        "0 lets processes wait forever for one that failed",
        "never",
        judge=lambda value, facts: (
            None if value.strip() != "0" else ("warning", "processes wait forever for one that failed", "unset it")
        ),
    ),
    "OMP_NUM_THREADS": Variable(
        "CPU",
        "threads that compute on the CPU, where `hardware.threads` is not set",
        "with several runs on one machine: CPUs divided by runs",
        "in the processes that decode images, and in batches with several workers: their share",
        judge_threads,
    ),
    "MKL_NUM_THREADS": Variable(
        "CPU", "the same as OMP_NUM_THREADS, where that is not set", "rarely", judge=judge_threads
    ),
    "OMP_WAIT_POLICY": Variable(
        "CPU",
        "whether threads that wait use their CPU (ACTIVE) or sleep (PASSIVE)",
        "rarely: PASSIVE makes small steps take twice as long, ACTIVE slows other processes",
    ),
    "GOMP_SPINCOUNT": Variable(
        "CPU",
        "how long waiting threads use their CPU before they sleep",
        "rarely",
        "`1000`, unless OMP_WAIT_POLICY is set",
    ),
    "GOMP_CPU_AFFINITY": Variable(
        "CPU",
        "binds threads to CPUs",
        "never with several runs: all would use the same CPUs",
        judge=any_value(
            "several runs would share these CPUs and leave the others idle", "unset it; use taskset or hardware.threads"
        ),
    ),
    "KMP_AFFINITY": Variable(
        "CPU",
        "binds threads to CPUs, for Intel's OpenMP",
        "never with several runs: all would use the same CPUs",
        judge=any_value(
            "several runs would share these CPUs and leave the others idle", "unset it; use taskset or hardware.threads"
        ),
    ),
    "MKL_CBWR": Variable(
        "CPU",
        "how MKL rounds: its strict mode gives the same bits wherever operands start in memory",
        "never: without it a resumed run may differ in its last bits",
        "`AUTO,STRICT`",
        lambda value, facts: (
            None
            if value == OURS["MKL_CBWR"]
            else ("warning", "a resumed run on a CPU may round differently", "unset it")
        ),
    ),
    "ATEN_CPU_CAPABILITY": Variable(
        "CPU",
        "the instructions that torch's own code uses (default, avx2, avx512)",
        "to compare machines; slower, and rounds differently",
        judge=any_value("torch does not use all instructions of this CPU", "unset it"),
    ),
    "ONEDNN_MAX_CPU_ISA": Variable(
        "CPU",
        "the instructions that oneDNN uses, for convolutions and matmuls",
        "to compare machines; slower, and rounds differently",
        judge=any_value("oneDNN does not use all instructions of this CPU", "unset it"),
    ),
    "ONEDNN_DEFAULT_FPMATH_MODE": Variable(
        "CPU",
        "BF16 or ANY lets oneDNN compute fp32 in less precision",
        "never for training",
        judge=lambda value, facts: (
            None
            if value.strip().upper() in ("", "STRICT")
            else ("warning", "fp32 on the CPU is computed in less precision", "unset it")
        ),
    ),
    "ONEDNN_VERBOSE": Variable(
        "CPU",
        "prints a line for each operation of oneDNN",
        "to see which operations it computes",
        judge=lambda value, facts: (
            None
            if value.strip() in ("", "0", "none")
            else ("warning", "it prints thousands of lines for each step, which takes time", UNSET_IT)
        ),
    ),
    "TORCH_CUDA_ARCH_LIST": Variable(
        "Compilation",
        "the GPUs for which extensions are built from source, such as flash-attn; nothing when a run starts",
        "before you build an extension: the capability of your GPU, such as 8.9",
        judge=judge_architectures,
    ),
    "TORCHDYNAMO_DISABLE": Variable(
        "Compilation",
        "torch.compile compiles nothing",
        "to rule out the compiler as the reason of an error",
        judge=on_is("compile.enabled has no effect", UNSET_IT),
    ),
    "TORCH_COMPILE_DISABLE": Variable(
        "Compilation",
        "torch.compile compiles nothing",
        "to rule out the compiler as the reason of an error",
        judge=on_is("compile.enabled has no effect", UNSET_IT),
    ),
    "TORCHINDUCTOR_CACHE_DIR": Variable(
        "Compilation",
        "where compiled blocks are kept",
        "if the home folder is slow or small",
        "a folder `compiled` in the cache folder",
        judge_folder,
    ),
    "CUDA_CACHE_PATH": Variable(
        "Compilation",
        "where the driver keeps kernels that it compiled",
        "if the home folder is read-only",
        judge=judge_folder,
    ),
    "LORA_TRAINER_CACHE": Variable(
        "Hub and caches",
        "the folder of caches: latents, text embeddings, laid-out checkpoints, compiled blocks",
        "to keep them on a large, fast disk; `cache.dir` sets it for one run",
        judge=judge_folder,
    ),
    "XDG_CACHE_HOME": Variable(
        "Hub and caches",
        "the folder of all programs' caches on Linux",
        "to keep them on another disk",
        judge=judge_folder,
    ),
    "TMPDIR": Variable(
        "Hub and caches", "the folder of temporary files", "if the usual one is small", judge=judge_folder
    ),
    "HF_HOME": Variable(
        "Hub and caches",
        "the folder of models from the Hugging Face hub, and of your token",
        "to keep models on another disk",
        judge=judge_folder,
    ),
    "HF_HUB_CACHE": Variable(
        "Hub and caches",
        "the folder of models from the hub, without your token",
        "to keep models on another disk",
        judge=judge_folder,
    ),
    "HF_HUB_OFFLINE": Variable(
        "Hub and caches",
        "no request to the hub; models must be in its folder",
        "without a network",
        "`1` with `--offline`",
    ),
    "TRANSFORMERS_OFFLINE": Variable(
        "Hub and caches", "the older name of HF_HUB_OFFLINE", "without a network", "`1` with `--offline`"
    ),
    "HF_ENDPOINT": Variable("Hub and caches", "another address of the hub", "for a mirror"),
    "HF_TOKEN": Variable(
        "Hub and caches",
        "your access to private and gated models",
        "in containers; else use `hf auth login`",
        secret=True,
    ),
    "HF_HUB_ENABLE_HF_TRANSFER": Variable(
        "Hub and caches",
        "nothing any more",
        "never; HF_XET_HIGH_PERFORMANCE=1 replaces it",
        judge=on_is("it has no effect any more", "unset it, and set HF_XET_HIGH_PERFORMANCE=1 if you want it"),
    ),
    "TRANSFORMERS_CACHE": Variable(
        "Hub and caches",
        "nothing any more",
        "never; HF_HOME replaces it",
        judge=any_value("transformers does not read it any more: models go to another folder", "set HF_HOME instead"),
    ),
    "HF_HUB_DISABLE_XET": Variable(
        "Hub and caches",
        "downloads from the hub by plain HTTP, which resume at the last byte after the command was ended; Xet is faster",
        "on a connection that breaks for long",
    ),
    "COMFYUI_PATH": Variable(
        "Hub and caches",
        "the folder of ComfyUI, for `models` and `--copy-to comfyui`",
        "where it is at none of the usual places",
        judge=judge_folder,
    ),
    "FORGE_PATH": Variable(
        "Hub and caches",
        "the folder of Forge or A1111, for `models` and `--copy-to forge`",
        "where it is at none of the usual places",
        judge=judge_folder,
    ),
    "HTTPS_PROXY": Variable(
        "Hub and caches", "the proxy for requests to the hub", "where the network requires one", secret=True
    ),
    "TOKENIZERS_PARALLELISM": Variable(
        "Libraries",
        "whether the tokenizers library uses threads; on, it warns after each fork and may deadlock there",
        "never: captions are encoded once",
        f"`{QUIET['TOKENIZERS_PARALLELISM']}`",
        on_is("it may deadlock in forked processes, and gains nothing here", "unset it"),
    ),
    "TRANSFORMERS_VERBOSITY": Variable(
        "Libraries", "what transformers prints", "to see more", f"`{QUIET['TRANSFORMERS_VERBOSITY']}`"
    ),
    "DIFFUSERS_VERBOSITY": Variable(
        "Libraries", "what diffusers prints", "to see more", f"`{QUIET['DIFFUSERS_VERBOSITY']}`"
    ),
    "HF_HUB_DISABLE_PROGRESS_BARS": Variable(
        "Libraries", "the hub library prints no bars", "0 to see them", f"`{QUIET['HF_HUB_DISABLE_PROGRESS_BARS']}`"
    ),
    "HF_HUB_DISABLE_TELEMETRY": Variable(
        "Libraries",
        "the hub library reports nothing about its use",
        "leave it",
        f"`{QUIET['HF_HUB_DISABLE_TELEMETRY']}`",
    ),
    "TF_CPP_MIN_LOG_LEVEL": Variable(
        "Libraries", "what TensorFlow prints, if TensorBoard loads it", "leave it", f"`{QUIET['TF_CPP_MIN_LOG_LEVEL']}`"
    ),
    "LD_PRELOAD": Variable(
        "Libraries",
        "libraries that are loaded before all others, such as another malloc",
        "rarely",
    ),
    "LD_LIBRARY_PATH": Variable(
        "Libraries",
        "folders that are searched for libraries first",
        "never for torch: it brings its own",
        judge=judge_libraries,
    ),
    "PYTHONPATH": Variable(
        "Libraries", "folders that Python searches for packages first", "rarely: it may hide an installed version"
    ),
    "PYTHONDONTWRITEBYTECODE": Variable(
        "Libraries",
        "Python compiles every module again at each start",
        "never here",
        judge=on_is("each start takes seconds longer", "unset it"),
    ),
}


def environment_page() -> str:
    """The tables of docs/environment.md."""
    parts = []
    for group, about in GROUPS.items():
        rows = [(name, each) for name, each in VARIABLES.items() if each.group == group]
        lines = [f"## {group}", about, "", "| variable | what it does | when to set it | what lora-trainer sets |"]
        lines += ["|---|---|---|---|"]
        lines += [f"| `{name}` | {each.does} | {each.when} | {each.ours or 'nothing'} |" for name, each in rows]
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)
