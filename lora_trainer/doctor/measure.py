"""Measure this machine: what torch sees and computes, which attention runs, how fast the disks are, if the hub answers."""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
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
    if build == "mps":
        return (TorchDevice("Apple GPU", None, None, has_bf16=False),) if torch.backends.mps.is_available() else ()
    if build == "xpu":
        found = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
        return tuple(TorchDevice(each.name, each.total_memory / 2**30) for each in found)
    if build == "cpu" or not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    is_cuda = build == "cuda"
    return tuple(
        TorchDevice(
            each.name,
            each.total_memory / 2**30,
            (each.major, each.minor) if is_cuda else None,
            each.major >= 8 if is_cuda else torch.cuda.is_bf16_supported(including_emulation=False),
        )
        for each in found
    )


def known_answers(facts: TorchFacts) -> tuple[KnownAnswer, ...]:
    """Matmul, convolution and attention, forward and backward, in each precision on the CPU and on a GPU."""
    if facts.failure:
        return ()
    import torch

    places = ["cpu", *([{"xpu": "xpu", "mps": "mps"}.get(facts.build, "cuda")] if facts.devices else [])]
    return tuple(
        answer(torch.device(place), getattr(torch, dtype), operation)
        for place in places
        for dtype in DTYPES
        for operation in OPERATIONS
        if not (dtype == "bfloat16" and place != "cpu" and not facts.devices[0].has_bf16)
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

    place = "cuda" if facts.devices and facts.build in ("cuda", "rocm") else "cpu"
    usual = "float32" if place == "cpu" else "bfloat16" if facts.devices[0].has_bf16 else "float16"
    dtype = wanted or usual
    shapes = [AttentionShape(1, 2, 64, 64, size) for size in (40, 64, 128)]  # heads of SD1.5, SDXL and FLUX.1
    found = {name: probe(name, getattr(torch, dtype), torch.device(place), shapes) for name in BACKENDS}
    trim_heap()
    return found, f"{place} in {dtype}"


def measure_disk(use: str, folder: Path, needed: int | None = None) -> DiskFacts:
    """Write a few MB, flush and read them, in the folder or its nearest parent that exists; they are removed again."""
    import shutil

    place = nearest_folder(folder)
    try:
        usage = shutil.disk_usage(place)
        free, total = usage.free, usage.total
    except OSError:
        free = total = 0
    facts = DiskFacts(use, str(folder), free, total, needed=needed)
    data = os.urandom(2**20)  # some file systems compress
    name = ""
    try:
        began = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor.", suffix=".part", delete=False) as file:
            name = file.name
            for _ in range(MEASURED_BYTES // len(data)):
                file.write(data)
        flush_file(Path(name))
        wrote = time.perf_counter() - began
        began = time.perf_counter()
        with open(name, "rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(2**20):
                pass
        read = time.perf_counter() - began
    except OSError as failure:
        reason = (failure.strerror or str(failure)).lower()
        return DiskFacts(use, str(folder), free, total, failure=reason, needed=needed)
    finally:
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)
    return DiskFacts(
        facts.use, facts.folder, free, total, MEASURED_BYTES / wrote, MEASURED_BYTES / max(read, 1e-6), needed=needed
    )


def measure_disks(places: Sequence[tuple[str, Path, int | None]]) -> tuple[DiskFacts, ...]:
    """Each folder, with what it is used for and the bytes that a run needs there."""
    return tuple(measure_disk(use, folder, needed) for use, folder, needed in places)


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
