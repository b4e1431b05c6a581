"""`checkpoint.export_every_n_steps`: intermediate LoRA files equal to a final export, kept for good."""

from __future__ import annotations

from safetensors import safe_open

from lora_trainer.lora_format.reading import read_lora
from tests.recipes.recipe import Bench, record, tensor_bytes


def test_intermediate_exports_are_whole_named_and_kept(bench: Bench) -> None:
    settings: dict[str, object] = {
        "checkpoint__export_every_n_steps": 2,
        "checkpoint__keep_last": 1,
        "checkpoint__export_weights": "last",
    }
    assert bench.run("run", steps=4, **settings) == 0
    folder = bench.folder("run")
    names = [f"weights/run-step-{step:06d}.safetensors" for step in (2, 4)]
    assert record(folder)["weights"] == names
    assert sorted(path.name for path in (folder / "weights").iterdir()) == [name[8:] for name in names]
    assert tensor_bytes(folder / names[1]) == tensor_bytes(folder / "run.safetensors")
    assert tensor_bytes(folder / names[0]) != tensor_bytes(folder / names[1])
    assert read_lora(folder / names[0]).modules
    with safe_open(folder / names[0], framework="numpy") as file:
        assert file.metadata()["ss_steps"] == "2"
    checkpoints = record(folder)["checkpoints"]
    assert checkpoints["written"] >= 1
    assert checkpoints["stall_seconds"]["median"] <= checkpoints["stall_seconds"]["max"]
    assert checkpoints["write_seconds"]["max"] > 0
    assert "a checkpoint stops the steps" in (folder / "report.html").read_text(encoding="utf-8")
