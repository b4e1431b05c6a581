"""Measure what each precision of the frozen base model costs in learning: the same run, side by side.

    python scripts/bench_precisions.py FOLDER --steps 150 --seeds 42 7

Prints for each precision and seed the validation losses of the run and their distance from fp32, and the prediction error
of the untouched denoiser against fp32. `spread` is what another seed changes.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from pathlib import Path

import torch

from lora_trainer.builtin import BASE_FOLDER, DATA_FOLDER
from lora_trainer.config.layers import Layer
from lora_trainer.models.families.sd15 import FAMILY
from lora_trainer.models.quantization.store import make_quantizer
from lora_trainer.monitor.trackers import VALIDATION, Trackers, read_lines
from lora_trainer.run.inputs import read_inputs
from lora_trainer.run.order import Order, plain_console, run_folder
from lora_trainer.run.prepare import prepare
from lora_trainer.run.session import open_session
from lora_trainer.run.settings import settle
from lora_trainer.run.start import fixed_settings
from lora_trainer.run_folder.progress import unwatched
from lora_trainer.training.loop import train

VARIANTS: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": {"memory.weight_dtype": "bf16"},
    "fp8": {"memory.weight_dtype": "fp8"},
    "int8": {"memory.weight_dtype": "int8"},
    "int8, products": {"memory.weight_dtype": "int8", "memory.int8_matmul": True},
    "nf4": {"memory.weight_dtype": "nf4"},
}


def validation_losses(folder: Path, variant: str, seed: int, steps: int, every: int) -> dict[int, float]:
    """Validation loss by step of one run of the training loop, without gate and images."""
    name = f"{variant.replace(', ', '-')}-{seed}"
    settings: dict[str, object] = {
        "memory.weight_dtype": "fp32",
        **VARIANTS[variant],
        "validation.every_n_steps": every,
    }
    settings |= {"train.seed": seed, "train.max_steps": steps, "run.output": str(folder), "run.name": name}
    settings |= {
        "validation.split": 0.1,
        "model.path": str(BASE_FOLDER),
        "data.sources": (str(DATA_FOLDER),),
        "sample.every_n_steps": 0,
    }
    values: dict[str, dict[str, object]] = {}
    for key, value in (settings | {"cache.dir": str(folder / "cache")}).items():
        section, _, setting = key.partition(".")
        values.setdefault(section, {})[setting] = value
    resolved = settle([], [Layer("bench", values)])
    order = Order(resolved, run_folder(resolved.config), plain_console(quiet=True))
    inputs = read_inputs(order.config)
    session = open_session(order, inputs)
    order.folder.mkdir(parents=True)
    _, run = prepare(session, fixed_settings(order.config, inputs, session.choices))
    trackers = Trackers(run.folder, resume_step=-1)
    try:
        train(run, None, trackers, nullcontext(unwatched))
    finally:
        trackers.close()
    return {int(row["step"]): float(row["loss"]) for row in read_lines(run.folder / VALIDATION)}


@torch.no_grad()
def prediction_errors() -> dict[str, float]:
    """Relative error of the untouched denoiser's prediction against fp32, over noise levels, by variant."""
    found: dict[str, torch.Tensor] = {}
    for variant, settings in VARIANTS.items():
        stored = settings.get("memory.weight_dtype", "fp32")
        dtype = torch.float32 if stored == "fp32" else torch.bfloat16
        quantize = make_quantizer(stored, products="memory.int8_matmul" in settings)
        denoiser = FAMILY.denoiser.load(BASE_FOLDER, dtype, torch.device("cpu"), quantize)
        width = int(denoiser.config.cross_attention_dim)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, int(denoiser.config.in_channels), 16, 16, generator=generator).to(dtype)
        embeds = torch.randn(8, 77, width, generator=generator).to(dtype)
        t = torch.linspace(20, 980, 8).long()
        found[variant] = FAMILY.denoiser.predict(denoiser, x, t, {"embeds": embeds}, torch.zeros(8, 6)).float()
    exact = found["fp32"]
    return {variant: float((each - exact).norm() / exact.norm()) for variant, each in found.items()}


def print_results(results: dict[str, dict[int, dict[int, float]]], errors: dict[str, float]) -> None:
    seeds = list(results["fp32"])
    last = max(results["fp32"][seeds[0]])
    spread = statistics.pstdev([results["fp32"][seed][last] for seed in seeds]) if len(seeds) > 1 else float("nan")
    print(f"spread of fp32 over seeds at step {last}: {spread:.5f}")
    for variant, runs in results.items():
        apart = [abs(runs[seed][last] - results["fp32"][seed][last]) for seed in runs]
        curves = "; ".join(
            f"seed {seed}: " + " ".join(f"{loss:.5f}" for _, loss in sorted(run.items())) for seed, run in runs.items()
        )
        print(
            f"{variant}: prediction error {errors[variant]:.4f}, {curves}, apart from fp32 at most {max(apart):.5f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    arguments = parser.parse_args()
    results = {
        variant: {
            seed: validation_losses(arguments.folder, variant, seed, arguments.steps, arguments.every)
            for seed in arguments.seeds
        }
        for variant in VARIANTS
    }
    print_results(results, prediction_errors())
