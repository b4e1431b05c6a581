"""The machine that is measured: what it is called, waiting for it, what it can do at most."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from lora_trainer.core.findings import counted
from lora_trainer.core.gpu_rates import rate_of_gpu
from lora_trainer.monitor.device_rates import SIDES, matmul_rate
from lora_trainer.training.torch_settings import set_hardware

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config


def device_measured(config: Config) -> str:
    """What is measured on with these settings, which also say how many threads a CPU has."""
    if not torch.cuda.is_available():
        set_hardware(config, torch.device("cpu"))
    return device_name()


def device_name() -> str:
    """The GPU's name, or what the CPU is called."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    """What a GPU holds by now; 0 of a CPU, where it is not known."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """TFLOP/s of dense matrix products that the device can do in that precision, and where the figure is from."""
    if device.type != "cuda":
        side = SIDES[device.type]
        return matmul_rate(device, dtype), f"measured: a {side}x{side} product in {str(dtype).removeprefix('torch.')}"
    name = torch.cuda.get_device_name(device)
    if dtype not in (torch.bfloat16, torch.float16):
        return None, f"of {name} only the rates of 16 bits are known"
    rate = rate_of_gpu(name)
    return rate, f"the known rate of {name} in 16 bits" if rate else f"the rate of {name} is not known"
