"""Train the built-in base's autoencoder on icons, drawn scenes and sketches.

    python scripts/builtin_base/train_vae.py --work base-work --minutes 120 [--judge DIR]

Images are put together on the way: icons on plain, shaded and busy backgrounds, with paper grain, and crops of 64 pixels,
since what an autoencoder learns is local. Progress is kept in WORK/vae-state.pt; a second call goes on from it.
`--judge` prints the signal-to-noise ratio of each folder's images, which `icons.py` keeps out of training.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base import architecture
from builtin_base.drawing import draw, draw_anything, random_scene
from builtin_base.icons import SIDE, collect, on_white
from builtin_base.muon import Optimizers, rate
from lora_trainer.core.io import atomic_path

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from numpy.typing import NDArray

CROP = 64
BATCH = 16
PEAK_RATE = 1e-3
KL_WEIGHT = 2e-4  # of the mean over latent values
EDGE_WEIGHT = 0.5  # of the error of differences between neighbouring pixels
POOL = 4000  # drawn images, made once
EMA_DECAY = 0.999
JUDGED_SIDE = 128


def color(rng: random.Random) -> tuple[int, int, int]:
    return tuple(rng.randint(0, 255) for _ in range(3))


def blob(rng: random.Random, side: int) -> list[tuple[float, float]]:
    """Points of a smooth closed curve."""
    cx, cy, radius = (rng.uniform(0.1, 0.9) * side, rng.uniform(0.1, 0.9) * side, rng.uniform(0.05, 0.4) * side)
    waves = [(n, rng.uniform(0, 0.35) / n, rng.uniform(0, 2 * math.pi)) for n in (1, 2, 3, 4)]
    points = []
    for step in range(48):
        angle = 2 * math.pi * step / 48
        r = radius * (1 + sum(size * math.cos(n * angle + phase) for n, size, phase in waves))
        points.append((cx + r * math.cos(angle), cy + r * math.sin(angle)))
    return points


def draw_sketch(rng: random.Random, side: int = 128) -> Image.Image:
    """Outlined forms, flat or filled with pencil strokes, dots and letters, on paper."""
    big = 2 * side
    paper = (255, 255, 255) if rng.random() < 0.7 else tuple(rng.randint(200, 255) for _ in range(3))
    canvas = Image.new("RGB", (big, big), paper)
    ink = tuple(rng.randint(0, 60) for _ in range(3))
    for _ in range(rng.randint(2, 7)):
        points = blob(rng, big)
        mask = Image.new("L", (big, big))
        ImageDraw.Draw(mask).polygon(points, fill=255)
        fill = Image.new("RGB", (big, big), color(rng) if rng.random() < 0.6 else paper)
        if rng.random() < 0.5:
            pen, base = ImageDraw.Draw(fill), color(rng)
            angle, gap = rng.uniform(0, math.pi), rng.uniform(2, 7)
            dx, dy = math.cos(angle), math.sin(angle)
            for line in range(int(big * 1.5 / gap)):
                offset = (line * gap + rng.uniform(-2, 2)) - big * 0.75
                x, y = big / 2 - dy * offset, big / 2 + dx * offset
                shade = tuple(min(255, max(0, c + rng.randint(-30, 30))) for c in base)
                pen.line((x - dx * big, y - dy * big, x + dx * big, y + dy * big), fill=shade, width=rng.randint(1, 3))
        canvas.paste(fill, mask=mask)
        if rng.random() < 0.85:
            ImageDraw.Draw(canvas).line([*points, points[0]], fill=ink, width=rng.randint(1, 8), joint="curve")
    pen = ImageDraw.Draw(canvas)
    for _ in range(rng.randint(0, 8)):
        x, y, r = rng.uniform(0, big), rng.uniform(0, big), rng.uniform(2, 24)
        pen.ellipse((x - r, y - r, x + r, y + r), fill=rng.choice([ink, (255, 255, 255), color(rng)]), outline=ink)
    if rng.random() < 0.3:
        letters = "".join(rng.choices("abcdefghkmnoprstuvwxyzABCDEGHRST0123456789!?", k=rng.randint(1, 8)))
        pen.text((rng.uniform(0, big / 2), rng.uniform(0, big)), letters, fill=ink, font_size=rng.randint(14, 60))
    return canvas.resize((side, side), Image.Resampling.BOX)


class Images:
    """Endless training crops of `icons` [N, SIDE, SIDE, 4] and of drawn images."""

    def __init__(self, icons: NDArray[np.uint8], seed: int) -> None:
        self.icons, self.rng = icons, random.Random(seed)
        makers = (draw_sketch, draw_sketch, draw_anything, lambda rng: draw(random_scene(rng)))
        self.pool = np.stack([np.asarray(makers[i % len(makers)](self.rng)) for i in range(POOL)])

    def icon(self, side: int) -> Image.Image:
        """A part of an icon, RGBA [side, side], at a size and place of its own."""
        rng = self.rng
        image = Image.fromarray(self.icons[rng.randrange(len(self.icons))])
        # 0.6 to 1.9 times as large as at 128 pixels, and never smaller than its part.
        width = min(SIDE, max(24.0, side / math.exp(rng.uniform(math.log(0.6), math.log(1.9))) * SIDE / 128))
        x, y = (rng.uniform(0, SIDE - width) for _ in range(2))
        part = image.resize((side, side), Image.Resampling.BICUBIC, box=(x, y, x + width, y + width), reducing_gap=2.0)
        if rng.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return part

    def background(self, side: int) -> NDArray[np.float32]:
        """[side, side, 3], 0 to 255: white, plain, shaded, or a part of another image."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.35:
            return np.full((side, side, 3), 255.0, np.float32)
        if kind < 0.6:
            return np.broadcast_to(np.array(color(rng), np.float32), (side, side, 3)).copy()
        if kind < 0.8:
            first, second = np.array(color(rng), np.float32), np.array(color(rng), np.float32)
            share = np.linspace(0, 1, side, dtype=np.float32)[:, None, None]
            shaded = np.broadcast_to(first + (second - first) * share, (side, side, 3))
            return np.rot90(shaded, rng.randrange(4)).copy()
        return self.drawn(side)

    def drawn(self, side: int) -> NDArray[np.float32]:
        rng = self.rng
        x, y = (rng.randint(0, 128 - side) for _ in range(2))
        part = self.pool[rng.randrange(POOL), y : y + side, x : x + side]
        return np.ascontiguousarray(part[:, :: rng.choice((1, -1))], dtype=np.float32)

    def one(self, side: int) -> NDArray[np.float32]:
        """[side, side, 3], 0 to 255."""
        rng = self.rng
        if rng.random() < 0.3:
            image = self.drawn(side)
        else:
            image = self.background(side)
            for _ in range(1 if rng.random() < 0.7 else 2):
                part = np.asarray(self.icon(side), dtype=np.float32)
                alpha = part[..., 3:] / 255.0
                image = image * (1 - alpha) + part[..., :3] * alpha
        if rng.random() < 0.2:  # paper grain
            noise = np.random.default_rng(rng.getrandbits(32)).standard_normal((side, side, 1), np.float32)
            image = image + rng.uniform(2, 12) * noise
        if rng.random() < 0.3:  # light and contrast
            image = (image - 128) * rng.uniform(0.6, 1.1) + 128 + rng.uniform(-30, 30)
        return image

    def batch(self, count: int, side: int = CROP) -> torch.Tensor:
        """[count, 3, side, side] in [-1, 1]."""
        stacked = torch.from_numpy(np.stack([self.one(side) for _ in range(count)]))
        return stacked.permute(0, 3, 1, 2).div(127.5).sub(1.0).clamp(-1.0, 1.0)


