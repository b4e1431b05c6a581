"""A whole run whose blocks visit: caches, steps, validation losses, images, gate and files are those of any other run."""

from __future__ import annotations

import pytest

from lora_trainer.production import release
from tests.recipes.recipe import exported, losses, record

pytestmark = pytest.mark.exact


def test_a_run_whose_blocks_visit_is_the_same_run(bench, finished, monkeypatch, capsys):
    """Also where the trained denoiser makes room for images and comes back, and with all other means of memory on."""
    monkeypatch.setattr(release, "usable_bytes", lambda *_: 0)
    settings = {
        "memory__blocks_to_swap": 99,
        "memory__gradient_checkpointing": "true",
        "memory__checkpointing_mode": "selective",
    }
    assert (
        bench.run(
            "first", memory__offload_activations="true", sample__every_n_steps=3, gates__lora_check="lite", **settings
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "blocks (on the CPU, as if it were a GPU); 99 were requested" in said
    assert "memory.offload_activations: nothing to do" in said
    folder, whole = bench.folder("first"), finished.folder("first")
    assert losses(folder) == losses(whole)
    assert exported(folder) == exported(whole)
    assert record(folder)["lora"] == record(whole)["lora"]
    assert (folder / "samples" / "before_after.png").is_file()
