"""Distill the built-in base: a student that draws in four steps without a guidance scale.

    python scripts/builtin_base/distill.py --work student-work --out bases/student

The base draws random scenes in eight steps of DDIM with classifier-free guidance. The student learns to make two of
these steps in one, from the caption alone: progressive distillation (arXiv:2202.00512) with guidance distillation
(arXiv:2210.03142), on stored trajectories. Its folder differs from the base's in the U-Net's weights and in the
scheduler, which has the spacing `trailing` as SDXL Turbo's. About five minutes of one core. Progress is kept in WORK: a
second call continues after the last finished stage. The weights take 7.6 MB, and are not in the repository.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base.drawing import TEMPLATES, random_scene
from builtin_base.train import EMPTY_CAPTIONS, SIZES

BASE = Path(__file__).resolve().parents[2] / "lora_trainer" / "builtin" / "base"
STUDENT_STEPS, TEACHER_STEPS = 4, 8
GUIDANCE = 3.0


@dataclass(frozen=True)
class Jump:
    """What one step of the student's DDIM does: x at the next timestep is `keep` x + `add` epsilon (arXiv:2010.02502)."""

    t: int
    keep: float
    add: float


def jumps(scheduler: DDIMScheduler, steps: int) -> list[Jump]:
    """The steps of a trailing schedule from pure noise to the image."""
    alphas, stride = scheduler.alphas_cumprod.double(), 1000 // steps
    found = []
    for t in range(999, 0, -stride):
        now = float(alphas[t])
        then = float(alphas[t - stride]) if t >= stride else float(scheduler.final_alpha_cumprod)
        keep = (then / now) ** 0.5
        found.append(Jump(t, keep, (1.0 - then) ** 0.5 - keep * (1.0 - now) ** 0.5))
    return found


def cosine_rate(step: int, steps: int, warmup: int) -> float:
    """Share of the peak rate at a step: linear warm-up, then half a cosine to 1 %."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def log(stage: str, step: int, steps: int, loss: float, started: float) -> None:
    print(f"{stage} {step:5d}/{steps} loss {loss:.4f} {time.monotonic() - started:6.0f} s", flush=True)


def load(folder: Path) -> Any:
    """A folder's pipeline in fp32, silent."""
    pipeline: Any = StableDiffusionPipeline.from_pretrained(
        folder, torch_dtype=torch.float32, use_safetensors=True, local_files_only=True, safety_checker=None
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def encode(pipeline: Any, captions: list[str]) -> torch.Tensor:
    """[B, 77, width]."""
    ids = pipeline.tokenizer(captions, padding="max_length", max_length=77, truncation=True, return_tensors="pt")
    return pipeline.text_encoder(ids.input_ids)[0]


@torch.no_grad()
def draw_trajectories(pipeline: Any, count: int, seed: int, batch: int = 24) -> list[dict[str, Any]]:
    """Batches of one size: x [B, 5, C, h, w] where the student's steps begin and end, and their captions."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    steps = jumps(pipeline.scheduler, TEACHER_STEPS)
    found, started = [], time.monotonic()
    for number in range(-(-count // batch)):
        width, height = SIZES[number % len(SIZES)]
        captions = [
            "" if rng.random() < EMPTY_CAPTIONS else random_scene(rng).caption(rng.choice(TEMPLATES))
            for _ in range(batch)
        ]
        context = encode(pipeline, [*captions, *[""] * batch])
        x = torch.randn((batch, pipeline.unet.config.in_channels, height // 8, width // 8), generator=noise)
        kept = [x]
        for index, step in enumerate(steps):
            with torch.autocast("cpu", torch.bfloat16):
                both = pipeline.unet(torch.cat([x, x]), step.t, context).sample.float()
            conditional, unconditional = both.chunk(2)
            x = step.keep * x + step.add * (unconditional + GUIDANCE * (conditional - unconditional))
            if (index + 1) % (TEACHER_STEPS // STUDENT_STEPS) == 0:
                kept.append(x)
        found.append({"x": torch.stack(kept, dim=1).half(), "captions": captions})
        if number % 5 == 0:
            log("trajectories", number * batch, count, 0.0, started)
    return found


@torch.no_grad()
def distances(pipeline: Any, trajectories: list[dict[str, Any]]) -> list[float]:
    """How far a model ends from the teacher in the student's steps: the mean squared difference of each one's latents."""
    found: list[float] = []
    for each in trajectories:
        x, context = each["x"][:, 0].float(), encode(pipeline, each["captions"])
        for step in jumps(pipeline.scheduler, STUDENT_STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                x = step.keep * x + step.add * pipeline.unet(x, step.t, context).sample.float()
        found += (x - each["x"][:, -1].float()).square().mean((1, 2, 3)).tolist()
    return found


def train_student(
    pipeline: Any, trajectories: list[dict[str, Any]], steps: int, seed: int, batch: int, peak: float
) -> None:
    """Move the U-Net's weights, so that one step makes a whole jump; the error is that of x after it."""
    torch.manual_seed(seed)
    rng, unet = random.Random(seed), pipeline.unet.train()
    own = jumps(pipeline.scheduler, STUDENT_STEPS)
    contexts = [encode(pipeline, each["captions"]) for each in trajectories]
    optimizer = torch.optim.AdamW(unet.parameters(), lr=peak, weight_decay=0.0, fused=True)
    running, started = 0.0, time.monotonic()
    for step in range(steps):
        number = rng.randrange(len(trajectories))
        x, context = trajectories[number]["x"].float(), contexts[number]
        rows = torch.tensor(rng.choices(range(len(x)), k=batch))
        index = torch.tensor(rng.choices(range(STUDENT_STEPS), k=batch))
        t = torch.tensor([own[each].t for each in index])
        keep, add = (
            torch.tensor([getattr(own[each], name) for each in index]).view(-1, 1, 1, 1) for name in ("keep", "add")
        )
        start, end = x[rows, index], x[rows, index + 1]
        for group in optimizer.param_groups:
            group["lr"] = peak * cosine_rate(step, steps, warmup=20)
        with torch.autocast("cpu", torch.bfloat16):
            predicted = unet(start, t, context[rows]).sample
        loss = (keep * start + add * predicted.float() - end).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running = 0.95 * running + 0.05 * loss.item() if step else loss.item()
        if step % 20 == 0 or step + 1 == steps:
            log("student", step, steps, running, started)
    unet.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the trajectories")
    parser.add_argument("--out", type=Path, required=True, help="the student's folder")
    parser.add_argument("--base", type=Path, default=BASE)
    parser.add_argument("--trajectories", type=int, default=600)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    pipeline, kept = load(args.base), args.work / "trajectories.pt"
    if not kept.exists():
        drawn = draw_trajectories(pipeline, args.trajectories, args.seed + 50_000)
        torch.save(drawn, kept.with_suffix(".making"))
        kept.with_suffix(".making").rename(kept)
    train_student(pipeline, torch.load(kept, weights_only=True), args.steps, args.seed, args.batch, args.rate)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, timestep_spacing="trailing")
    for part in (pipeline.vae, pipeline.unet, pipeline.text_encoder):
        part.half()
    pipeline.save_pretrained(args.out, safe_serialization=True)
    print(f"{args.out}: {time.process_time():.0f} s of CPU time")


if __name__ == "__main__":
    main()