def real_images(folder: Path, most: int = 40) -> torch.Tensor:
    """Up to `most` images in and under the folder, on white, [N, 3, 128, 128] in [-1, 1]."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".png", ".webp", ".jpg"))
    found = []
    for path in files[:: max(1, len(files) // most)][:most]:
        with Image.open(path) as image:
            flat = on_white(image)
        side = min(flat.size)
        left, top = (flat.width - side) // 2, (flat.height - side) // 2
        square = flat.convert("RGB").crop((left, top, left + side, top + side))
        found.append(square.resize((JUDGED_SIDE, JUDGED_SIDE), Image.Resampling.LANCZOS))
    return as_tensor(found)


def as_tensor(images: list[Image.Image]) -> torch.Tensor:
    """RGB images of one size -> [B, 3, H, W] in [-1, 1]."""
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return stacked.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


@torch.no_grad()
def decibels(vae: AutoencoderKL, pixels: torch.Tensor, batch: int = 8) -> float:
    """Mean peak signal-to-noise ratio of images [N, 3, H, W] after a trip through the autoencoder."""
    decoded = torch.cat(
        [vae.decode(vae.encode(part).latent_dist.mode()).sample.float() for part in pixels.split(batch)]
    )
    error = (decoded.clamp(-1, 1) - pixels).square().flatten(1).mean(1)
    return float((10.0 * torch.log10(4.0 / error)).mean())


def edge_error(error: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of neighbouring errors: what is lost at outlines."""
    return (error[..., 1:, :] - error[..., :-1, :]).abs().mean() + (error[..., 1:] - error[..., :-1]).abs().mean()


