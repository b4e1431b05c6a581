"""Say which shape, color and background an image shows, and how good the built-in base is.

    python scripts/builtin_base/judge.py [--base lora_trainer/builtin/base] [--sheet FILE.png]

The judge looks at pixels only and is itself judged first: on drawn images, on drawn
images that went through the autoencoder, and on captions that belong to others.
Then the base draws 64 prompts that were fixed before it was trained, seeds 0 to 63. A base of
another shape is judged in the same way; it has no card.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builtin_base.drawing import COLORS, SHAPES, TEMPLATES, Scene, draw, random_scene

Pixels = NDArray[np.float32]

MASK_SIDE = 48
# Of a normalized mask, the root of the mean squared distance from its center, in half sides.
MASK_SPREAD = 0.42
TURNS = range(-16, 17, 4)  # degrees
LEAST_OVERLAP = 0.78
# A color further than this from every named one (RGB, 8-bit units) is none of them.
MOST_COLOR_DISTANCE = 70.0
LEAST_CONTRAST = 40.0
PROMPTS = 64
STEPS = 30
GUIDANCE = 5.0


@dataclass(frozen=True)
class Verdict:
    """What an image shows; `none` where it shows nothing that has a name."""

    shape: str
    color: str
    background: str
    overlap: float  # intersection over union with the best template

    def right(self, scene: Scene) -> tuple[bool, bool, bool]:
        """Whether shape, color and background are the scene's."""
        return self.shape == scene.shape, self.color == scene.color, self.background == scene.background


def judge(image: Image.Image) -> Verdict:
    """The verdict on an image of one shape on a plain background."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    backdrop = background_of(pixels)
    background = color_name(np.median(backdrop, axis=(0, 1)))
    mask, color = foreground_of(pixels, backdrop)
    if mask is None:
        return Verdict("none", "none", background, 0.0)
    shape, overlap = shape_of(mask)
    return Verdict(shape if overlap >= LEAST_OVERLAP else "none", color_name(color), background, overlap)


def color_name(color: Pixels) -> str:
    """The nearest named color to an RGB value [3]."""
    distance, name = min((float(np.linalg.norm(color - np.array(rgb))), name) for name, rgb in COLORS.items())
    return name if distance <= MOST_COLOR_DISTANCE else "none"


def background_of(pixels: Pixels, rim: int = 5) -> Pixels:
    """The background [H, 1, 3] behind the shape: a straight line through the rows' rim colors.

    Rows whose rim differs from the image's rim are left out: there the shape reaches the edge.
    """
    height = pixels.shape[0]
    sides = np.concatenate([pixels[:, :rim], pixels[:, -rim:]], axis=1)  # [H, 2 rim, 3]
    rows = np.median(sides, axis=1)
    rim_color = np.median(np.concatenate([sides.reshape(-1, 3), pixels[:rim].reshape(-1, 3)]), axis=0)
    plain = np.linalg.norm(rows - rim_color, axis=1) < LEAST_CONTRAST
    if plain.sum() < height // 4:
        return np.broadcast_to(rim_color, (height, 1, 3)).astype(np.float32)
    y = np.arange(height, dtype=np.float32)
    slope, start = np.polyfit(y[plain], rows[plain], 1)
    return (y[:, None] * slope + start)[:, None].astype(np.float32)


def foreground_of(pixels: Pixels, backdrop: Pixels) -> tuple[Pixels | None, Pixels]:
    """The shape's coverage [H, W] in [0, 1] and its color [3]; no mask where nothing stands out."""
    difference = pixels - backdrop
    distance = np.linalg.norm(difference, axis=2)
    contrast = float(np.quantile(distance, 0.97))
    if contrast < LEAST_CONTRAST:
        return None, np.zeros(3, np.float32)
    inside = distance > 0.8 * contrast
    color = np.median(pixels[inside], axis=0)
    direction = np.median(difference[inside], axis=0)
    along = (difference @ direction) / float(direction @ direction)
    # What lies off the line between the two colors is a third color, not coverage.
    off = np.linalg.norm(difference - along[..., None] * direction, axis=2)
    return np.clip(along, 0.0, 1.0) * (off < 0.6 * contrast), color


