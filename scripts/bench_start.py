"""What it takes from the start of a process to the end of its first step, and the memory at the end of its tenth.

    python scripts/bench_start.py --rounds 5

Whole processes in turn: `bare` is a script that imports torch, diffusers and peft, loads the same model, puts the same
LoRA on it and trains on what lies ready, nothing else; `bare_hidden` the same with the optional libraries hidden that
no step needs; `ours` is `lora-trainer train` with warm caches, from its config to its step, `ours_validated` with the
validation loss of the base before it, as is the default. Both write a line when a step is done; a step's time is when
that line is seen. Memory is the most that lay in RAM until then (VmHWM). Linux only.
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
    """Of one process: wall seconds and CPU seconds to the end of its first step, MiB at the end of its tenth."""

    wall: float
    cpu: float
    mebibytes: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--big", action="store_true", help="a U-Net of 30 M weights at 256 px in place of the built-in base"
    )
    parser.add_argument("--only", default="", help="rows, by comma; `bare` is always there")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        ways = commands(Path(folder), big=asked.big)
        only = asked.only.split(",") if asked.only else list(ways)
        ways = {name: way for name, way in ways.items() if name in ("bare", *only)}
        started: dict[str, list[Start]] = {name: [] for name in ways}
        for turn in range(asked.rounds + 1):  # the first fills caches, ours and the system's
            for name, command in ways.items():
                found = one_start(command, Path(folder) / f"{name}-{turn}")
                if turn:
                    started[name].append(found)
                print(
                    f"  round {turn} {name}: {found.wall:.2f} s, CPU {found.cpu:.2f} s, {found.mebibytes:.0f} MiB",
                    flush=True,
                )
        show(started)


def commands(folder: Path, *, big: bool) -> dict[str, list[str]]:
    """How each way is started: `DONE` stands for the file that it writes lines to, `OUT` for the folder of a run."""
    from lora_trainer.builtin import BASE_FOLDER
    from lora_trainer.core.imports import OPTIONAL

    model = big_model(BASE_FOLDER, folder / "model") if big else BASE_FOLDER
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


def big_model(base: Path, folder: Path) -> Path:
    """The built-in base with a U-Net of 30 M random weights, for 256 px. Returns the folder."""
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


def one_start(command: Sequence[str], folder: Path) -> Start:
    """Start it, wait for its first and its tenth step, and end it."""
    folder.mkdir()
    own = "OUT" in command
    done = folder / "run" / "metrics.jsonl" if own else folder / "done"
    words = [{"OUT": str(folder), "DONE": str(done)}.get(word, word) for word in command]
    with (folder / "said").open("wb") as said:
        began = time.perf_counter()
        process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)
        try:
            wait_for(process, done, 1, folder)
            wall, cpu = time.perf_counter() - began, cpu_seconds(process.pid)
            wait_for(process, done, STEPS, folder)
            return Start(wall, cpu, peak(process.pid))
        finally:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], file: Path, lines: int, folder: Path) -> None:
    """Wait until the file holds so many lines."""
    until = time.monotonic() + LIMIT
    while not file.is_file() or file.read_bytes().count(b"\n") < lines:
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{' '.join(process.args[:6])} made no step:\n{(folder / 'said').read_text()[-2000:]}")  # type: ignore[index]
        time.sleep(0.005)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak(pid: int) -> float:
    """The most that ever lay in RAM, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def show(started: Mapping[str, Sequence[Start]]) -> None:
    """A table: medians, the ratio to `bare` in the same round with its spread, and memory over `bare`'s."""
    print("row               wall s   CPU s   wall over bare: median, least, most   CPU over bare     MiB   over bare")
    bare = started["bare"]
    for name, found in started.items():
        wall = sorted(own.wall / least.wall for own, least in zip(found, bare, strict=True))
        cpu = statistics.median(own.cpu / least.cpu for own, least in zip(found, bare, strict=True))
        held = statistics.median(each.mebibytes for each in found)
        more = held - statistics.median(each.mebibytes for each in bare)
        figures = f"{statistics.median(e.wall for e in found):7.2f} {statistics.median(e.cpu for e in found):7.2f}"
        ratios = f"{statistics.median(wall):13.3f}, {wall[0]:.3f}, {wall[-1]:.3f} {cpu:24.3f}"
        print(f"{name:16} {figures} {ratios} {held:12.0f} {more:+9.0f}")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
