"""`bench cache`: how fast cached latents are read, as the trainer reads them and in plain ways.

All rows read the same random entries of 4x64x64, mean and spread in fp32 (128 KiB an entry), in micro-batches of four,
from files that the system holds in memory.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.benchmarks.interleaved import Timings, Way, time_in_turn
from lora_trainer.benchmarks.measures import Column, Report, RequestedMeasure, Row, figure, time_row
from lora_trainer.data.caches.entries import Store, write_entries

ENTRIES, ROUNDS, MICRO = 512, 9, 4
SHAPE = (4, 64, 64)
CPU = torch.device("cpu")
ABOUT = {
    "mapped": "the least that reading can be: rows of one mapped file, nothing looked up or checked",
    "ours": "this trainer's cache: a safetensors file for each entry, whose digest is checked",
    "file_each": "a safetensors file for each entry, nothing checked",
    "torch_each": "one of torch's files for each entry",
    "npz_each": "one of numpy's files for each entry",
    "ratio": "time over `mapped`, the median of the ratios round by round",
}
COLUMNS: tuple[Column, ...] = (
    ("a second", figure("entries_per_second", ",.0f")),
    ("p10", lambda row: f"{row['entries'] / row.seconds_p90:,.0f}"),
    ("p90", lambda row: f"{row['entries'] / row.seconds_p10:,.0f}"),
    ("a CPU second", figure("entries_per_cpu_second", ",.0f")),
    ("ratio", figure("ratio", ".2f")),
)
Read = Callable[[Sequence[int]], dict[str, Tensor]]  # places of a micro-batch -> tensors stacked


def measure(request: RequestedMeasure) -> Report:
    """Time `request.steps` rounds of reading all entries, in each way."""
    rows = compare_readers(request.steps or ROUNDS, ENTRIES)
    return Report(rows, ABOUT, columns=COLUMNS, first="latents from")


def compare_readers(rounds: int, entries: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        readers = make_readers(Path(folder), entries)
        ways = {name: read_all(read, entries) for name, read in readers.items()}
        timings = time_in_turn(ways, rounds, CPU, warm_up=1)
    return [cache_row(name, entries, each, timings["mapped"]) for name, each in timings.items()]


def read_all(read: Read, entries: int) -> Way:
    """Reads all entries once, in a random order that depends on the round."""

    def way(number: int) -> None:
        places = list(range(entries))
        random.Random(number).shuffle(places)
        for start in range(0, entries, MICRO):
            read(places[start : start + MICRO])

    return way


def cache_row(name: str, entries: int, timings: Timings, base: Timings) -> Row:
    row = time_row(name, "x".join(map(str, SHAPE)), timings.seconds, base.seconds)
    return row.with_figures(
        entries=entries,
        entries_per_second=entries / statistics.median(timings.seconds),
        entries_per_cpu_second=entries / statistics.median(timings.cpu_seconds),
    )


def make_readers(folder: Path, entries: int) -> dict[str, Read]:
    """Write the entries in each form; how each is read."""
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
    return {
        "mapped": map_file(folder, tensors),
        "ours": lambda places: stack([store.read(keys[place]) for place in places]),
        "file_each": lambda places: stack([load_file(folder / f"{place}.safetensors") for place in places]),
        "torch_each": lambda places: stack([torch.load(folder / f"{p}.pt", weights_only=True) for p in places]),
        "npz_each": lambda places: stack([load_npz(folder / f"{place}.npz") for place in places]),
    }


def map_file(folder: Path, tensors: Mapping[str, Tensor]) -> Read:
    """Write a file of the tensors and nothing else; it is read as mapped memory."""
    files = {}
    for name, tensor in tensors.items():
        path = folder / f"{name}.raw"
        path.write_bytes(tensor.numpy().tobytes())
        files[name] = torch.from_file(str(path), shared=False, size=tensor.numel()).view(tensor.shape)
    return lambda places: {name: torch.stack([file[place] for place in places]) for name, file in files.items()}


def load_npz(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def stack(entries: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}
