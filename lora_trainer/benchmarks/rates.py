"""What a device can do at most: operations a second of dense matrix products, to hold a step against."""

from __future__ import annotations

import torch

from lora_trainer.core.gpu_rates import rate_of_gpu
from lora_trainer.monitor.device_rates import SIDES, matmul_rate


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """TFLOP/s that the device can do in that precision, and where the figure is from."""
    if device.type != "cuda":
        side = SIDES[device.type]
        return matmul_rate(device, dtype), f"measured: a {side}x{side} product in {str(dtype).removeprefix('torch.')}"
    name = torch.cuda.get_device_name(device)
    if dtype not in (torch.bfloat16, torch.float16):
        return None, f"of {name} only the rates of 16 bits are known"
    rate = rate_of_gpu(name)
    return rate, f"the known rate of {name} in 16 bits" if rate else f"the rate of {name} is not known"
