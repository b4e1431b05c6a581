"""Train a further miniature base from nothing: one of SDXL's shape, or one of flow matching (SD3.5's shape).

    python scripts/builtin_base/train_shape.py sdxl OUT
    python scripts/builtin_base/train_shape.py flow OUT
    python scripts/builtin_base/judge.py --base OUT --sheet OUT.png

They are not part of the package: what is measured on the built-in base can be repeated on them. The autoencoder and the
tokenizer are the built-in base's; the denoiser and two text encoders are trained together on images drawn by
`drawing.py`. Progress is kept in WORK: a second call resumes, and with fewer --steps the learning rate falls sooner.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
from dataclasses import astuple
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from PIL import Image
from transformers import CLIPTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base.drawing import TEMPLATES, Scene, draw
from builtin_base.shapes import SHAPES, TOKENS, Attention, Batch
from builtin_base.train import EMA_DECAY, EMPTY_CAPTIONS, SIZES, EncodedImages, cosine_rate, encode_images
from lora_trainer.builtin import BASE_FOLDER

PEAK_RATE = 1e-3
WARMUP = 100  # steps
SAVE_SECONDS = 60.0  # of CPU time


def view(scene: Scene, width: int, height: int, rng: random.Random) -> tuple[Image.Image, list[int]]:
    """An image of width x height and its six sizes, so that these mean something.

    A quarter are cropped out of a larger drawing, and originals smaller than the image are drawn small and enlarged.
    """
    margin = (rng.randint(0, 24), rng.randint(0, 24)) if rng.random() < 0.25 else (0, 0)
    left, top = rng.randint(0, margin[0]), rng.randint(0, margin[1])
    whole = width + margin[0], height + margin[1]
    scale = math.exp(rng.uniform(math.log(0.5), math.log(3.0))) if rng.random() < 0.6 else 1.0
    original = tuple(round(side * scale) for side in whole)
    image = draw(scene, *(min(pair) for pair in zip(original, whole, strict=True)))
    image = image.resize(whole, Image.Resampling.BICUBIC).crop((left, top, left + width, top + height))
    return image, [original[1], original[0], top, left, height, width]


def load_views(file: Path, vae: AutoencoderKL, count: int, seed: int) -> dict[tuple[int, int], EncodedImages]:
    """The same, kept in a file for the next call."""
    if not file.exists():
        encoded = encode_images(vae, count, seed, view)
        torch.save({size: (p.moments, p.sizes, [astuple(s) for s in p.scenes]) for size, p in encoded.items()}, file)
    stored = torch.load(file, weights_only=True)
    return {
        size: EncodedImages(moments, sizes, [Scene(*s) for s in scenes])
        for size, (moments, sizes, scenes) in stored.items()
    }


class Source:
    """Batches as a function of the step, so that a resumed run reads the same."""

    def __init__(self, images: dict, scale: float, tokenizer: CLIPTokenizer, batch: int, seed: int) -> None:
        self.images, self.scale, self.size, self.seed = images, scale, batch, seed
        captions = {"", *(s.caption(t) for each in self.images.values() for s in each.scenes for t in TEMPLATES)}
        padded = {"padding": "max_length", "max_length": TOKENS, "truncation": True}
        self.tokens = {caption: tokenizer(caption, **padded).input_ids for caption in captions}

    def batch(self, step: int) -> Batch:
        rng, generator = random.Random(f"{self.seed} {step}"), torch.Generator().manual_seed(self.seed + step)
        images = self.images[rng.choice(SIZES)]
        chosen = [rng.randrange(len(images.scenes)) for _ in range(self.size)]
        captions = [
            "" if rng.random() < EMPTY_CAPTIONS else images.scenes[i].caption(rng.choice(TEMPLATES)) for i in chosen
        ]
        mean, spread = images.moments[chosen].float().chunk(2, dim=1)
        return Batch(
            latents=(mean + spread * torch.randn(mean.shape, generator=generator)) * self.scale,
            ids=torch.tensor([self.tokens[caption] for caption in captions]),
            sizes=images.sizes[chosen],
            noise=torch.randn(mean.shape, generator=generator),
            draws=torch.randn(self.size, generator=generator),
        )


class Training:
    """The parts, their average and the optimizer, with the steps and seconds taken so far."""

    def __init__(self, shape: str, tokenizer: CLIPTokenizer, seed: int) -> None:
        torch.manual_seed(seed)
        self.losses = SHAPES[shape].losses
        self.parts = SHAPES[shape].make(tokenizer).train()
        self.average = copy.deepcopy(self.parts).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.parts.parameters(), lr=PEAK_RATE, weight_decay=0.01, fused=True)
        self.step, self.seconds, self.running = 0, 0.0, 1.0

    def train_step(self, batch: Batch, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = PEAK_RATE * rate
        with torch.autocast("cpu", torch.bfloat16), Attention():
            loss = self.losses(self.parts, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parts.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        decay = min(EMA_DECAY, (self.step + 1) / (self.step + 10))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.parts.parameters()), 1.0 - decay)
        self.running = 0.98 * self.running + 0.02 * loss.item() if self.step else loss.item()
        self.step += 1

    def save(self, file: Path) -> None:
        modules = {name: getattr(self, name).state_dict() for name in ("parts", "average", "optimizer")}
        numbers = {"step": self.step, "seconds": self.seconds, "running": self.running}
        torch.save({**modules, **numbers}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        for name in ("parts", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.seconds, self.running = state["step"], state["seconds"], state["running"]


def train(training: Training, source: Source, steps: int, budget: float, file: Path) -> None:
    """Train until `steps` steps or `budget` seconds of CPU time, whichever comes first: the learning rate's cosine ends there."""
    before, started, saved = training.seconds, time.process_time(), training.seconds
    while training.step < steps and training.seconds < budget:
        done = max(training.step, round(steps * training.seconds / budget))
        warmup = min(1.0, (training.step + 1) / WARMUP)
        training.train_step(source.batch(training.step), warmup * cosine_rate(done, steps, warmup=0))
        training.seconds = before + time.process_time() - started
        if training.step % 50 == 0:
            print(f"step {training.step}/{steps}  loss={training.running:.4f}  {training.seconds:.0f} s", flush=True)
        if training.seconds - saved > SAVE_SECONDS:
            training.save(file)
            saved = training.seconds
    training.save(file)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path, help="write the finished base here")
    parser.add_argument(
        "--work", type=Path, help="folder of drawn images and checkpoints; base-work beside OUT where it is not set"
    )
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument(
        "--budget-minutes", type=float, default=90.0, help="of CPU time over all calls, after which it ends"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--images", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    work = args.work or args.out.with_name("base-work")
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = CLIPTokenizer.from_pretrained(BASE_FOLDER / "tokenizer", model_max_length=TOKENS, local_files_only=True)
    vae = AutoencoderKL.from_pretrained(BASE_FOLDER / "vae", torch_dtype=torch.float32, local_files_only=True).eval()
    training = Training(args.shape, tokenizer, args.seed)
    checkpoint = work / f"{args.shape}.pt"
    if checkpoint.exists():
        training.load(checkpoint)
    images = load_views(work / f"images-{args.images}-{args.seed}.pt", vae, args.images, args.seed)
    source = Source(images, vae.config.scaling_factor, tokenizer, args.batch, args.seed)
    print(f"{args.shape}: {sum(p.numel() for p in training.parts.parameters()) / 1e6:.2f} M parameters", flush=True)
    train(training, source, args.steps, 60.0 * args.budget_minutes, checkpoint)
    SHAPES[args.shape].assemble(training.average, vae.half(), tokenizer).save_pretrained(args.out)
    print(f"{args.out}: {training.step} steps in {training.seconds / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
