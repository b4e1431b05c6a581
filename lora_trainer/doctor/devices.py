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
    toolkit = f" {torch.toolkit}" if torch.toolkit else ""
    on_cpu = f", {torch.instructions} on the CPU" if torch.instructions else ""
    yield ok("torch", f"{torch.version}, built for {NAMES[torch.build]}{toolkit}{on_cpu}")
    if not torch.has_onednn:
        yield warning("oneDNN", "torch was built without it", "oneDNN", "install torch from PyPI or pytorch.org")


def gpu_in_use(facts: MachineFacts) -> Lines:
    """A GPU that is present and unused is an error, unless the CPU was requested."""
    torch, present = facts.torch, facts.usable_gpus
    if torch.failure:
        return
    if cpu_requested(facts.environment):
        value = facts.environment[CPU_VARIABLE]
        there = f"; {present[0].vendor} GPU unused on purpose" if present else ""
        yield ok("device", f"the CPU, as {CPU_VARIABLE}={value} requests{there}")
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
    torch, there = facts.torch, f"{gpu.vendor} GPU ({gpu.found_in})"
    wanted = "torch uses the GPU"
    if not gpu.has_driver:
        fix = f"install {gpu.vendor}'s driver; in a container, start it with the GPU (docker run --gpus all)"
        return f"{there} without the device files of a driver", wanted, f"{fix}. Or {ON_CPU}"
    build = BUILDS[gpu.vendor]
    if torch.build != build:
        found = f"{there}, and torch {torch.version} is built for {NAMES[torch.build]}"
        if build not in TRAINED_ON:
            return found, wanted, f"this program trains on GPUs of NVIDIA and AMD; {ON_CPU}"
        return found, wanted, f"{install_command(facts, build)}. Or {ON_CPU}"
    hidden = [name for name in HIDING[gpu.vendor] if name in facts.environment]
    if hidden:
        named = f"{hidden[0]}={facts.environment[hidden[0]]!r}"
        return f"{there}, and torch sees none: {named}", wanted, f"unset {hidden[0]}, or {ON_CPU}"
    if any(each.has_mig for each in facts.smi):
        fix = "create an instance, such as sudo nvidia-smi mig -cgi 19 -C, or turn MIG off: sudo nvidia-smi -mig 0"
        return f"{there} in MIG mode, and torch sees no instance", wanted, fix
    why = f": {torch.complaint}" if torch.complaint else ""
    fix = (
        "see the line about the driver, and run nvidia-smi"
        if gpu.vendor == "NVIDIA"
        else "run rocminfo; your user must be in the groups video and render"
    )
    return f"{there}, and torch sees none{why}", wanted, fix


def install_command(facts: MachineFacts, build: Build) -> str:
    """How to install torch for a GPU: for NVIDIA's the build that its driver runs."""
    if build != "cuda":
        return "install torch for ROCm by the command of https://pytorch.org/get-started"
    versions = [int(number[0]) for gpu in facts.smi if (number := re.match(r"\d+", gpu.driver))]
    cuda = next((cuda for cuda in INDEXES if all(version >= LEAST_DRIVER[cuda] for version in versions)), min(INDEXES))
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
    for version in dict.fromkeys(gpu.driver for gpu in facts.smi):
        major = re.match(r"\d+", facts.torch.toolkit if facts.torch.build == "cuda" else "")
        least = LEAST_DRIVER.get(int(major[0])) if major else None
        number = re.match(r"\d+", version)
        if least is not None and number and int(number[0]) < least:
            fix = f"install a driver of {least} or newer, or a torch for CUDA {int(major[0]) - 1 if major else ''}"
            yield error(
                "driver", f"{version}, and torch is built for CUDA {facts.torch.toolkit}", f"{least} or newer", fix
            )
        else:
            wanted = f"{least} or newer" if least is not None else ""
            yield ok("driver", f"{version}{f', CUDA {facts.torch.toolkit} of torch needs {wanted}' if wanted else ''}")


def architectures(facts: MachineFacts) -> Lines:
    """Whether torch has code for the GPU: for its major version, or code that the driver compiles."""
    listed = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in facts.torch.architectures]
    known = [(each[1], int(each[2]), int(each[3])) for each in listed if each]
    for device in facts.torch.devices:
        if device.capability is None or not known:
            continue
        major, minor = device.capability
        name = f"{device.name}: {major}.{minor}"
        if any(kind == "sm" and have == major and of <= minor for kind, have, of in known):
            yield ok("GPU code", f"{name}, in torch's build")
        elif any(kind == "compute" and (have, of) <= (major, minor) for kind, have, of in known):
            fix = "install a torch that lists the GPU, from https://pytorch.org"
            yield warning("GPU code", f"{name} is compiled by the driver at the first start", "in torch's build", fix)
        else:
            newest = "{}.{}".format(*max((have, of) for _, have, of in known))
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
    for device in facts.torch.devices if facts.torch.build in TRAINED_ON else ():
        if device.has_bf16:
            yield ok("bf16", f"{device.name} computes in bf16")
        else:
            fix = "nothing: runs use fp16 with a loss scaler, as with memory.weight_dtype=fp16"
            yield warning("bf16", f"{device.name} has no bf16 units", "bf16", fix)


def right_answers(facts: MachineFacts) -> Lines:
    """Known answers, a line for each device and precision."""
    for (device, dtype), group in groupby(facts.answers, key=lambda each: (each.device, each.dtype)):
        answers = list(group)
        name, wrong = f"{dtype} on {device}", [each for each in answers if not each.right]
        if not wrong:
            worst = max(answers, key=lambda each: each.off / each.allowed)
            yield ok(name, f"{', '.join(each.operation for each in answers)}: at most {worst.off:.1e} off")
        for each in wrong:
            if each.failure:
                state = f"{each.operation} fails: {each.failure}"
                required = dtype == "float32" or device != "cpu"
                line = error if required else warning
                yield line(name, state, "it runs", "use another precision, or install another torch")
            else:
                state = f"{each.operation} is {each.off:.1e} off"
                fix = "do not train here: install another torch and driver, check the memory and unset overrides such as HSA_OVERRIDE_GFX_VERSION"
                yield error(name, state, f"at most {each.allowed:.1e}", fix)


def attention_backends(facts: MachineFacts) -> Lines:
    """Which backends run forward and backward; torch's own choice must."""
    if not facts.attention:
        return
    running = [name for name, failure in facts.attention.items() if failure is None]
    failing = {name: failure for name, failure in facts.attention.items() if failure is not None}
    if facts.attention.get("sdpa") is not None:
        yield error(
            "attention",
            str(facts.attention["sdpa"]),
            "torch's own attention runs forward and backward",
            "set hardware.attention_backend=math, or install another torch",
        )
        return
    wrong = {name: failure for name, failure in failing.items() if WRONG_VALUES in failure}
    absent = [name for name, failure in failing.items() if NOT_INSTALLED in failure]
    others = [name for name in failing if name not in wrong and name not in absent]
    rest = f"; do not run here: {', '.join(others)}" if others else ""
    rest += f"; not installed: {', '.join(absent)}" if absent else ""
    yield ok("attention", f"forward and backward on {facts.attention_on}: {', '.join(running)}{rest}")
    for name, failure in wrong.items():
        fix = f"do not set hardware.attention_backend={name}; install another version of it"
        yield warning("attention", failure, "right values and gradients", fix)
