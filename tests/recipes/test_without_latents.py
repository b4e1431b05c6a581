"""`cache.latents=false` encodes images while training and changes nothing else."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_trainer.monitor.trackers import Trackers
from tests.recipes.recipe import Bench, draw_images, exported, losses, patched, record
from tests.recipes.test_resume import at_step, stop

SETTINGS: dict[str, object] = {
    "checkpoint__every_n_steps": 3,
    "validation__every_n_steps": 3,
    "train__effective_batch_size": 3,
    "data__flip": "true",
}


@pytest.fixture
def own(bench: Bench, tmp_path: Path) -> Bench:
    """Images that the test can change, and empty caches."""
    return Bench(bench.model, draw_images(tmp_path / "own"), bench.output, tmp_path / "caches")


def test_uninterrupted_resumed_and_split_runs_give_the_same_lora(own: Bench, capsys: pytest.CaptureFixture[str]):
    before = threading.active_count()
    assert own.run("cached", **SETTINGS) == 0
    cached = [load_file(own.folder("cached") / "cached.safetensors"), losses(own.folder("cached"))]
    place = Bench(own.model, own.data, own.output, own.output.parent / "other_caches")
    capsys.readouterr()
    assert place.run("fresh", cache__latents="false", **SETTINGS) == 0
    printed = capsys.readouterr().out
    assert "latent cache: 10 images, encoding 10 (10 new)" in printed, "the images that the LoRA is compared with"
    assert "the VAE stays loaded" in printed
    assert threading.active_count() == before, "no thread is left behind"

    fresh = load_file(own.folder("fresh") / "fresh.safetensors")
    assert losses(own.folder("fresh")) == pytest.approx(cached[1], rel=1e-4)
    for name, values in cached[0].items():
        np.testing.assert_allclose(fresh[name], values, atol=1e-4, err_msg=name)
    assert record(own.folder("fresh"))["sample_counts"] == record(own.folder("cached"))["sample_counts"]

    whole = exported(own.folder("fresh"))
    resumed = Bench(own.model, own.data, own.output / "resumed", place.cache)
    settings = SETTINGS | {"cache__latents": "false", "cache__workers": 0}
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert resumed.run("fresh", **settings) == 143
    assert resumed.run("fresh", "--resume", **settings) == 0
    assert exported(resumed.folder("fresh")) == whole


def test_a_changed_image_ends_the_run_with_its_name_and_the_trained_steps(own: Bench, capsys):
    (own.cache.parent / "later").mkdir()
    settings = {
        "cache__latents": "false",
        "train__effective_batch_size": 1,
        "cache__workers": 2,
        "checkpoint__every_n_steps": 50,
    }

    def change() -> None:
        for image in own.data.glob("*.png"):
            image.rename(own.cache.parent / "later" / image.name)

    before = threading.active_count()
    with patched(Trackers, "steps", at_step(2, change)):
        assert own.run("gone", steps=40, **settings) == 5
    assert threading.active_count() == before
    output = capsys.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if "cannot be read" in line]
    assert len(lines) == 1
    assert str(own.data / "image_") in lines[0]
    steps = record(own.folder("gone"))["steps"]
    assert 2 <= steps < 40
    counts = record(own.folder("gone"))["sample_counts"]
    assert counts["steps"] == counts["samples"] == steps
    table = (own.folder("gone") / "sample_counts.csv").read_text("utf-8")
    assert sum(int(line.split(",")[1]) for line in table.splitlines() if line.startswith("image,")) == steps
    assert f"step-{steps:06d} is safe" in output.out + output.err

    for image in (own.cache.parent / "later").iterdir():
        image.rename(own.data / image.name)
    assert own.run("gone", "--resume", steps=steps + 2, **settings) == 0
