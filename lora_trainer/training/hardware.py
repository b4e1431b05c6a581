"""How GPU and CPU compute (`[hardware]`): set once a process, before the first computation, in this place alone."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from lora_trainer.config.schema import Config
from lora_trainer.training.threads import Threads, choose_threads

FEW_SHAPES = 8  # of micro-batches: cuDNN tries its ways anew for each
FEWEST_CONVOLUTIONS = 8  # that look at neighbors: fewer are a transformer's patches


def set_hardware(config: Config, device: torch.device, recorded_threads: int | None = None) -> Threads:
    """Let torch compute as `[hardware]` says; the threads that compute on the CPU. Each run of a process sets it anew.

    `recorded_threads` are those of the run that is resumed. cuDNN's trials wait for `try_convolutions`, when it is
    known how many sizes the run meets.
    """
    threads = choose_threads(config.hardware.threads, recorded_threads)
    if threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
    with suppress(RuntimeError):  # once a process, and only before anything ran
        torch.set_num_interop_threads(1)
    torch.backends.mkldnn.enabled = config.hardware.onednn  # type: ignore[assignment]  # a property of the module
    if device.type == "cuda":
        # By the older names: those by operator make the older ones raise when read, and Inductor reads them.
        torch.set_float32_matmul_precision("high" if config.hardware.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.hardware.tf32
    return threads


def rounds_alike_anywhere() -> bool:
    """Whether a matrix product on the CPU has the same bits wherever in memory its operands start.

    MKL only promises it in its strict mode, which is set where the package is imported before anything is computed.
    """
    weight, row = torch.linspace(-1, 1, 32 * 32).sin().view(32, 32), torch.linspace(-1, 1, 32).cos().view(1, 32)
    memory = torch.empty(weight.numel() + 32)
    first = -(memory.data_ptr() // 4) % 16  # of 64 aligned bytes
    answers = []
    for offset in range(0, 16, 2):  # in steps of 8 bytes, as in a file
        moved = memory[first + offset :][: weight.numel()].view_as(weight).copy_(weight)
        answers.append(nn.functional.linear(row, moved))
    return all(torch.equal(answers[0], answer) for answer in answers)


def try_convolutions(config: Config, device: torch.device, shapes: int) -> bool:
    """Whether cuDNN times its ways of convolving, for a run whose micro-batches have so many shapes; and let it."""
    if device.type != "cuda":
        return False
    asked = config.hardware.cudnn_benchmark
    wanted = shapes <= FEW_SHAPES if asked == "auto" else asked
    torch.backends.cudnn.benchmark = wanted and not config.train.deterministic
    return torch.backends.cudnn.benchmark


def set_memory_order(denoiser: nn.Module, config: Config, device: torch.device) -> bool:
    """Whether weights and images have their channels last; and put the weights so. `auto`: a U-Net on a GPU.

    Call it before the LoRA is injected: what is trained and saved keeps the order that files have.
    """
    asked = config.hardware.channels_last
    wanted = device.type == "cuda" and convolutions(denoiser) >= FEWEST_CONVOLUTIONS if asked == "auto" else asked
    if wanted:
        denoiser.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return wanted


def convolutions(denoiser: nn.Module) -> int:
    """How many of its convolutions look at neighbors and overlap."""
    found = (module for module in denoiser.modules() if isinstance(module, nn.Conv2d))
    return sum(max(each.kernel_size) > max(each.stride) for each in found)


def hardware_note(config: Config, device: torch.device, *, last: bool, tried: bool) -> str:
    """What was set, as a sentence."""
    said = [f"oneDNN {'on' if config.hardware.onednn else 'off'}"] if device.type == "cpu" else []
    if device.type == "cuda":
        said = [f"TF32 {'on' if config.hardware.tf32 else 'off'}", f"cuDNN's trials {'on' if tried else 'off'}"]
    return ", ".join([*said, f"channels {'last' if last else 'first'}"])
