"""Images and captions encoded on another device than the one that trains."""

from __future__ import annotations

import pytest

from tests.recipes.recipe import Bench, losses


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_written(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run("run", hardware__text_encoder_device="cuda:7") == 2
    assert "hardware.text_encoder_device=cuda:7, and this machine shows" in capsys.readouterr().err
    assert not bench.folder("run").exists()


@pytest.mark.gpu
def test_encoding_elsewhere_gives_the_same_losses(bench: Bench) -> None:
    """On the CPU, and on a second GPU where there is one: to the rounding of the encoders."""
    import torch

    devices = ["cuda:0", "cpu", *(["cuda:1"] if torch.cuda.device_count() > 1 else [])]
    found = []
    for at, device in enumerate(devices):
        cache = {"cache__dir": bench.folder("caches") / str(at)}
        assert bench.run(f"on-{at}", hardware__text_encoder_device=device, **cache) == 0
        found.append(losses(bench.folder(f"on-{at}")))
    for others in found[1:]:
        assert others == pytest.approx(found[0], rel=1e-3)