def normalized(mask: Pixels) -> Pixels:
    """The mask moved to its center and scaled to a common spread, [MASK_SIDE, MASK_SIDE]."""
    # A blurred edge counts half; faint stains far away would pull the center.
    mask = np.clip((mask - 0.25) * 2.0, 0.0, 1.0)
    total = mask.sum()
    if total < 1.0:
        return np.zeros((MASK_SIDE, MASK_SIDE), np.float32)
    y, x = np.indices(mask.shape, dtype=np.float32)
    cy, cx = float((mask * y).sum() / total), float((mask * x).sum() / total)
    spread = float(np.sqrt((mask * ((y - cy) ** 2 + (x - cx) ** 2)).sum() / total))
    half = spread / MASK_SPREAD
    box = (cx - half + 0.5, cy - half + 0.5, cx + half + 0.5, cy + half + 0.5)
    image = Image.fromarray((mask * 255).astype(np.uint8))
    side = (MASK_SIDE, MASK_SIDE)
    coefficients = ((box[2] - box[0]) / MASK_SIDE, 0.0, box[0], 0.0, (box[3] - box[1]) / MASK_SIDE, box[1])
    moved = image.transform(side, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    return np.asarray(moved, dtype=np.float32) / 255.0


@cache
def templates() -> tuple[tuple[str, ...], Pixels]:
    """Names [N] and normalized masks [N, side, side] of every shape at every turn."""
    names, masks = [], []
    for shape in SHAPES:
        for turn in TURNS if shape not in ("circle", "ring") else (0,):
            drawn = draw(Scene(shape, "white", "black", 0.0, 0.0, 0.3, turn, 0.0, (0,) * 6))
            grey = np.asarray(drawn.convert("L"), dtype=np.float32)
            names.append(shape)
            masks.append(normalized((grey - grey.min()) / (grey.max() - grey.min())))
    return tuple(names), np.stack(masks)


def shape_of(mask: Pixels) -> tuple[str, float]:
    """The shape whose template overlaps the mask [H, W] most, and that overlap (IoU of coverages)."""
    names, masks = templates()
    own = normalized(mask)
    overlaps = np.minimum(masks, own).sum(axis=(1, 2)) / np.maximum(masks, own).sum(axis=(1, 2))
    best = int(overlaps.argmax())
    return names[best], float(overlaps[best])


def shares(verdicts: list[Verdict], scenes: list[Scene]) -> dict[str, float]:
    """Shares of right shapes, colors and backgrounds, and of images that are wholly right."""
    right = np.array([verdict.right(scene) for verdict, scene in zip(verdicts, scenes, strict=True)])
    found = dict(zip(("shape", "color", "background"), right.mean(axis=0).tolist(), strict=True))
    return {**found, "wholly right": float(right.all(axis=1).mean())}


def fixed_prompts(count: int = PROMPTS) -> tuple[list[str], list[Scene]]:
    """The prompts that the base is judged on and the scenes they describe; never chosen by result."""
    rng = random.Random(20_000)
    scenes = [random_scene(rng) for _ in range(count)]
    return [scene.caption(TEMPLATES[i % len(TEMPLATES)]) for i, scene in enumerate(scenes)], scenes


def sample(
    base: Path,
    prompts: list[str],
    batch: int = 16,
    first_seed: int = 0,
    lora: Path | None = None,
    steps_and_guidance: tuple[int, float] = (STEPS, GUIDANCE),
) -> list[Image.Image]:
    """Images for the prompts, seeds counting up, by the base's own scheduler in fp32; `lora` is a file in diffusers' format."""
    import torch
    from diffusers import DiffusionPipeline

    index = json.loads((base / "model_index.json").read_text(encoding="utf-8"))
    absent = {name: None for name, kind in index.items() if kind == [None, None]}  # SD3's third text encoder
    pipeline: Any = DiffusionPipeline.from_pretrained(base, dtype=torch.float32, local_files_only=True, **absent)
    pipeline.set_progress_bar_config(disable=True)
    if lora is not None:
        pipeline.load_lora_weights(lora.parent, weight_name=lora.name)
    steps, guidance = steps_and_guidance
    images: list[Image.Image] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        generators = [torch.Generator().manual_seed(first_seed + start + i) for i in range(len(part))]
        images += pipeline(part, num_inference_steps=steps, guidance_scale=guidance, generator=generators).images
    return images


def decode_drawn(vae: Any, drawn: list[Image.Image], batch: int = 32) -> list[Image.Image]:
    """The images after a trip through the autoencoder."""
    import torch

    from builtin_base.train_vae import as_tensor

    decoded: list[Image.Image] = []
    for start in range(0, len(drawn), batch):
        with torch.no_grad():
            latents = vae.encode(as_tensor(drawn[start : start + batch])).latent_dist.mode()
            pixels = vae.decode(latents).sample.clamp(-1, 1).add(1).mul(127.5).round().byte()
        decoded += [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
    return decoded


def round_trips(vae: Any, parts: dict[str, Any], columns: int = 6) -> Image.Image:
    """For each folder a row of images, and below it what the autoencoder keeps of them."""
    import torch

    rows = []
    for pixels in parts.values():
        chosen = pixels[:: max(1, len(pixels) // columns)][:columns]
        with torch.no_grad():
            kept = vae.decode(vae.encode(chosen).latent_dist.mode()).sample.clamp(-1, 1)
        rows += [torch.cat([*each.add(1).mul(127.5).round().byte()], dim=2) for each in (chosen, kept)]
    return Image.fromarray(torch.cat(rows, dim=1).permute(1, 2, 0).numpy())


def contact_sheet(images: list[Image.Image], verdicts: list[Verdict], scenes: list[Scene]) -> Image.Image:
    """All images with what was asked for and, where it differs, what was seen."""
    side, foot, columns = 128, 30, 8
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (side + 4), rows * (side + foot)), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (image, verdict, scene) in enumerate(zip(images, verdicts, scenes, strict=True)):
        x, y = i % columns * (side + 4), i // columns * (side + foot)
        sheet.paste(image.resize((side, side)), (x, y))
        pen.text((x + 2, y + side), f"{scene.color} {scene.shape}, {scene.background}", fill="black", font_size=9)
        if not all(verdict.right(scene)):
            seen = f"seen: {verdict.color} {verdict.shape}, {verdict.background}"
            pen.text((x + 2, y + side + 12), seen, fill="red", font_size=9)
    return sheet


def judge_the_judge(count: int, vae: Any | None) -> dict[str, dict[str, float]]:
    """How often the judge is right on images with known content, by what they are."""
    rng = random.Random(30_000)
    scenes = [random_scene(rng) for _ in range(count)]
    drawn = [draw(scene) for scene in scenes]
    verdicts = [judge(image) for image in drawn]
    found = {f"the judge on {count} drawn images": shares(verdicts, scenes)}
    found["the judge on their captions, shuffled"] = shares(verdicts, rng.sample(scenes, count))
    if vae is not None:
        decoded = [judge(image) for image in decode_drawn(vae, drawn)]
        found["the judge on the same through the autoencoder"] = shares(decoded, scenes)
    return found


def show(figures: dict[str, dict[str, float]]) -> None:
    for title, found in figures.items():
        print(f"{title:48s} " + "  ".join(f"{name} {100 * share:5.1f} %" for name, share in found.items()), flush=True)


def judge_base(base: Path, count: int, sheet: Path | None) -> dict[str, dict[str, float]]:
    """The shares on the fixed prompts; writes the contact sheet when asked to."""
    prompts, scenes = fixed_prompts(count)
    images = sample(base, prompts)
    verdicts = [judge(image) for image in images]
    if sheet:
        contact_sheet(images, verdicts, scenes).save(sheet)
    return {f"the base on {len(prompts)} fixed prompts": shares(verdicts, scenes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("lora_trainer/builtin/base"))
    parser.add_argument("--vae", type=Path, help="an autoencoder's folder alone, before there is a whole base")
    parser.add_argument("--drawn", type=int, default=1000, help="images that the judge is judged on")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="how many of the fixed prompts, from the first")
    parser.add_argument("--sheet", type=Path, help="write the sampled images with their verdicts here")
    parser.add_argument("--real", type=Path, help="folder of folders with images that no training saw")
    parser.add_argument("--round-trip", type=Path, help="write some of them beside what the autoencoder keeps here")
    parser.add_argument(
        "--card", type=Path, help="write the model card into the base, with the words of this JSON file"
    )
    args = parser.parse_args()
    folder = args.vae or args.base / "vae"
    vae = None
    words = {"psnr": "not measured"}
    if folder.is_dir():
        from diffusers import AutoencoderKL

        from builtin_base.train_vae import as_tensor, decibels, real_images

        vae = AutoencoderKL.from_pretrained(folder, local_files_only=True).float().eval()
        rng = random.Random(40_000)
        ratios = {"shapes": decibels(vae, as_tensor([draw(random_scene(rng)) for _ in range(128)]))}
        parts = (
            {part.name: real_images(part) for part in sorted(args.real.iterdir()) if part.is_dir()} if args.real else {}
        )
        ratios |= {name: decibels(vae, pixels) for name, pixels in parts.items()}
        words["psnr"] = ", ".join(f"{name} {ratio:.1f} dB" for name, ratio in ratios.items())
        print(f"the autoencoder on unseen images: {words['psnr']}", flush=True)
        if args.round_trip and parts:
            round_trips(vae, parts).save(args.round_trip)
    figures = judge_the_judge(args.drawn, vae)
    show(figures)
    if not (args.base / "model_index.json").is_file():
        print(f"no base in {args.base}: nothing was sampled")
        return
    sampled = judge_base(args.base, args.prompts, args.sheet)
    show(sampled)
    if args.card:
        from builtin_base.card import card

        words = {**words, **json.loads(args.card.read_text(encoding="utf-8"))}
        text = card(args.base, {**sampled, **figures}, words, args.prompts, STEPS, GUIDANCE)
        (args.base / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
