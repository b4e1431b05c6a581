"""Measure what the verdict on a LoRA adds to a run: its peak memory, its forward passes and its seconds.

    OMP_NUM_THREADS=1 python scripts/measure_verdict.py --steps 30

Runs `lora-trainer train` in processes of their own, once to fill the caches, then with `gates.lora_check=off`, `lite` and
`full`. Memory is the peak in RAM of a process (VmHWM): at the end of its training, as `run.json` has it, and at
the end of the process. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench_start import write_big_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--big", action="store_true", help="a U-Net of 30 M weights at 256 px")
    parser.add_argument("--only", default="off,lite,full", help="rows, separated by commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all rows")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        from lora_trainer.builtin import BASE_FOLDER

        model = write_big_model(BASE_FOLDER, Path(folder) / "model") if options.big else BASE_FOLDER
        own = [sys.executable, "-m", "lora_trainer", "train", "--preset", "12gb", "--model", str(model)]
        own += ["--output", folder, "--max-steps", str(options.steps), *(["--set=data.resolution=256"] * options.big)]
        own += ["--set=sample.every_n_steps=0", "--set=lora.rank=64", f"--set=cache.dir={folder}/cache"]
        own += ["--set=train.effective_batch_size=2", "--set=lora.target_modules=attention+ff"]
        own += [f"--set={value}" for value in options.set]
        print("lora_check   peak MiB of training   of the process   forward passes   seconds: training   verdict")
        for row in ("off", *options.only.split(",")):
            show(row, own, Path(folder))


def show(check: str, own: Sequence[str], folder: Path) -> None:
    """Run once and print a line."""
    name = f"{check}-{len(list(folder.iterdir()))}"
    process = subprocess.Popen(
        [*own, "--name", name, f"--set=gates.lora_check={check}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"gates.lora_check={check} failed:\n{said[-2000:]}")
    record = json.loads((folder / name / "run.json").read_text(encoding="utf-8"))
    cost, seconds = record["lora"]["cost"], record["seconds"]
    peaks = f"{record['memory']['peak_gib'] * 1024:22.0f} {usage.ru_maxrss / 1024:16.0f}"
    print(
        f"{check:10} {peaks} {cost['forward_passes']:16} {seconds['train']:19.1f} {cost['seconds']:9.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