@torch.no_grad()
def center_latents(vae: AutoencoderKL, latents: torch.Tensor) -> None:
    """Give the latents [N, C, h, w] a mean of 0 in each channel and a spread of 1, without a change to any decoded image.

    The mean, which SD1.5 has no setting for, goes into the 1 x 1 convolutions on both sides of the latents. Without it most of
    the spread would be the background's color, and details would be under the noise at most timesteps.
    """
    mean = latents.mean((0, 2, 3))
    vae.quant_conv.bias[: len(mean)] -= mean
    vae.post_quant_conv.bias += vae.post_quant_conv.weight[:, :, 0, 0] @ mean
    vae.register_to_config(scaling_factor=round(1.0 / float((latents - mean[:, None, None]).std()), 5))


def train(work: Path, minutes: float, judged: dict[str, torch.Tensor], seed: int) -> AutoencoderKL:
    """L1 + MSE + edges + KL for `minutes` of training, over all calls; sets `scaling_factor`."""
    _, icons = collect(work)
    torch.manual_seed(seed)
    vae = architecture.make_vae().to(memory_format=torch.channels_last)
    average = architecture.make_vae().requires_grad_(False).eval()
    average.load_state_dict(vae.state_dict())
    optimizers = Optimizers(vae, PEAK_RATE)
    spent, step, state = 0.0, 0, work / "vae-state.pt"
    if state.is_file():
        kept = torch.load(state, weights_only=True)
        vae.load_state_dict(kept["vae"])
        average.load_state_dict(kept["average"])
        optimizers.load_state_dict(kept["optimizers"])
        spent, step = kept["spent"], kept["step"]
    images = Images(icons, seed + step)
    limit = 60.0 * minutes
    running = None
    while spent < limit:
        started = time.monotonic()
        pixels = images.batch(BATCH).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(pixels).latent_dist
            decoded = vae.decode(posterior.sample()).sample
        error = decoded.float() - pixels
        kl = 0.5 * (posterior.mean.float().square() + posterior.var.float() - 1.0 - posterior.logvar.float()).mean()
        squared = error.square().mean()
        loss = error.abs().mean() + squared + EDGE_WEIGHT * edge_error(error) + KL_WEIGHT * kl
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizers.step(rate(spent / limit))
        decay = min(EMA_DECAY, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(vae.parameters()), 1.0 - decay)
        running = squared.item() if running is None else 0.99 * running + 0.01 * squared.item()
        spent += time.monotonic() - started
        step += 1
        if step % 500 == 0 or spent >= limit:
            ratios = "  ".join(f"{name} {decibels(average, part):.2f}" for name, part in judged.items())
            print(
                f"step {step} {spent / 60:.1f} min  crops {10 * math.log10(4 / running):.2f} dB  kl {kl.item():.2f}  {ratios}",
                flush=True,
            )
            kept = {"vae": vae.state_dict(), "average": average.state_dict(), "optimizers": optimizers.state_dict()}
            with atomic_path(state) as temporary:
                torch.save({**kept, "spent": spent, "step": step}, temporary)
    with torch.no_grad():
        latents = torch.cat([average.encode(images.batch(16, 128)).latent_dist.sample() for _ in range(8)])
    center_latents(average, latents)
    average.save_pretrained(work / "vae")
    return average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for intermediate results")
    parser.add_argument("--minutes", type=float, default=120.0, help="of training, over all calls")
    parser.add_argument("--judge", type=Path, help="folder of folders with images that are kept out of training")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    judged = (
        {part.name: real_images(part) for part in sorted(args.judge.iterdir()) if part.is_dir()} if args.judge else {}
    )
    train(args.work, args.minutes, judged, args.seed)


if __name__ == "__main__":
    main()
