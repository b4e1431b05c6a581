"""Set how GPU and CPU compute (`[hardware]`), before the first computation. No other module does."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_trainer.training.threads import Threads, choose_threads

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config

FEW_SHAPES = 8  # of micro-batches: cuDNN benchmarks its algorithms for each
FEWEST_CONVOLUTIONS = 8  # with overlapping windows: fewer are a transformer's patches


def set_hardware(config: Config, device: torch.device, recorded_threads: int | None = None) -> Threads:
    """Apply `[hardware]` to torch; returns the CPU threads. Each run of a process sets it anew.

    `recorded_threads` are those of the run that is resumed. `try_convolutions` sets cuDNN's benchmark later, when the
    number of sizes is known.
    """
    threads = choose_threads(config.hardware.threads, recorded_threads)
    if threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    with suppress(RuntimeError):  # once a process, and only before anything ran
        torch.set_num_interop_threads(1)
    torch.backends.mkldnn.enabled = config.hardware.onednn  # type: ignore[assignment]  # a property of the module
    if device.type == "cuda":
        # By the older names: the newer ones make them raise when read, and Inductor reads them.
        torch.set_float32_matmul_precision("high" if config.hardware.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.hardware.tf32
    return threads


def rounds_alike_anywhere() -> bool:
    """Whether a matrix product on the CPU has the same bits wherever in memory its operands start.

    MKL promises it only in its strict mode, which the package sets when it is imported before any computation.
    """
    weight, row = torch.linspace(-1, 1, 32 * 32).sin().view(32, 32), torch.linspace(-1, 1, 32).cos().view(1, 32)
    memory = torch.empty(weight.numel() + 32)
    first = -(memory.data_ptr() // 4) % 16  # of 64 aligned bytes
    results = []
    for offset in range(0, 16, 2):  # in steps of 8 bytes, as in a file
        moved = memory[first + offset :][: weight.numel()].view_as(weight).copy_(weight)
        results.append(nn.functional.linear(row, moved))
    return all(torch.equal(results[0], result) for result in results)


def try_convolutions(config: Config, device: torch.device, shapes: int) -> bool:
    """Let cuDNN benchmark convolutions, for micro-batches of so many `shapes`; returns whether it does."""
    if device.type != "cuda":
        return False
    setting = config.hardware.cudnn_benchmark
    wanted = shapes <= FEW_SHAPES if setting == "auto" else setting
    torch.backends.cudnn.benchmark = wanted and not config.train.deterministic
    return torch.backends.cudnn.benchmark


def set_memory_order(denoiser: nn.Module, config: Config, device: torch.device) -> bool:
    """Store weights channels-last where that is set; returns whether it is. `auto`: a U-Net on a GPU.

    Call it before the LoRA is injected: trained weights keep the memory order of files.
    """
    setting = config.hardware.channels_last
    wanted = device.type == "cuda" and convolutions(denoiser) >= FEWEST_CONVOLUTIONS if setting == "auto" else setting
    if wanted:
        denoiser.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return wanted


def convolutions(denoiser: nn.Module) -> int:
    """The number of its convolutions whose windows overlap."""
    found = (module for module in denoiser.modules() if isinstance(module, nn.Conv2d))
    return sum(max(each.kernel_size) > max(each.stride) for each in found)


def hardware_note(config: Config, device: torch.device, *, channels_last: bool, has_benchmark: bool) -> str:
    """What was set, as a line."""
    parts = [f"oneDNN {'on' if config.hardware.onednn else 'off'}"] if device.type == "cpu" else []
    if device.type == "cuda":
        tf32, benchmark = "on" if config.hardware.tf32 else "off", "on" if has_benchmark else "off"
        parts = [f"TF32 {tf32}", f"cuDNN benchmark {benchmark}"]
    return ", ".join([*parts, f"channels {'last' if channels_last else 'first'}"])
