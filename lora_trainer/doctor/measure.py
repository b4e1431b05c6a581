"""Measure this machine: what torch sees and computes, which attention runs, how fast the disks are, if the hub answers."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.disk import nearest_folder
from lora_trainer.core.errors import first_line
from lora_trainer.core.hardware import trim_heap
from lora_trainer.core.io import flush_file
from lora_trainer.doctor.facts import Build, DiskFacts, HubFacts, KnownAnswer, TorchDevice, TorchFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MEASURED_BYTES = 8 * 2**20
STEPS_OFF = 8  # an answer may be off by so many steps of its precision, as in models/attention/probe.py
SEED = 0
HUB_SECONDS = 4.0
DTYPES = ("float32", "bfloat16", "float16")


def read_torch() -> TorchFacts:
    """Import torch and look for its devices; a failed import is a fact, too."""
    try:
        import torch
    except (ImportError, OSError) as failure:  # OSError: a library of CUDA that cannot be loaded
        return TorchFacts(failure=first_line(failure))
    onednn = bool(torch.backends.mkldnn.is_available())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build, toolkit = build_of(torch)
        devices = devices_of(torch, build)
        listed = tuple(torch.cuda.get_arch_list()) if build == "cuda" and devices else ()
    return TorchFacts(
        version=torch.__version__,
        build=build,
        toolkit=toolkit,
        devices=devices,
        architectures=listed,
        complaint=" ".join(str(each.message).split("\n")[0] for each in caught),
        has_onednn=onednn,
        instructions=torch.backends.cpu.get_cpu_capability(),
    )


def build_of(torch: Any) -> tuple[Build, str]:
    """The kind of GPU that torch was built for, and the version of its toolkit."""
    if torch.version.hip:
        return "rocm", str(torch.version.hip)
    if torch.version.cuda:
        return "cuda", str(torch.version.cuda)
    if getattr(torch.version, "xpu", None):
        return "xpu", str(torch.version.xpu)
    return ("mps", "") if torch.backends.mps.is_built() else ("cpu", "")


def devices_of(torch: Any, build: Build) -> tuple[TorchDevice, ...]:
    """The GPUs that torch sees."""
    if build == "mps" and torch.backends.mps.is_available():
        return (TorchDevice("Apple GPU", has_bf16=False),)
    if build in ("cpu", "mps") or (build != "xpu" and not torch.cuda.is_available()):
        return ()
    api = torch.xpu if build == "xpu" else torch.cuda
    listed = [api.get_device_properties(index) for index in range(api.device_count())]
    devices = [TorchDevice(each.name, each.total_memory / 2**30) for each in listed]
    if build == "cuda":
        versions = [(each.major, each.minor) for each in listed]
        devices = [
            replace(device, capability=version, has_bf16=version[0] >= 8)
            for device, version in zip(devices, versions, strict=True)
        ]
    if build == "rocm":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        devices = [replace(device, has_bf16=has_bf16) for device in devices]
    return tuple(devices)


def known_answers(facts: TorchFacts) -> tuple[KnownAnswer, ...]:
    """Matmul, convolution and attention, forward and backward, in each precision on the CPU and on a GPU."""
    if facts.failure:
        return ()
    import torch

    computed = [("cpu", dtype) for dtype in DTYPES]
    if facts.devices:
        place = facts.build if facts.build in ("xpu", "mps") else "cuda"
        has_bf16 = facts.devices[0].has_bf16
        computed += [(place, dtype) for dtype in DTYPES if has_bf16 or dtype != "bfloat16"]
    return tuple(
        answer(torch.device(place), getattr(torch, dtype), operation)
        for place, dtype in computed
        for operation in OPERATIONS
    )


# Sizes that need several blocks of a kernel: [L, D] x [D, L]; [B, C, H, W] and [O, C, 3, 3]; [B, H, L, D] three times.
OPERATIONS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "matmul": ((96, 320), (320, 96)),
    "convolution": ((2, 8, 16, 16), (16, 8, 3, 3)),
    "attention": ((1, 2, 64, 40),) * 3,
}


def compute(operation: str, parts: Sequence[Tensor]) -> Tensor:
    """One of OPERATIONS, by the functions that U-Nets, VAEs and transformers use."""
    from torch.nn.functional import conv2d, scaled_dot_product_attention

    if operation == "convolution":
        return conv2d(parts[0], parts[1], padding=1)
    if operation == "attention":
        return scaled_dot_product_attention(parts[0], parts[1], parts[2])
    return parts[0] @ parts[1]


def answer(device: torch.device, dtype: torch.dtype, operation: str) -> KnownAnswer:
    """One computation: its result and gradients against those in float64 on the CPU, from the same rounded inputs."""
    import torch

    names = device.type, str(dtype).removeprefix("torch."), operation
    drawn = torch.Generator().manual_seed(SEED)
    inputs = [torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype) for shape in OPERATIONS[operation]]
    exact = [each.double().requires_grad_() for each in inputs]
    right = compute(operation, exact)
    upstream = torch.randn(right.shape, generator=drawn, dtype=torch.float64).to(dtype)
    right.backward(upstream.double())
    try:
        mine = [each.to(device).requires_grad_() for each in inputs]
        result = compute(operation, mine)
        result.backward(upstream.to(device))
        found = [result, *(each.grad for each in mine)]
        errors = [
            float((own.detach().cpu().double() - truth.detach()).norm() / truth.detach().norm())
            for own, truth in zip(found, [right, *(each.grad for each in exact)], strict=True)
            if own is not None and truth is not None
        ]
        # `max` would lose one that is not a number; a gradient that is missing is no answer either.
        off = max(errors) if len(errors) == len(found) and all(map(math.isfinite, errors)) else math.nan
    except (RuntimeError, NotImplementedError, ValueError) as failure:
        return KnownAnswer(*names, failure=first_line(failure))
    allowed = STEPS_OFF * max(torch.finfo(dtype).eps, 2.0**-10 if device.type != "cpu" else 2.0**-18)
    return KnownAnswer(*names, off=off, allowed=allowed)


def run_attention(facts: TorchFacts, wanted: str = "") -> tuple[dict[str, str | None], str]:
    """Each attention backend forward and backward on this machine's device, and where; `wanted` is a precision."""
    if facts.failure:
        return {}, ""
    import torch

    from lora_trainer.models.attention.backends import BACKENDS
    from lora_trainer.models.attention.probe import probe
    from lora_trainer.models.attention.shapes import AttentionShape

    place, dtype = "cpu", wanted or "float32"
    if facts.devices and facts.build in ("cuda", "rocm"):
        place, dtype = "cuda", wanted or ("bfloat16" if facts.devices[0].has_bf16 else "float16")
    shapes = [AttentionShape(1, 2, 64, 64, size) for size in (40, 64, 128)]  # heads of SD1.5, SDXL and FLUX.1
    found = {name: probe(name, getattr(torch, dtype), torch.device(place), shapes) for name in BACKENDS}
    trim_heap()
    return found, f"{place} in {dtype}"


