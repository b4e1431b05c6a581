"""Measure the time from the start of a process to the end of its first step, and its memory after ten steps.

    python scripts/bench_start.py --rounds 5

Runs whole processes in turn:

- `bare`: a script that imports torch, diffusers and peft, loads the same model, injects the same LoRA and trains on
  ready-made tensors
- `bare_hidden`: the same, with the optional libraries hidden that no step needs
- `ours`: `lora-trainer train` with warm caches, from reading its config to the step
- `ours_validated`: the same with the validation loss of the base model before the first step, which is the default

Each process writes a line after a step; the step's time is when that line is seen. Memory is the peak in RAM until then
(VmHWM). Linux only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STEPS = 10
LIMIT = 120.0  # seconds of one process
PRESET, RANK, BATCH = "12gb", 64, 2
BIG_WIDTHS = (192, 336)

BARE = """
import sys
sys.modules.update(dict.fromkeys(filter(None, sys.argv[1].split(","))))
folder, done, batch, side, rank = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6])
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", local_files_only=True).requires_grad_(False)
targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
names = [n for n, m in unet.named_modules() if n.endswith(tuple("." + t for t in targets)) and ".attentions." in n]
inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=names), unet)
unet.train()
trained = [p for p in unet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
noisy, noise = torch.randn(batch, 4, side, side), torch.randn(batch, 4, side, side)
t, text = torch.full((batch,), 500), torch.randn(batch, 77, unet.config.cross_attention_dim)
with open(done, "a", buffering=1) as lines:
    for step in range(1000):
        torch.nn.functional.mse_loss(unet(noisy, t, text, return_dict=False)[0], noise).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, file=lines)
"""


@dataclass(frozen=True)
class Start:
    """One process: wall and CPU seconds to the end of its first step, peak MiB after STEPS steps."""

    wall: float
    cpu: float
    mebibytes: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--big", action="store_true", help="a U-Net of 30 M weights at 256 px instead of the built-in base model"
    )
    parser.add_argument("--only", default="", help="rows, separated by commas; `bare` is always measured")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = commands(Path(folder), big=options.big)
        only = options.only.split(",") if options.only else list(rows)
        rows = {name: command for name, command in rows.items() if name in ("bare", *only)}
        started: dict[str, list[Start]] = {name: [] for name in rows}
        for turn in range(options.rounds + 1):  # the first round fills our caches and the system's
            for name, command in rows.items():
                found = start_once(command, Path(folder) / f"{name}-{turn}")
                if turn:
                    started[name].append(found)
                print(
                    f"  round {turn} {name}: {found.wall:.2f} s, CPU {found.cpu:.2f} s, {found.mebibytes:.0f} MiB",
                    flush=True,
                )
        show(started)


def commands(folder: Path, *, big: bool) -> dict[str, list[str]]:
    """The command of each row. `DONE` is replaced by the file that it writes lines to, `OUT` by the run's folder."""
    from lora_trainer.builtin import BASE_FOLDER
    from lora_trainer.core.imports import OPTIONAL

    model = write_big_model(BASE_FOLDER, folder / "model") if big else BASE_FOLDER
    side = (256 if big else 128) // 8
    own = [sys.executable, "-m", "lora_trainer", "train", "--preset", PRESET, "--model", str(model), "--output", "OUT"]
    own += ["--name", "run", "--max-steps", "1000", "--set", "sample.every_n_steps=0", "--set", f"lora.rank={RANK}"]
    own += ["--set", f"cache.dir={folder / 'cache'}", *(["--set", "data.resolution=256"] if big else [])]
    own += ["--set", f"train.effective_batch_size={BATCH}", "--set", "lora.target_modules=attention+ff"]
    bare = [str(model), "DONE", str(BATCH), str(side), str(RANK)]
    return {
        "bare": [sys.executable, "-c", BARE, "", *bare],
        "bare_hidden": [sys.executable, "-c", BARE, ",".join(OPTIONAL), *bare],
        "ours": [*own, "--set", "validation.split=0"],
        "ours_validated": own,
    }


def write_big_model(base: Path, folder: Path) -> Path:
    """Write the built-in base model with a U-Net of 30 M random weights, for 256 px, and return its folder."""
    import shutil

    import torch
    from diffusers import UNet2DConditionModel

    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("unet"))
    config = dict(UNet2DConditionModel.load_config(base, subfolder="unet"))
    config |= {"block_out_channels": BIG_WIDTHS, "sample_size": 256 // 8}
    torch.manual_seed(0)
    unet = UNet2DConditionModel.from_config(config)
    print(f"U-Net of {sum(each.numel() for each in unet.parameters()) / 1e6:.1f} M weights")
    unet.save_pretrained(folder / "unet")
    return folder


def start_once(command: Sequence[str], folder: Path) -> Start:
    """Start the process, wait for its first and its last measured step, and end it."""
    folder.mkdir()
    own = "OUT" in command
    done = folder / "run" / "metrics.jsonl" if own else folder / "done"
    arguments = [{"OUT": str(folder), "DONE": str(done)}.get(part, part) for part in command]
    with (folder / "output").open("wb") as output:
        began = time.perf_counter()
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(process, done, 1, folder)
            wall, cpu = time.perf_counter() - began, cpu_seconds(process.pid)
            wait_for(process, done, STEPS, folder)
            return Start(wall, cpu, peak(process.pid))
        finally:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], file: Path, lines: int, folder: Path) -> None:
    """Wait until the file has this many lines."""
    until = time.monotonic() + LIMIT
    while not file.is_file() or file.read_bytes().count(b"\n") < lines:
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{' '.join(process.args[:6])} finished no step:\n{(folder / 'said').read_text()[-2000:]}")  # type: ignore[index]
        time.sleep(0.005)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak(pid: int) -> float:
    """Peak memory in RAM, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def show(started: Mapping[str, Sequence[Start]]) -> None:
    """Print medians, the ratios to `bare` in the same round with their spread, and the memory over `bare`'s."""
    print("row               wall s   CPU s   wall over bare: median, least, most   CPU over bare     MiB   over bare")
    bare = started["bare"]
    for name, found in started.items():
        wall = sorted(own.wall / least.wall for own, least in zip(found, bare, strict=True))
        cpu = statistics.median(own.cpu / least.cpu for own, least in zip(found, bare, strict=True))
        memory = statistics.median(each.mebibytes for each in found)
        more = memory - statistics.median(each.mebibytes for each in bare)
        figures = f"{statistics.median(e.wall for e in found):7.2f} {statistics.median(e.cpu for e in found):7.2f}"
        ratios = f"{statistics.median(wall):13.3f}, {wall[0]:.3f}, {wall[-1]:.3f} {cpu:24.3f}"
        print(f"{name:16} {figures} {ratios} {memory:12.0f} {more:+9.0f}")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
