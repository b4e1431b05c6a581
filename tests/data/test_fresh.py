from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lora_trainer.core.errors import DatasetRefused, Problem, TrainingFailed
from lora_trainer.data import fresh
from lora_trainer.data.buckets import Bucket, ResizeCrop
from lora_trainer.data.fresh import Fresh
from lora_trainer.data.images.pixels import ShownView
from lora_trainer.data.sample import Sample
from lora_trainer.data.steps import Ref
from lora_trainer.data.views import View

VIEW = View(ResizeCrop(8, 8, 0, 0, Bucket(8, 8)))
REFS = [Ref(index, f"{index}", 0) for index in range(12)]


def shown(ref: Ref) -> tuple[Sample, View]:
    return Sample(Path(f"{ref.index}.png"), "", 8, 8, f"{ref.index:064x}"), VIEW


def encode(pixels: Tensor) -> tuple[Tensor, Tensor]:
    return pixels, pixels * 0 + 1


def image(sample: Sample, view: View) -> ShownView:
    mask = torch.full((1, 8, 8), 0.5) if int(sample.path.stem) % 2 else None
    return ShownView(torch.full((3, 8, 8), float(sample.path.stem)), mask)


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from(REFS), unique=True), max_size=6), st.integers(0, 3))
def test_every_position_gets_its_image_in_any_order(steps, workers):
    with pytest.MonkeyPatch.context() as patch, closing(Fresh(shown, encode, workers)) as latents:
        patch.setattr(fresh, "read_shown", image)
        for number, step in enumerate(steps):
            latents.expect([ref for later in steps[number : number + 2] for ref in reversed(later)])
            for ref in step:
                entry = latents.read(ref)
                assert float(entry["mean"][0, 0, 0]) == ref.index
                assert entry["spread"].shape == (3, 8, 8)
                assert ("mask" in entry) == bool(ref.index % 2)


def test_images_are_decoded_ahead_up_to_the_limit(monkeypatch):
    decoded: list[int] = []
    enough = threading.Semaphore(0)

    def read(sample: Sample, view: View) -> ShownView:
        decoded.append(int(sample.path.stem))
        enough.release()
        return image(sample, view)

    monkeypatch.setattr(fresh, "MOST_AHEAD", 3)
    monkeypatch.setattr(fresh, "read_shown", read)
    before = threading.active_count()
    with closing(Fresh(shown, encode, 1)) as latents:
        latents.expect(REFS)
        for _ in range(3):
            assert enough.acquire(timeout=300)
        latents.read(REFS[0])
        assert enough.acquire(timeout=300)
        assert not enough.acquire(timeout=0.05)
        assert decoded == [0, 1, 2, 3]
    assert threading.active_count() == before


def test_an_unreadable_image_is_reported_at_its_turn(monkeypatch):
    def read(sample: Sample, view: View) -> ShownView:
        if sample.path.stem == "1":
            raise DatasetRefused(Problem("planted", f"{sample.path} is gone.", "Bring it back."))
        return image(sample, view)

    monkeypatch.setattr(fresh, "read_shown", read)
    with closing(Fresh(shown, encode, 2)) as latents:
        latents.expect(REFS)
        latents.read(REFS[0])
        with pytest.raises(DatasetRefused, match=r"1\.png is gone"):
            latents.read(REFS[1])
        latents.read(REFS[2])


def test_nonfinite_values_name_the_image(monkeypatch):
    monkeypatch.setattr(fresh, "read_shown", image)
    latents = Fresh(shown, lambda pixels: (pixels / 0.0, pixels), 0)
    with pytest.raises(TrainingFailed, match=r"not finite for 4\.png"):
        latents.read(REFS[4])
