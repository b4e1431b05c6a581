"""How fast cached latents are read: as the trainer reads them, beside the plain ways.

All rows read the same random entries of 4x64x64, mean and spread in fp32 (128 KiB an
entry), in micro-batches of four, from files that the system holds in memory, in turns in
one process.

`mapped` is the least that reading can be: rows of one mapped file, stacked, nothing looked
up and nothing checked. `ours` is the trainer's store: a safetensors file for each entry, whose
digest is checked. `file_each` is such a file without a digest, `npz_each` one of numpy's,
`torch_each` one of torch's.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.benchmarks.measures import Report, RequestedMeasure, TimedRow, tenths
from lora_trainer.data.caches.entries import Store, write_entries

ENTRIES, ROUNDS, TOGETHER = 512, 9, 4
SHAPE = (4, 64, 64)
ABOUT = {
    "mapped": "the least that reading can be: rows of one mapped file, nothing looked up or checked",
    "ours": "this trainer's cache: a safetensors file for each entry, whose digest is checked",
    "file_each": "a safetensors file for each entry, nothing checked",
    "torch_each": "one of torch's files for each entry",
    "npz_each": "one of numpy's files for each entry",
    "ratio": "time over `mapped`, the median of the ratios round by round",
}
Read = Callable[[Sequence[int]], dict[str, Tensor]]  # places of a micro-batch -> tensors stacked


@dataclass(frozen=True)
class CacheRow(TimedRow):
    """One way of reading all entries once. `ratio` is over `mapped`, the median of the ratios round by round."""

    entries: int
    entries_per_second: float
    entries_per_cpu_second: float


COLUMNS = (
    ("a second", lambda row: f"{row.entries_per_second:,.0f}"),
    ("p10", lambda row: f"{row.entries / row.seconds_p90:,.0f}"),
    ("p90", lambda row: f"{row.entries / row.seconds_p10:,.0f}"),
    ("a CPU second", lambda row: f"{row.entries_per_cpu_second:,.0f}"),
    ("ratio", lambda row: f"{row.ratio:.2f}"),
)


def measure(asked: RequestedMeasure) -> Report:
    """Time the ways of reading, `asked.steps` rounds of each."""
    return Report(bench_cache(asked.steps or ROUNDS, ENTRIES), ABOUT, columns=COLUMNS, first="latents from")


def bench_cache(rounds: int = ROUNDS, entries: int = ENTRIES) -> list[CacheRow]:
    """Time the ways of reading."""
    with tempfile.TemporaryDirectory() as name:
        ways = ways_of(Path(name), entries)
        wall: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, make in ways.items():
                places = list(range(entries))
                random.Random(number).shuffle(places)
                read, began, used = make(), time.perf_counter(), time.process_time()
                for start in range(0, entries, TOGETHER):
                    read(places[start : start + TOGETHER])
                if number:  # the first round warms
                    wall[way].append(time.perf_counter() - began)
                    cpu[way].append(time.process_time() - used)
    return [row_of(way, entries, wall[way], cpu[way], wall["mapped"]) for way in ways]


def row_of(name: str, entries: int, wall: list[float], cpu: list[float], base: list[float]) -> CacheRow:
    median = statistics.median(wall)
    ratio = statistics.median(own / least for own, least in zip(wall, base, strict=True))
    return CacheRow(
        name,
        "x".join(map(str, SHAPE)),
        median,
        *tenths(wall),
        ratio,
        entries,
        entries / median,
        entries / statistics.median(cpu),
    )


def ways_of(folder: Path, entries: int) -> dict[str, Callable[[], Read]]:
    """Write the entries in each way; for each, a function that makes a reader."""
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(entries, *SHAPE, generator=draw) for name in ("mean", "spread")}
    keys = [hashlib.sha256(str(place).encode()).hexdigest() for place in range(entries)]
    write_entries(folder, "latents", keys, tensors)
    for place in range(entries):
        entry = {name: tensor[place].clone() for name, tensor in tensors.items()}
        save_file(entry, folder / f"{place}.safetensors")
        torch.save(entry, folder / f"{place}.pt")
        np.savez(folder / f"{place}.npz", mean=entry["mean"].numpy(), spread=entry["spread"].numpy())
    store = Store(folder, "latents")

    def each(ending: str, load: Callable[[Path], dict[str, Tensor]]) -> Callable[[], Read]:
        return lambda: lambda places: stacked([load(folder / f"{place}{ending}") for place in places])

    return {
        "mapped": bare(folder, tensors),
        "ours": lambda: lambda places: stacked([store.read(keys[place]) for place in places]),
        "file_each": each(".safetensors", load_file),
        "torch_each": each(".pt", lambda path: dict(torch.load(path, weights_only=True))),
        "npz_each": each(".npz", load_npz),
    }


def bare(folder: Path, tensors: dict[str, Tensor]) -> Callable[[], Read]:
    """A file of the tensors and nothing else, mapped."""
    files = {}
    for name, tensor in tensors.items():
        path = folder / f"{name}.raw"
        path.write_bytes(tensor.numpy().tobytes())
        files[name] = torch.from_file(str(path), shared=False, size=tensor.numel()).view(tensor.shape)

    def read(places: Sequence[int]) -> dict[str, Tensor]:
        return {name: torch.stack([file[place] for place in places]) for name, file in files.items()}

    return lambda: read


def load_npz(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def stacked(entries: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}
