"""Checks of torch's build, of GPUs and their drivers, and of what they compute."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

from lora_trainer.core.launch import CPU_VARIABLE, cpu_requested
from lora_trainer.doctor.facts import BUILDS, Build, MachineFacts, PresentGpu, Vendor
from lora_trainer.doctor.lines import Lines, error, ok, warning

# The least driver for every minor version of a CUDA, by NVIDIA's table of minor version compatibility.
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
TRAINED_ON = ("cuda", "rocm")  # builds whose GPUs this program trains on
NAMES = {"cpu": "CPU only", "cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU (Intel)", "mps": "MPS (Apple)"}
HIDING: Mapping[Vendor, tuple[str, ...]] = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),  # ROCm reads both
    "Intel": ("ZE_AFFINITY_MASK",),
    "Apple": (),
}
INDEXES = {13: "cu130", 12: "cu126"}  # of PyTorch's own packages, by the CUDA that a driver runs
WRONG_VALUES, NOT_INSTALLED = " gives ", " is not installed"  # in sentences of models/attention/probe.py
MUCH_MEMORY = 2048.0  # MiB in use by others
CAPPED = 0.9  # of the default power limit
ON_CPU = f"set {CPU_VARIABLE}=true to train on the CPU"


def torch_build(facts: MachineFacts) -> Lines:
    """Whether torch can be imported, and for what it was built."""
    torch = facts.torch
    if torch.failure:
        yield error(
            "torch",
            f"it cannot be imported: {torch.failure}",
            "a torch that can be imported",
            "install it again: pip install --force-reinstall torch",
        )
        return
    found = f"{torch.version}, built for {NAMES[torch.build]} {torch.toolkit}".rstrip()
    if torch.instructions:
        found += f", {torch.instructions} on the CPU"
    yield ok("torch", found)
    if not torch.has_onednn:
        yield warning("oneDNN", "torch was built without it", "oneDNN", "install torch from PyPI or pytorch.org")


def gpu_in_use(facts: MachineFacts) -> Lines:
    """A GPU that is present and unused is an error, unless the CPU was requested."""
    torch, present = facts.torch, facts.usable_gpus
    if torch.failure:
        return
    if cpu_requested(facts.environment):
        found = f"the CPU, as {CPU_VARIABLE}={facts.environment[CPU_VARIABLE]} requests"
        if present:
            found += f"; {present[0].vendor} GPU unused on purpose"
        yield ok("device", found)
    elif torch.devices and torch.build in TRAINED_ON:
        names = ", ".join(f"{each.name} ({each.gib:.1f} GiB)" if each.gib else each.name for each in torch.devices)
        yield ok("device", names)
        if len(present) > len(torch.devices):
            yield ok("hidden GPUs", f"torch sees {len(torch.devices)} of {len(present)}")
    elif torch.devices:
        yield error(
            "device",
            f"{torch.devices[0].name} by {NAMES[torch.build]}, which this program does not train on",
            "a GPU of NVIDIA or AMD",
            ON_CPU,
        )
    elif present:
        yield error("device", *unused(facts, present[0]))
    elif facts.gpus:
        gpu = facts.gpus[0]
        yield warning("device", f"the CPU; {gpu.vendor} graphics in the CPU ({gpu.found_in})", "a GPU", ON_CPU)
    else:
        yield ok("device", "the CPU; no GPU was found")


def unused(facts: MachineFacts, gpu: PresentGpu) -> tuple[str, str, str]:
    """Why torch does not see a GPU that is there: what was found, what is wanted, the fix."""
    torch, build, wanted = facts.torch, BUILDS[gpu.vendor], "torch uses the GPU"
    there = f"{gpu.vendor} GPU ({gpu.found_in})"
    if not gpu.has_driver:
        fix = f"install {gpu.vendor}'s driver; in a container, start it with the GPU (docker run --gpus all)"
        return f"{there} without the device files of a driver", wanted, f"{fix}. Or {ON_CPU}"
    if torch.build != build:
        found = f"{there}, and torch {torch.version} is built for {NAMES[torch.build]}"
        if build not in TRAINED_ON:
            return found, wanted, f"this program trains on GPUs of NVIDIA and AMD; {ON_CPU}"
        return found, wanted, f"{install_command(facts, build)}. Or {ON_CPU}"
    for name in HIDING[gpu.vendor]:
        if name in facts.environment:
            found = f"{there}, and torch sees none: {name}={facts.environment[name]!r}"
            return found, wanted, f"unset {name}, or {ON_CPU}"
    if any(each.has_mig for each in facts.smi):
        fix = "create an instance, such as sudo nvidia-smi mig -cgi 19 -C, or turn MIG off: sudo nvidia-smi -mig 0"
        return f"{there} in MIG mode, and torch sees no instance", wanted, fix
    found = f"{there}, and torch sees none"
    if torch.complaint:
        found += f": {torch.complaint}"
    if gpu.vendor == "NVIDIA":
        return found, wanted, "see the line about the driver, and run nvidia-smi"
    return found, wanted, "run rocminfo; your user must be in the groups video and render"


def version_number(version: str) -> int | None:
    """The first number of a driver's or a toolkit's version; None where it has none."""
    match = re.match(r"\d+", version)
    return int(match[0]) if match else None


def install_command(facts: MachineFacts, build: Build) -> str:
    """How to install torch for a GPU: for NVIDIA's the build that its driver runs."""
    if build != "cuda":
        return "install torch for ROCm by the command of https://pytorch.org/get-started"
    drivers = [version_number(gpu.driver) for gpu in facts.smi]
    oldest = min((number for number in drivers if number is not None), default=max(LEAST_DRIVER.values()))
    cuda = next((cuda for cuda in INDEXES if oldest >= LEAST_DRIVER[cuda]), min(INDEXES))
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{INDEXES[cuda]}"


