"""Masks next to the latents that they weight, and findings about masks and sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lora_trainer.config.schema import SourceSection
from lora_trainer.data.caches.cache import CachePlan, fill_latents, plan_latents
from lora_trainer.data.caches.store import Store
from lora_trainer.data.images.spans import content_of
from lora_trainer.data.loader import masks_of
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Mask
from lora_trainer.data.views import Framing, views_of
from lora_trainer.dataset_check import DatasetGate, check_dataset
from tests.data.conftest import Draw
from tests.data.test_cache import encode_image, fill


def test_a_mask_is_cached_in_every_variant_of_its_image(tmp_path: Path, draw: Draw) -> None:
    """Downscaled to the latents. An image without a mask keeps its key and entry."""
    folder, cache = tmp_path / "data", tmp_path / "cache"
    for number in range(3):
        draw(folder / f"{number}.png", seed=number)
    fill(folder, cache)
    half = np.zeros((32, 32), dtype=np.uint8)
    half[:, 16:] = half[:4, :4] = 255
    Image.fromarray(half).save(tmp_path / "mask.png")
    first, *others = read_manifest([folder])[0].samples

    def plan() -> CachePlan:
        mask = Mask(tmp_path / "mask.png", content_of(tmp_path / "mask.png", None))
        samples = [replace(first, mask=mask), *others]
        shown = [(sample, view) for sample in samples for view in views_of(sample, Framing((64,), 16, flip=True))]
        return plan_latents(shown, cache, "vae", torch.float16)

    assert fill_latents(plan(), encode_image, batch=4).reasons == {"mask changed": 1, "new": 3}
    store = Store(cache, "latents", plan().keys)
    entries = [store.read(key) for key in plan().keys]
    expected = torch.zeros(8, 8)
    expected[:, 4:] = expected[0, 0] = 1.0
    assert (entries[0]["mask"][0] - expected).abs().max() < 0.2
    assert torch.equal(entries[1]["mask"], entries[0]["mask"].flip(2))
    assert torch.equal(entries[1]["mean"], entries[0]["mean"].flip(2))
    assert not any("mask" in entry for entry in entries[2:])
    stacked = masks_of(entries[1:3])
    assert stacked is not None
    assert stacked.shape == (2, 1, 8, 8)
    assert (stacked[1] == 1.0).all()
    assert masks_of(entries[2:]) is None
    Image.fromarray(255 - half).save(tmp_path / "mask.png")
    assert fill_latents(plan(), encode_image, batch=4).reasons == {"mask changed": 2}


def test_empty_and_undecodable_masks_are_found(tmp_path: Path, draw: Draw) -> None:
    folder, masks = tmp_path / "data", tmp_path / "masks"
    masks.mkdir()
    speck = np.zeros((300, 300), dtype=np.uint8)
    speck[10:40, 20:50] = 255
    for number, pixels in enumerate((speck, 0 * speck, np.random.default_rng(0).integers(0, 256, (300, 300)))):
        draw(folder / f"{number}.png", 300, 300, seed=number)
        Image.fromarray(pixels.astype(np.uint8)).save(masks / f"{number}.png")
    cut_short = masks / "2.png"
    cut_short.write_bytes(cut_short.read_bytes()[:2000])
    clear = np.zeros((300, 300, 4), dtype=np.uint8)
    Image.fromarray(clear).save(draw(tmp_path / "clear" / "3.png"))
    sources = [
        SourceSection(path=str(folder), masks=str(masks)),
        SourceSection(path=str(folder.parent / "clear"), masks="alpha"),
    ]
    manifest, findings = read_manifest(sources)
    report = check_dataset(manifest, findings, DatasetGate([Framing((256,), 64)] * 2))
    of_masks = {
        (each.path.name, each.code, each.severity) for each in report.findings if each.path and "mask" in each.code
    }
    assert of_masks == {
        ("1.png", "black_mask", "warning"),
        ("2.png", "unreadable_mask", "error"),
        ("3.png", "black_mask", "warning"),
    }
