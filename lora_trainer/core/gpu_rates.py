"""The peak speed of GPUs, by name: dense matmuls a second. No torch."""

from __future__ import annotations

import re

# Dense 16-bit matmuls with fp32 sums, in TFLOP/s, from data sheets; bf16, or fp16 on V100 and T4, which have no bf16.
GPU_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 790.0,  # measured by others; the data sheet says 989
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
    "RTX 4090": 165.0,
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
    "RTX 3060": 25.5,
}
USUAL = ("H100", "RTX 4090", "RTX 3060")  # for which a plan shows times
OTHER_TFLOPS = {  # of them: dense matmuls in other precisions, from data sheets
    "H100": {"int8": 1979.0, "tf32": 494.7, "fp32": 66.9},
    "RTX 4090": {"int8": 660.6, "tf32": 82.6, "fp32": 82.6},
    "RTX 3060": {"int8": 102.0, "tf32": 12.7, "fp32": 12.7},
}


def rate_of_gpu(name: str) -> float | None:
    """TFLOP/s of the GPU of that name; None for an unknown one, and for a laptop's, which is slower."""
    if re.search(r"laptop|max-q|mobile", name, re.IGNORECASE):
        return None
    found = [gpu for gpu in GPU_TFLOPS if re.search(rf"\b{re.escape(gpu)}\b", name, re.IGNORECASE)]
    return GPU_TFLOPS[max(found, key=len)] if found else None


def least_seconds(tflop: float, computed: str) -> dict[str, float]:
    """The least seconds for so many operations on each of the usual GPUs; `computed` is bf16, int8, tf32 or fp32.

    With int8, all matmuls count as int8, though some are not.
    """
    return {gpu: tflop / OTHER_TFLOPS[gpu].get(computed, GPU_TFLOPS[gpu]) for gpu in USUAL}