def driver(facts: MachineFacts) -> Lines:
    """The NVIDIA driver against the CUDA that torch was built for."""
    nvidia = any(gpu.vendor == "NVIDIA" and gpu.has_driver for gpu in facts.gpus)
    if facts.smi_failure:
        fix = "restart the machine after an update of the driver; in a container, start it with the GPU"
        yield error("driver", f"nvidia-smi fails: {facts.smi_failure}", "nvidia-smi answers", fix)
    elif not facts.smi and nvidia:
        yield warning(
            "driver", "nvidia-smi is not installed, so its version is not known", "nvidia-smi", "install nvidia-utils"
        )
    cuda = version_number(facts.torch.toolkit) if facts.torch.build == "cuda" else None
    least = LEAST_DRIVER.get(cuda or 0)
    for version in dict.fromkeys(gpu.driver for gpu in facts.smi):
        number = version_number(version)
        if cuda is None or least is None:
            yield ok("driver", version)
        elif number is not None and number < least:
            fix = f"install a driver of {least} or newer, or a torch for CUDA {cuda - 1}"
            found = f"{version}, and torch is built for CUDA {facts.torch.toolkit}"
            yield error("driver", found, f"{least} or newer", fix)
        else:
            yield ok("driver", f"{version}, CUDA {facts.torch.toolkit} of torch needs {least} or newer")


def architectures(facts: MachineFacts) -> Lines:
    """Whether torch has code for the GPU: for its major version, or code that the driver compiles."""
    listed = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in facts.torch.architectures]
    known = [(match[1], (int(match[2]), int(match[3]))) for match in listed if match]
    for device in facts.torch.devices:
        capability = device.capability
        if capability is None or not known:
            continue
        name = "{}: {}.{}".format(device.name, *capability)
        # Code runs on its own version and those up to it: as it is within a major version, else where the driver compiles it.
        usable = [(kind, version) for kind, version in known if version <= capability]
        if any(kind == "sm" and version[0] == capability[0] for kind, version in usable):
            yield ok("GPU code", f"{name}, in torch's build")
        elif any(kind == "compute" for kind, _ in usable):
            fix = "install a torch that lists the GPU, from https://pytorch.org"
            yield warning("GPU code", f"{name} is compiled by the driver at the first start", "in torch's build", fix)
        else:
            newest = "{}.{}".format(*max(version for _, version in known))
            fix = "install another torch (https://pytorch.org): a newer one for a newer GPU, one of CUDA 12.6 for an old one"
            yield error(
                "GPU code", f"{name}, and torch's build has none for it (up to {newest})", "code for the GPU", fix
            )


