"""Block swap in a whole run changes no cache, step, validation loss, image, gate or file."""

from __future__ import annotations

import pytest

from lora_trainer.run import release
from tests.recipes.recipe import exported, losses, record

pytestmark = pytest.mark.exact


def test_block_swap_does_not_change_the_run(bench, finished, monkeypatch, capsys):
    """Also when the denoiser leaves the GPU for sampling and returns, and with all other memory settings."""
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
    output = capsys.readouterr().out
    assert "blocks (on the CPU, as if it were a GPU); 99 were requested" in output
    assert "memory.offload_activations: nothing to do" in output
    folder, whole = bench.folder("first"), finished.folder("first")
    assert losses(folder) == losses(whole)
    assert exported(folder) == exported(whole)
    assert record(folder)["lora"] == record(whole)["lora"]
    assert (folder / "samples" / "before_after.png").is_file()
