"""Measure what a cache of many images costs: files, disk, memory, start-up. Its entries are fake: nothing is encoded.

    python scripts/measure_caches.py --entries 100000 --side 16 --folder scratch

`--side` is the side of the latents: 64 is an image of 512 px, 128 KiB an entry. Times are CPU seconds, memory is that of
the process without mapped files (Linux).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.data.caches.cache import CachePlan, plan_latents
from lora_trainer.data.caches.entries import Store, mark_used
from lora_trainer.data.caches.filling import Work, build_missing
from lora_trainer.data.caches.pruning import cache_status
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import Framing, View, plan_plain

SIZES = ((1200, 1000), (1000, 1200), (1024, 1024), (1600, 1000), (900, 1600))
READS = 20_000


def anonymous_mb() -> float:
    """Memory of this process without mapped files, in MB."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Anonymous"))


def report_cost(what: str, work: Callable[[], object]) -> object:
    """Do the work and print its time and memory."""
    before, began, used = anonymous_mb(), time.perf_counter(), time.process_time()
    found = work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    print(f"{what}: {cpu:.2f} CPU s, {seconds:.2f} s, {anonymous_mb() - before:+.0f} MB", flush=True)
    return found


def make_items(count: int, side: int) -> list[tuple[Sample, View]]:
    samples = [
        Sample(
            Path(f"set/{number:07d}.jpg"),
            f"a caption of the usual length, number {number}",
            *SIZES[number % len(SIZES)],
            hashlib.sha256(str(number).encode()).hexdigest(),
        )
        for number in range(count)
    ]
    plan = plan_plain(samples, [Framing((8 * side,), 64)])
    return [(sample, views[0]) for sample, views in zip(samples, plan.views, strict=True)]


def fill_cache(plan: CachePlan[tuple[Sample, View]], batch: int = 16) -> int:
    def encode(places: list[int], prepared: list[int]) -> dict[str, Tensor]:
        bucket = plan.items[places[0]][1].fit.bucket
        latents = torch.full((len(prepared), 4, bucket.height // 8, bucket.width // 8), 0.5)
        return {"mean": latents, "spread": latents}

    def bucket(place: int) -> object:
        return plan.items[place][1].fit.bucket

    return build_missing(Work(plan.folder, "latents", plan.keys, bucket, int, encode, str, batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--side", type=int, default=16)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = anonymous_mb()
    items = make_items(arguments.entries, arguments.side)
    print(f"samples and views themselves: {anonymous_mb() - before:+.0f} MB")

    def plan() -> CachePlan[tuple[Sample, View]]:
        return plan_latents(items, arguments.folder, "encoder", torch.float32)

    first = plan()
    if first.missing:
        report_cost(f"filling {len(first.missing)} in batches of 16", lambda: fill_cache(first))
    again = report_cost("planning with everything cached", plan)
    assert isinstance(again, CachePlan)
    assert not again.missing
    store = Store(arguments.folder, "latents")
    report_cost("the first entry", lambda: store.read(again.keys[-1]))
    draw = random.Random(0)
    drawn = [draw.randrange(len(again.keys)) for _ in range(READS)]

    def read_at_random() -> None:
        for place in drawn:
            store.read(again.keys[place])

    report_cost(f"{READS} entries at random", read_at_random)
    report_cost("marking all as used", lambda: mark_used(arguments.folder, "latents", again.keys))
    print("\n".join(cache_status(arguments.folder).lines))


if __name__ == "__main__":
    main()