def gpu_condition(facts: MachineFacts) -> Lines:
    """Persistence, power cap, memory of others, MIG and errors of memory, as nvidia-smi reports them."""
    for gpu in facts.smi:
        if gpu.has_persistence is False and facts.system.system == "Linux" and not facts.system.is_wsl:
            yield warning(
                "persistence", f"{gpu.name}: off, so the driver loads at each start", "on", "sudo nvidia-smi -pm 1"
            )
        if gpu.watts_limit and gpu.watts_default and gpu.watts_limit < CAPPED * gpu.watts_default:
            found = f"{gpu.name}: {gpu.watts_limit:.0f} W of {gpu.watts_default:.0f} W"
            yield warning(
                "power cap",
                found,
                "the default",
                f"sudo nvidia-smi -pl {gpu.watts_default:.0f}, if it is cooled for it",
            )
        elif gpu.watts_limit:
            yield ok("power cap", f"{gpu.name}: {gpu.watts_limit:.0f} W")
        if gpu.has_mig:
            yield ok("MIG", f"{gpu.name}: on; a process uses one instance, chosen by its UUID in CUDA_VISIBLE_DEVICES")
        if gpu.memory and gpu.memory_used is not None and gpu.memory_used > MUCH_MEMORY:
            found = f"{gpu.name}: {gpu.memory_used / 1024:.1f} of {gpu.memory / 1024:.1f} GiB are in use"
            yield warning("GPU memory", found, "free", "close other programs on the GPU (nvidia-smi lists them)")
        if gpu.ecc_errors:
            found = f"{gpu.name}: {gpu.ecc_errors:.0f} errors of memory that could not be corrected"
            yield error("GPU memory errors", found, "none", "restart the machine; if they return, replace the GPU")
    if facts.sample is not None:
        used = f"{facts.sample.celsius:.0f} degrees, {facts.sample.utilization:.0%} in use"
        if facts.sample.throttled:
            yield warning("throttling", facts.sample.throttled, "full clocks", "see docs/watching.md")
        else:
            yield ok("throttling", f"none ({used})")
    elif facts.torch.build == "cuda" and facts.torch.devices and "nvidia-ml-py" not in facts.versions:
        fix = "pip install 'lora-trainer[gpu]'"
        yield warning("throttling", "not known: nvidia-ml-py is not installed", "nvidia-ml-py", fix)


def precisions(facts: MachineFacts) -> Lines:
    """Whether the GPU computes in bf16; a run uses fp16 with a loss scaler where it does not."""
    if facts.torch.build not in TRAINED_ON:
        return
    for device in facts.torch.devices:
        if device.has_bf16:
            yield ok("bf16", f"{device.name} computes in bf16")
        else:
            fix = "nothing: runs use fp16 with a loss scaler, as with memory.weight_dtype=fp16"
            yield warning("bf16", f"{device.name} has no bf16 units", "bf16", fix)


def right_answers(facts: MachineFacts) -> Lines:
    """Known answers, a line for each device and precision."""
    for (device, dtype), group in groupby(facts.answers, key=lambda each: (each.device, each.dtype)):
        name, answers = f"{dtype} on {device}", list(group)
        if all(answer.right for answer in answers):
            worst = max(answers, key=lambda answer: answer.off / answer.allowed)
            operations = ", ".join(answer.operation for answer in answers)
            yield ok(name, f"{operations}: at most {worst.off:.1e} off")
        for answer in answers:
            if answer.failure:
                line = error if dtype == "float32" or device != "cpu" else warning
                fix = "use another precision, or install another torch"
                yield line(name, f"{answer.operation} fails: {answer.failure}", "it runs", fix)
            elif not answer.right:
                found = f"{answer.operation} is {answer.off:.1e} off"
                fix = "do not train here: install another torch and driver, check the memory and unset overrides such as HSA_OVERRIDE_GFX_VERSION"
                yield error(name, found, f"at most {answer.allowed:.1e}", fix)


def attention_backends(facts: MachineFacts) -> Lines:
    """Which backends run forward and backward; torch's own choice must."""
    if not facts.attention:
        return
    failures = {name: failure for name, failure in facts.attention.items() if failure is not None}
    if "sdpa" in failures:
        fix = "set hardware.attention_backend=math, or install another torch"
        yield error("attention", failures["sdpa"], "torch's own attention runs forward and backward", fix)
        return
    wrong = {name: failure for name, failure in failures.items() if WRONG_VALUES in failure}
    absent = [name for name, failure in failures.items() if NOT_INSTALLED in failure]
    others = [name for name in failures if name not in wrong and name not in absent]
    running = [name for name in facts.attention if name not in failures]
    found = f"forward and backward on {facts.attention_on}: {', '.join(running)}"
    if others:
        found += f"; do not run here: {', '.join(others)}"
    if absent:
        found += f"; not installed: {', '.join(absent)}"
    yield ok("attention", found)
    for name, failure in wrong.items():
        fix = f"do not set hardware.attention_backend={name}; install another version of it"
        yield warning("attention", failure, "right values and gradients", fix)
