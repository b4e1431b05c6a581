"""Train the built-in base from nothing, on images drawn on the way.

    python scripts/builtin_base/train.py --work base-work --out lora_trainer/builtin/base

First the autoencoder, then, on latents encoded once, the U-Net and the text
encoder together.  About 90 minutes on two cores with bf16 matrix units.  Progress
is kept in WORK: a second call goes on after the last finished stage.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base import architecture
from builtin_base.drawing import TEMPLATES, Scene, draw, draw_anything, random_scene

SIZES = ((128, 128), (128, 128), (128, 128), (160, 96), (96, 160))  # width, height
EMPTY_CAPTIONS = 0.1
MIN_SNR_GAMMA = 5.0
EMA_DECAY = 0.999


@dataclass(frozen=True)
class Phase:
    """A stretch of the autoencoder's training: its steps and the share of scenes among its images."""

    steps: int
    scenes: float
    decoder_only: bool = False


VAE_PHASES = (Phase(1800, 0.6), Phase(1100, 0.85), Phase(600, 0.85, True), Phase(700, 0.95, True))


def as_tensor(images: list[Image.Image]) -> torch.Tensor:
    """RGB images of one size -> [B, 3, H, W] in [-1, 1]."""
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return stacked.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def cosine_rate(step: int, steps: int, warmup: int = 100) -> float:
    """Share of the peak rate at a step: linear warm-up, then half a cosine to 1 %."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def log(stage: str, step: int, steps: int, loss: float, started: float) -> None:
    seconds = time.monotonic() - started
    print(f"{stage} {step:5d}/{steps} loss {loss:.4f} {seconds:6.0f} s", flush=True)


def psnr(vae: AutoencoderKL, seed: int, count: int = 128) -> float:
    """Mean peak signal-to-noise ratio in dB on `count` images that were never trained on."""
    rng = random.Random(seed)
    with torch.no_grad():
        pixels = as_tensor([draw(random_scene(rng)) for _ in range(count)])
        decoded = torch.cat([vae.decode(vae.encode(part).latent_dist.mode()).sample for part in pixels.split(16)])
    error = (decoded.clamp(-1, 1) - pixels).square().flatten(1).mean(1)
    return float((10.0 * torch.log10(4.0 / error)).mean())


def train_vae(
    vae: AutoencoderKL, steps: int, seed: int, scenes: float, *, decoder_only: bool = False, batch: int = 16
) -> AutoencoderKL:
    """L1 + MSE + 1e-6 KL on a share of `scenes`, the rest anything; sets `scaling_factor` for unit spread.

    `decoder_only` leaves the latents as they are, so that a U-Net trained on them stays good.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    vae.train().requires_grad_(True)
    if decoder_only:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
    trained = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.5e-3, weight_decay=0.0, fused=True)
    started = time.monotonic()
    for step in range(steps):
        width, height = rng.choice(SIZES)
        pixels = as_tensor(
            [
                draw(random_scene(rng), width, height) if rng.random() < scenes else draw_anything(rng, width, height)
                for _ in range(batch)
            ]
        )
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * cosine_rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(pixels).latent_dist
            decoded = vae.decode(posterior.sample()).sample.float()
        kl = 0.5 * (posterior.mean.float().square() + posterior.var.float() - 1.0 - posterior.logvar.float())
        error = decoded - pixels
        loss = error.abs().mean() + error.square().mean() + 1e-6 * kl.sum() / batch
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            log("vae", step, steps, loss.item(), started)
    vae.eval().requires_grad_(False)
    if not decoder_only:
        with torch.no_grad():
            latents = vae.encode(as_tensor([draw(random_scene(rng)) for _ in range(256)])).latent_dist.sample()
        vae.register_to_config(scaling_factor=round(1.0 / float(latents.std()), 5))
    print(f"vae: {psnr(vae, seed + 1):.2f} dB on unseen images, scaling factor {vae.config.scaling_factor}")
    return vae


@dataclass(frozen=True)
class EncodedImages:
    """Drawn images of one size: posterior means and spreads [N, 8, h, w], SDXL's sizes [N, 6], and the scenes."""

    moments: torch.Tensor
    sizes: torch.Tensor
    scenes: list[Scene]


Drawn = Callable[[Scene, int, int, random.Random], tuple[Image.Image, list[int]]]


def whole(scene: Scene, width: int, height: int, rng: random.Random) -> tuple[Image.Image, list[int]]:
    """The image of a scene and its six sizes: neither cropped nor enlarged."""
    del rng
    return draw(scene, width, height), [height, width, 0, 0, height, width]


