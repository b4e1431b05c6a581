"""The LoRA files of single steps, whatever the run is called and however long it is."""

from __future__ import annotations

from pathlib import Path

from lora_trainer.run_folder.record import step_files


def test_files_of_steps_are_found_by_any_name_in_order(tmp_path: Path) -> None:
    weights = tmp_path / "cat[1]" / "weights"
    weights.mkdir(parents=True)
    for name in ("cat[1]-step-1000000", "cat[1]-step-999999", "cat[1]-step-000500", "cat1-step-000400"):
        (weights / f"{name}.safetensors").touch()
    found = [path.stem.removeprefix("cat[1]-step-") for path in step_files(weights.parent)]
    assert found == ["000500", "999999", "1000000"]
