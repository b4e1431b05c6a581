"""How card and processor compute (`[hardware]`): set once a process, before the first computation, in this place alone."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache

import torch
from torch import nn

from lora_trainer.config.schema import Config
from lora_trainer.core.findings import counted

MOST_THREADS = 8  # of a processor: more wait for each other at a batch of few samples
THREADS_SET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the user's own word
FEW_SHAPES = 8  # of micro batches: cuDNN tries its ways anew for each
FEWEST_CONVOLUTIONS = 8  # that look at neighbours: fewer are a transformer's patches


@cache
def threads_found() -> int:
    """Threads of a processor's computations as this process began with them."""
    return torch.get_num_threads()


def set_hardware(config: Config, device: torch.device) -> None:
    """Let torch compute as `[hardware]` says. Each run of a process says all of it anew.

    cuDNN's trials wait for `try_convolutions`, when it is known how many sizes the run meets.
    """
    wanted = wanted_threads(config.hardware.threads, threads_found())
    if wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)
    with suppress(RuntimeError):  # once a process, and only before anything ran
        torch.set_num_interop_threads(1)
    torch.backends.mkldnn.enabled = config.hardware.onednn  # type: ignore[assignment]  # a property of the module
    if device.type == "cuda":
        # By the older names: those by operator make the older ones raise when read, and Inductor reads them.
        torch.set_float32_matmul_precision("high" if config.hardware.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.hardware.tf32


def wanted_threads(asked: int | None, now: int) -> int:
    """Threads of a processor's computations: as asked where there are as many, else as the user's environment says, else all up to 8."""
    if asked is not None:
        return min(asked, os.cpu_count() or asked)
    return now if any(os.environ.get(name) for name in THREADS_SET) else min(now, MOST_THREADS)


def try_convolutions(config: Config, device: torch.device, shapes: int) -> bool:
    """Whether cuDNN times its ways of convolving, for a run whose micro batches have so many shapes; and let it."""
    if device.type != "cuda":
        return False
    asked = config.hardware.cudnn_benchmark
    wanted = shapes <= FEW_SHAPES if asked == "auto" else asked
    torch.backends.cudnn.benchmark = wanted and not config.train.deterministic
    return torch.backends.cudnn.benchmark


def set_memory_order(denoiser: nn.Module, config: Config, device: torch.device) -> bool:
    """Whether weights and pictures have their channels last; and put the weights so. `auto`: a U-Net on a card.

    Call it before the LoRA is injected: what is trained and saved keeps the order that files have.
    """
    asked = config.hardware.channels_last
    wanted = device.type == "cuda" and convolutions(denoiser) >= FEWEST_CONVOLUTIONS if asked == "auto" else asked
    if wanted:
        denoiser.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return wanted


def convolutions(denoiser: nn.Module) -> int:
    """How many of its convolutions look at neighbours and overlap."""
    found = (module for module in denoiser.modules() if isinstance(module, nn.Conv2d))
    return sum(max(each.kernel_size) > max(each.stride) for each in found)


def threads_told(asked: int | None) -> str:
    """How many threads compute, and where that is fewer than were asked for."""
    now = torch.get_num_threads()
    fewer = f" ({asked} were asked for, and there are no more processors)" if asked is not None and asked > now else ""
    return f"{counted(now, 'thread')}{fewer}"


def hardware_note(config: Config, device: torch.device, *, last: bool, tried: bool) -> str:
    """What was set, as a sentence."""
    said = []
    if device.type == "cpu":
        said += [threads_told(config.hardware.threads), f"oneDNN {'on' if config.hardware.onednn else 'off'}"]
    if device.type == "cuda":
        said += [f"TF32 {'on' if config.hardware.tf32 else 'off'}", f"cuDNN's trials {'on' if tried else 'off'}"]
    return ", ".join([*said, f"channels {'last' if last else 'first'}"])
