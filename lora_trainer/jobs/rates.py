"""What a device can do at most: operations a second of dense matrix products, to hold a step against."""

from __future__ import annotations

import re
import statistics
import time

import torch

from lora_trainer.production.plan import CARD_TFLOPS

# Dense products of 16 bits with sums in fp32, TFLOP/s, as data sheets have it; bf16, but for V100 and T4, which have
# fp16 alone. CARD_TFLOPS goes before: what is there may be measured.
DATA_SHEETS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "A100": 312.0,
    "A30": 165.0,
    "A40": 149.7,
    "A10": 125.0,
    "A10G": 70.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX A5000": 111.1,
    "RTX A4000": 76.7,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 5070 Ti": 87.9,
    "RTX 5070": 61.7,
    "RTX 4080 SUPER": 104.4,
    "RTX 4080": 97.5,
    "RTX 4070 Ti SUPER": 88.2,
    "RTX 4070 Ti": 80.2,
    "RTX 4070 SUPER": 70.9,
    "RTX 4070": 58.3,
    "RTX 4060 Ti": 44.1,
    "RTX 4060": 30.2,
    "RTX 3090 Ti": 80.0,
    "RTX 3090": 71.2,
    "RTX 3080 Ti": 68.2,
    "RTX 3080": 59.5,
    "RTX 3070 Ti": 43.5,
    "RTX 3070": 40.6,
    "RTX 3060 Ti": 32.4,
}
SIDE, ROUNDS = 1024, 9  # of the product that a processor is measured by


def rate_of_card(name: str) -> float | None:
    """TFLOP/s of the card of that name; None where it is not known, and for a notebook's, which runs slower."""
    if re.search(r"laptop|max-q|mobile", name, re.IGNORECASE):
        return None
    rates = DATA_SHEETS | CARD_TFLOPS
    found = [card for card in rates if re.search(rf"\b{re.escape(card)}\b", name, re.IGNORECASE)]
    return rates[max(found, key=len)] if found else None


def rate_of(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """TFLOP/s that the device can do in that precision, and where the figure is from."""
    if device.type != "cuda":
        return measured_rate(device, dtype), f"measured: a {SIDE}x{SIDE} product in {str(dtype).removeprefix('torch.')}"
    name = torch.cuda.get_device_name(device)
    if dtype not in (torch.bfloat16, torch.float16):
        return None, f"of {name} only the rates of 16 bits are known"
    rate = rate_of_card(name)
    return rate, f"the known rate of {name} in 16 bits" if rate else f"the rate of {name} is not known"


def measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The median of some products, with as many threads as a step has."""
    left, right = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
    seconds = []
    for number in range(ROUNDS + 1):
        began = time.perf_counter()
        left @ right
        if number:
            seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / statistics.median(seconds) / 1e12
