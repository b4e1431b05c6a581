"""What a device can do at most: operations a second of dense matrix products, to hold a step against."""

from __future__ import annotations

import torch
from torch.utils.benchmark import Timer

from lora_trainer.memory_plan.gpu_rates import rate_of_gpu

SIDE = 1024  # of the product that a CPU is measured by


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """TFLOP/s that the device can do in that precision, and where the figure is from."""
    if device.type != "cuda":
        return measured_rate(device, dtype), f"measured: a {SIDE}x{SIDE} product in {str(dtype).removeprefix('torch.')}"
    name = torch.cuda.get_device_name(device)
    if dtype not in (torch.bfloat16, torch.float16):
        return None, f"of {name} only the rates of 16 bits are known"
    rate = rate_of_gpu(name)
    return rate, f"the known rate of {name} in 16 bits" if rate else f"the rate of {name} is not known"


def measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The median of some products, with as many threads as a step has."""
    left, right = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
    timer = Timer("left @ right", globals={"left": left, "right": right}, num_threads=torch.get_num_threads())
    return 2 * SIDE**3 / timer.blocked_autorange().median / 1e12
