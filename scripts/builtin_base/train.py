"""Train a miniature base: the built-in one (sd15), one of SDXL's shape, or one of flow matching (SD3.5's shape).

    python scripts/builtin_base/train_vae.py --work base-work --minutes 20
    python scripts/builtin_base/train.py sd15 OUT --work base-work --minutes 240
    python scripts/builtin_base/judge.py --base OUT --sheet shapes.png
    python scripts/builtin_base/named.py --work base-work --base OUT --sheet names.png

The denoiser and the text encoders learn together, on latents that are encoded once: drawn shapes (`drawing.py`) and named
icons (`icons.py`). Only the built-in base is part of the package; what is measured on it can be repeated on the
others. Progress is kept in WORK: a second call goes on, and with other --minutes the learning rate falls sooner or later.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base import architecture
from builtin_base.drawing import TEMPLATES, Scene, draw, random_scene
from builtin_base.icons import collect
from builtin_base.muon import Optimizers, rate
from builtin_base.named import learned, random_named_scene, show, spoken
from builtin_base.shapes import SHAPES, Attention, Batch
from builtin_base.train_vae import as_tensor
from lora_trainer.core.io import atomic_path

SIZES = ((128, 128), (128, 128), (128, 128), (128, 128), (160, 96), (96, 160))  # width, height
EMPTY_CAPTIONS = 0.1
EMA_DECAY = 0.999
PEAK_RATE = 1e-3
NAMED_SHARE = 0.75  # of a batch of square images
SAVE_SECONDS = 300.0


@dataclass(frozen=True)
class EncodedImages:
    """Images of one size: posterior means and spreads [N, 2 C, h, w], SDXL's sizes [N, 6], and each one's captions."""

    moments: torch.Tensor
    sizes: torch.Tensor
    captions: list[tuple[str, ...]]


Shown = tuple[Image.Image, list[int], tuple[str, ...]]  # an image, its six sizes, its captions


def captions_of(scene: Scene) -> tuple[str, ...]:
    return tuple(scene.caption(template) for template in TEMPLATES)


def whole(width: int, height: int, rng: random.Random) -> Shown:
    """A random scene of the shapes, neither cropped nor enlarged."""
    scene = random_scene(rng)
    return draw(scene, width, height), [height, width, 0, 0, height, width], captions_of(scene)


def view(width: int, height: int, rng: random.Random) -> Shown:
    """The same, with six sizes that mean something.

    A quarter are cropped out of a larger drawing, and originals smaller than the image are drawn small and enlarged.
    """
    scene = random_scene(rng)
    margin = (rng.randint(0, 24), rng.randint(0, 24)) if rng.random() < 0.25 else (0, 0)
    left, top = rng.randint(0, margin[0]), rng.randint(0, margin[1])
    full = width + margin[0], height + margin[1]
    scale = math.exp(rng.uniform(math.log(0.5), math.log(3.0))) if rng.random() < 0.6 else 1.0
    original = tuple(round(side * scale) for side in full)
    image = draw(scene, *(min(pair) for pair in zip(original, full, strict=True)))
    image = image.resize(full, Image.Resampling.BICUBIC).crop((left, top, left + width, top + height))
    return image, [original[1], original[0], top, left, height, width], captions_of(scene)


@torch.no_grad()
def encode_images(vae: AutoencoderKL, count: int, make: Callable[[int], Shown]) -> EncodedImages:
    """The latents of `count` images of one size."""
    moments, sizes, captions = [], [], []
    for start in range(0, count, 32):
        part = [make(number) for number in range(start, min(count, start + 32))]
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(as_tensor([image for image, _, _ in part])).latent_dist
        moments.append(torch.cat([posterior.mean, posterior.std], dim=1).half())
        sizes += [numbers for _, numbers, _ in part]
        captions += [each for _, _, each in part]
    return EncodedImages(torch.cat(moments), torch.tensor(sizes, dtype=torch.float32), captions)


def encode_all(
    vae: AutoencoderKL, work: Path, scenes: int, views: int, sized: bool, seed: int
) -> dict[tuple[int, int] | str, EncodedImages]:
    """`scenes` drawn images by size, and under "named" each named icon `views` times. Kept in a file of WORK."""
    weights = hashlib.sha256(b"".join(each.numpy().tobytes() for each in vae.state_dict().values())).hexdigest()[:8]
    file = work / f"latents-{weights}-{scenes}-{views}-{int(sized)}-{seed}.pt"
    if not file.is_file():
        rng, started = random.Random(seed), time.monotonic()
        make = view if sized else whole
        found: dict[tuple[int, int] | str, EncodedImages] = {}
        for size in dict.fromkeys(SIZES):
            count = max(1, scenes * SIZES.count(size) // len(SIZES))
            found[size] = encode_images(vae, count, lambda _, size=size: make(*size, rng))
        if views:
            icons, pixels = collect(work)
            numbers = learned(icons)

            def named(number: int) -> Shown:
                scene = random_named_scene(icons, [numbers[number % len(numbers)]], rng)
                return show(scene, pixels), [128, 128, 0, 0, 128, 128], scene.captions()

            found["named"] = encode_images(vae, views * len(numbers), named)
        with atomic_path(file) as temporary:
            torch.save({key: (p.moments, p.sizes, p.captions) for key, p in found.items()}, temporary)
        print(f"images encoded in {time.monotonic() - started:.0f} s", flush=True)
    return {key: EncodedImages(*parts) for key, parts in torch.load(file, weights_only=True).items()}


class Source:
    """Batches as a function of the step, so that a resumed run reads the same."""

    def __init__(
        self, images: dict, scale: float, tokenizer: CLIPTokenizer, tokens: int, batch: int, seed: int
    ) -> None:
        self.images, self.scale, self.size, self.seed = images, scale, batch, seed
        captions = {"", *(caption for part in images.values() for each in part.captions for caption in each)}
        padded = {"padding": "max_length", "max_length": tokens, "truncation": True}
        self.tokens = {caption: tokenizer(caption, **padded).input_ids for caption in captions}

    def batch(self, step: int) -> Batch:
        rng, generator = random.Random(f"{self.seed} {step}"), torch.Generator().manual_seed(self.seed + step)
        size = rng.choice(SIZES)
        named = round(NAMED_SHARE * self.size) if size == (128, 128) and "named" in self.images else 0
        chosen = [
            (part, rng.randrange(len(part.captions)))
            for part, count in ((self.images[size], self.size - named), (self.images.get("named"), named))
            for _ in range(count)
        ]
        captions = ["" if rng.random() < EMPTY_CAPTIONS else rng.choice(part.captions[i]) for part, i in chosen]
        mean, spread = torch.stack([part.moments[i] for part, i in chosen]).float().chunk(2, dim=1)
        return Batch(
            latents=(mean + spread * torch.randn(mean.shape, generator=generator)) * self.scale,
            ids=torch.tensor([self.tokens[caption] for caption in captions]),
            sizes=torch.stack([part.sizes[i] for part, i in chosen]),
            noise=torch.randn(mean.shape, generator=generator),
            draws=torch.randn(self.size, generator=generator),
        )


class Training:
    """The parts, their average and the optimizers, with the steps and seconds taken so far."""

    def __init__(self, shape: str, tokenizer: CLIPTokenizer, seed: int) -> None:
        torch.manual_seed(seed)
        self.losses = SHAPES[shape].losses
        self.parts = SHAPES[shape].make(tokenizer).train()
        self.average = copy.deepcopy(self.parts).requires_grad_(False)
        self.optimizers = Optimizers(self.parts, PEAK_RATE, weight_decay=0.01)
        self.step, self.seconds, self.running = 0, 0.0, 1.0

    def start_from(self, folder: Path) -> None:
        """Take the weights of a pipeline's folder in place of random ones."""
        for name, part in self.parts.items():
            (file,) = (folder / name).glob("*.safetensors")
            part.load_state_dict(load_file(file))
        self.average.load_state_dict(self.parts.state_dict())

    def train_step(self, batch: Batch, share: float) -> None:
        with torch.autocast("cpu", torch.bfloat16), Attention():
            loss = self.losses(self.parts, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parts.parameters(), 1.0)
        self.optimizers.step(share)
        decay = min(EMA_DECAY, (self.step + 1) / (self.step + 10))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.parts.parameters()), 1.0 - decay)
        self.running = 0.99 * self.running + 0.01 * loss.item() if self.step else loss.item()
        self.step += 1

    def save(self, file: Path) -> None:
        modules = {name: getattr(self, name).state_dict() for name in ("parts", "average", "optimizers")}
        numbers = {"step": self.step, "seconds": self.seconds, "running": self.running}
        with atomic_path(file) as temporary:
            torch.save({**modules, **numbers}, temporary)

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        for name in ("parts", "average", "optimizers"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.seconds, self.running = state["step"], state["seconds"], state["running"]


def train(training: Training, source: Source, steps: int, budget: float, file: Path) -> None:
    """Train until `steps` steps or `budget` seconds, whichever comes first; the learning rate falls towards that end."""
    saved = training.seconds
    while training.step < steps and training.seconds < budget:
        started = time.monotonic()
        share = max(training.step / steps, training.seconds / budget)
        training.train_step(source.batch(training.step), rate(share))
        training.seconds += time.monotonic() - started
        if training.step % 100 == 0:
            print(f"step {training.step}  loss {training.running:.4f}  {training.seconds / 60:.1f} min", flush=True)
        if training.seconds - saved > SAVE_SECONDS:
            training.save(file)
            saved = training.seconds
    training.save(file)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path, help="write the finished base here")
    parser.add_argument("--work", type=Path, required=True, help="folder of icons, latents and checkpoints")
    parser.add_argument("--vae", type=Path, help="an autoencoder's folder (default: vae of --start, or of WORK)")
    parser.add_argument("--start", type=Path, help="a base of this shape whose weights, VAE and tokenizer are taken")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop here even if there is time left")
    parser.add_argument("--minutes", type=float, default=120.0, help="of training, over all calls")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=12_000, help="drawn images")
    parser.add_argument("--views", type=int, default=6, help="of each named icon; 0: the shapes alone")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[args.shape]
    names = []
    if args.views:
        icons, _ = collect(args.work)
        names = [spoken(icons[number].name) for number in learned(icons)]
    if args.start:
        tokenizer = CLIPTokenizer.from_pretrained(
            args.start / "tokenizer", model_max_length=shape.tokens, local_files_only=True
        )
    else:
        tokenizer = architecture.make_tokenizer(args.work / "tokenizer", names, shape.tokens)
    vae_folder = args.vae or (args.start or args.work) / "vae"
    vae = AutoencoderKL.from_pretrained(vae_folder, torch_dtype=torch.float32, local_files_only=True)
    training = Training(args.shape, tokenizer, args.seed)
    checkpoint = args.work / f"{args.shape}.pt"
    if args.start and not checkpoint.exists():
        training.start_from(args.start)
    if checkpoint.exists():
        training.load(checkpoint)
    images = encode_all(vae.eval(), args.work, args.images, args.views, shape.sized, args.seed)
    source = Source(images, vae.config.scaling_factor, tokenizer, shape.tokens, args.batch, args.seed)
    print(f"{args.shape}: {sum(p.numel() for p in training.parts.parameters()) / 1e6:.2f} M parameters", flush=True)
    train(training, source, args.steps, 60.0 * args.minutes, checkpoint)
    shape.assemble(training.average, vae.half(), tokenizer).save_pretrained(args.out, safe_serialization=True)
    print(f"{args.out}: {training.step} steps in {training.seconds / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
