"""Several resolutions, crops, flips, color augmentation and masks in one run, through the command."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from lora_trainer.cli.main import main
from lora_trainer.monitor.trackers import Trackers
from tests.recipes.recipe import Bench, draw_images, exported, losses, patched
from tests.recipes.test_resume import stop


@pytest.fixture(scope="module")
def varied(tiny_model: Path, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Two sources: one masked with two resolutions and all augmentations, one plain."""
    folder = tmp_path_factory.mktemp("varied")
    draw_images(folder / "masked", 4)
    for number in range(4):
        path = folder / "masked" / f"image_{number}.png"
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGBA")).copy()
        pixels[:, : pixels.shape[1] // 2, 3] = 0
        Image.fromarray(pixels).save(path)
    draw_images(folder / "plain", 10)
    for number in range(4):
        (folder / "plain" / f"image_{number}.png").unlink()
        (folder / "plain" / f"image_{number}.txt").unlink()
    settings = f"""
[data]
resolutions = [64]
crop_variants = 2

[[data.sources]]
path = {json.dumps(str(folder / "masked"))}
masks = "alpha"
resolutions = [48, 80]
crop = "random"
flip = true
color_variants = 1

[[data.sources]]
path = {json.dumps(str(folder / "plain"))}
"""
    (folder / "varied.toml").write_text(settings, encoding="utf-8")
    return Bench(tiny_model, folder / "varied.toml", folder / "runs", shared_cache)


def run(bench: Bench, name: str, *extra: str, **settings: object) -> int:
    arguments = bench.arguments(name, *extra, train__effective_batch_size=4, **settings)
    arguments[arguments.index("--data")] = "--config"
    return main(arguments)


@pytest.fixture(scope="module")
def straight(varied: Bench) -> Path:
    assert run(varied, "straight") == 0
    return varied.folder("straight")


def begun(bench: Bench, name: str, **settings: object) -> list[float]:
    """The losses of a run that is stopped after three steps."""
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert run(bench, name, **settings) == 143
    return losses(bench.folder(name))


def test_a_stopped_run_with_image_variants_resumes_exactly(varied, straight, capsys):
    begun(varied, "broken")
    output = capsys.readouterr().out
    assert "80x80" in output
    assert "up to 16 of each image, used in turn, " in output
    assert "note: 6 steps show an image about 2.7 times, so not all of its variants" in output
    assert run(varied, "broken", "--resume", data__max_aspect=1.5) == 2
    assert "data.max_aspect was 2.0 and is now 1.5" in capsys.readouterr().err
    assert run(varied, "broken", "--resume") == 0
    assert losses(straight) == losses(varied.folder("broken"))
    assert exported(straight) == exported(varied.folder("broken"))
    with safe_open(straight / "straight.safetensors", framework="pt") as opened:
        header = opened.metadata()
    assert {header[f"ss_{name}"] for name in ("flip_aug", "random_crop", "color_aug")} == {"True"}


def test_image_variants_learn_the_same_when_split_or_uncached_and_masks_count(varied, straight):
    """Each stays in one bucket and has its own masks."""
    whole = losses(straight)[:3]
    assert begun(varied, "split", train__max_micro_batch_size=1) == pytest.approx(whole, rel=1e-3)
    assert begun(varied, "uncached", cache__latents="false") == pytest.approx(whole, rel=1e-3)
    assert begun(varied, "unmasked", loss__unmasked_weight=1) != pytest.approx(whole, rel=1e-3)
