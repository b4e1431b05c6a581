"""Train LoRAs for diffusion models, and score the dataset and the LoRA of every run."""

import os

__version__ = "0.1.0"

# Read once, when torch is loaded or first computes on a CPU, so they are set wherever the package is imported before.
# MKL otherwise rounds by the address of an operand, and tensors of a mapped file start anywhere (docs/exactness.md).
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Threads that spin for long while they wait slow other processes on the same cores, up to tenfold. Threads that sleep
# at once (OMP_WAIT_POLICY=PASSIVE) made two as slow as one; these rounds of spinning are some microseconds.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