@torch.no_grad()
def encode_images(
    vae: AutoencoderKL, count: int, seed: int, drawn: Drawn = whole
) -> dict[tuple[int, int], EncodedImages]:
    """`count` images of random scenes as latents, by size."""
    rng = random.Random(seed)
    found = {}
    for size in dict.fromkeys(SIZES):
        scenes = [random_scene(rng) for _ in range(count * SIZES.count(size) // len(SIZES))]
        moments, sizes = [], []
        for start in range(0, len(scenes), 32):
            part = [drawn(scene, *size, rng) for scene in scenes[start : start + 32]]
            with torch.autocast("cpu", torch.bfloat16):
                posterior = vae.encode(as_tensor([image for image, _ in part])).latent_dist
            moments.append(torch.cat([posterior.mean, posterior.std], dim=1).half())
            sizes += [numbers for _, numbers in part]
        found[size] = EncodedImages(torch.cat(moments), torch.tensor(sizes, dtype=torch.float32), scenes)
    return found


def batches(
    images: dict[tuple[int, int], EncodedImages], tokens: dict[str, list[int]], rng: random.Random, size: int
) -> Iterator[tuple]:
    """Endless (moments [B, 8, h, w], input ids [B, 77])."""
    while True:
        own = images[rng.choice(SIZES)]
        chosen = [rng.randrange(len(own.scenes)) for _ in range(size)]
        captions = [
            "" if rng.random() < EMPTY_CAPTIONS else own.scenes[i].caption(rng.choice(TEMPLATES)) for i in chosen
        ]
        yield own.moments[chosen].float(), torch.tensor([tokens[caption] for caption in captions])


def train_unet(
    vae: AutoencoderKL, work: Path, steps: int, stop: int, seed: int, batch: int, images: int
) -> StableDiffusionPipeline:
    """Epsilon prediction with min-SNR weights (arXiv:2303.09556, eq. 5) and an averaged copy.

    The rate falls over `steps`; training ends at `stop`.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = architecture.make_tokenizer(work / "tokenizer")
    parts = torch.nn.ModuleDict(
        {"unet": architecture.make_unet(), "text": architecture.make_text_encoder(tokenizer).train()}
    )
    average = copy.deepcopy(parts).requires_grad_(False)
    scheduler = architecture.make_scheduler()
    alphas = scheduler.alphas_cumprod
    started = time.monotonic()
    data = encode_images(vae, images, seed + 2)
    print(f"encoded {images} images in {time.monotonic() - started:.0f} s", flush=True)
    captions = {"", *(s.caption(t) for each in data.values() for s in each.scenes for t in TEMPLATES)}
    tokens = {c: tokenizer(c, padding="max_length", max_length=77, truncation=True).input_ids for c in captions}
    source = batches(data, tokens, rng, batch)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    started = time.monotonic()
    running = 0.0
    for step in range(stop):
        moments, ids = next(source)
        mean, spread = moments.chunk(2, dim=1)
        latents = (mean + spread * torch.randn_like(mean)) * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        t = torch.randint(0, 1000, (batch,))
        snr = alphas[t] / (1.0 - alphas[t])
        weight = snr.clamp(max=MIN_SNR_GAMMA) / snr
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * cosine_rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            context = parts["text"](ids)[0]
            predicted = parts["unet"](scheduler.add_noise(latents, noise, t), t, context).sample
        loss = ((predicted.float() - noise).square().mean((1, 2, 3)) * weight).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decay = min(EMA_DECAY, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(average.parameters()), list(parts.parameters()), 1.0 - decay)
        running = 0.98 * running + 0.02 * loss.item() if step else loss.item()
        if step % 100 == 0:
            log("unet", step, steps, running, started)
        if (step + 1) % 1000 == 0 or step + 1 == stop:
            pipeline = assemble(vae, average, tokenizer)
            pipeline.save_pretrained(work / "pipeline", safe_serialization=True)
    return pipeline


def assemble(vae: AutoencoderKL, parts: torch.nn.ModuleDict, tokenizer) -> StableDiffusionPipeline:
    """A copy of the parts as a pipeline in half precision."""
    return StableDiffusionPipeline(
        vae=copy.deepcopy(vae).half(),
        unet=copy.deepcopy(parts["unet"]).half(),
        text_encoder=copy.deepcopy(parts["text"]).eval().half(),
        tokenizer=tokenizer,
        scheduler=architecture.make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for intermediate results")
    parser.add_argument("--out", type=Path, help="write the finished base here")
    parser.add_argument("--unet-steps", type=int, default=5000, help="length of the learning rate's cosine")
    parser.add_argument("--unet-stop", type=int, default=4000, help="stop here: the averaged weights are good by then")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=16_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    vae = architecture.make_vae()
    for number, phase in enumerate(VAE_PHASES):
        folder = args.work / f"vae-{number}"
        if not folder.exists():
            seed = args.seed + 10 * number
            train_vae(vae, phase.steps, seed, phase.scenes, decoder_only=phase.decoder_only).save_pretrained(folder)
        vae = AutoencoderKL.from_pretrained(folder, local_files_only=True)
    vae.eval().requires_grad_(False)
    pipeline = train_unet(vae, args.work, args.unet_steps, args.unet_stop, args.seed, args.batch, args.images)
    if args.out:
        pipeline.save_pretrained(args.out, safe_serialization=True)


if __name__ == "__main__":
    main()
