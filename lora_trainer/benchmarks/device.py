"""The machine that measurements are of: what it is called, waiting for it, what it held."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from lora_trainer.core.findings import counted
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
