"""What compressing a checkpoint would save and cost: each of its files by gzip and zstd, beside writing it as it is.

    python scripts/measure_compression.py runs/cat/checkpoints/step-000200

`zstd of planes` compresses all first bytes of the numbers, then all second ones, which is the best that such a file allows
without loss. Nothing is changed in the folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

NUMBER_BYTES = 4  # of fp32
TIMES = 3


def planes(data: bytes) -> bytes:
    """The first bytes of all numbers, then the second ones and so on."""
    whole = len(data) // NUMBER_BYTES * NUMBER_BYTES
    numbers = np.frombuffer(data[:whole], np.uint8).reshape(-1, NUMBER_BYTES)
    return numbers.T.tobytes() + data[whole:]


def zstd(level: int) -> Callable[[bytes], bytes]:
    return lambda data: pa.Codec("zstd", level).compress(data, asbytes=True)


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "gzip 1": lambda data: zlib.compress(data, 1),
    "gzip 6": lambda data: zlib.compress(data, 6),
    "zstd 1": zstd(1),
    "zstd 3": zstd(3),
    "zstd 1 of planes": lambda data: zstd(1)(planes(data)),
}


def seconds_of(function: Callable[[], object]) -> float:
    """CPU and waiting, the least of a few times."""
    found = []
    for _ in range(TIMES):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def write(data: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a folder with safetensors files")
    files = sorted(parser.parse_args().checkpoint.glob("*.safetensors"))
    if not files:
        print("no safetensors files there", file=sys.stderr)
        return 2
    print("| file | MB | written in s | " + " | ".join(f"{name}: size, s" for name in WAYS) + " |")
    print("|---|---|---|" + "---|" * len(WAYS))
    for path in files:
        data = path.read_bytes()
        cells = [f"`{path.name}`", f"{len(data) / 1e6:.1f}", f"{seconds_of(lambda data=data: write(data)):.2f}"]
        for way in WAYS.values():
            share = len(way(data)) / len(data)
            cells.append(f"{share:.0%}, {seconds_of(lambda way=way, data=data: way(data)):.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