def measure_disk(use: str, folder: Path, needed: int | None = None) -> DiskFacts:
    """Write a few MB, flush and read them, in the folder or its nearest parent that exists; they are removed again."""
    place, name = nearest_folder(folder), ""
    facts = DiskFacts(use, str(folder), 0, 0, needed=needed)
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(place)
        facts = replace(facts, free=usage.free, total=usage.total)
    data = os.urandom(2**20)  # some file systems compress
    try:
        began = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor.", suffix=".part", delete=False) as file:
            name = file.name
            for _ in range(MEASURED_BYTES // len(data)):
                file.write(data)
        flush_file(Path(name))
        wrote = time.perf_counter()
        with open(name, "rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(2**20):
                pass
        read_seconds = max(time.perf_counter() - wrote, 1e-6)
    except OSError as failure:
        return replace(facts, failure=(failure.strerror or str(failure)).lower())
    finally:
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)
    return replace(facts, write=MEASURED_BYTES / (wrote - began), read=MEASURED_BYTES / read_seconds)


def ask_hub(*, online: bool) -> HubFacts:
    """Whether the hub answers, by one small request and only where `online`; whether a token is there."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    token = bool(os.environ.get("HF_TOKEN")) or (home / "token").is_file()
    if not online:
        return HubFacts(endpoint=endpoint, has_token=token)
    import httpx2

    began = time.perf_counter()
    try:
        reply = httpx2.head(endpoint, timeout=HUB_SECONDS, follow_redirects=True)
        failure = "" if reply.status_code < 500 else f"it answers with status {reply.status_code}"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as problem:
        failure = re.sub(r"\s+", " ", first_line(problem)) or type(problem).__name__
    return HubFacts(True, endpoint, time.perf_counter() - began, failure, token)
