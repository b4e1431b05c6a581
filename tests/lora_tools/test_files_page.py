"""The commands of docs/files.md do what the page says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer.cli.main import main
from lora_trainer.lora_format.keys import KOHYA_UP
from lora_trainer.lora_format.kinds.dora import SCALE
from lora_trainer.lora_format.writing import write_lora
from lora_trainer.models.lora_names import read_lora
from tests.lora_format.tiny import facts, random_lora
from tests.models.single.originals import unet_checkpoint, write
from tests.models.single.tiny import tiny_pipeline
from tests.test_docs import CHECKOUT, code_of


def test_the_commands_of_the_page_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for those of a run, which tests/recipes/test_average_run.py runs."""
    pipeline = tiny_pipeline(tmp_path / "words", "sd15")
    write(unet_checkpoint(pipeline, "sd15"), tmp_path / "sd15.safetensors")
    for name, rank in (("cat", 6), ("style", 12)):
        write_lora(tmp_path, name, random_lora(pipeline.unet, rank=rank), facts(name=name))
    tensors = load_file(tmp_path / "cat.safetensors")
    ups = {key.removesuffix(KOHYA_UP): each for key, each in tensors.items() if key.endswith(KOHYA_UP)}
    magnitudes = {f"{name}.{SCALE}": torch.ones(len(up), *[1] * (up.ndim - 1)) for name, up in ups.items()}
    save_file(tensors | magnitudes, tmp_path / "dora.safetensors")
    monkeypatch.chdir(tmp_path)
    lines = [
        line
        for line in code_of((CHECKOUT / "docs" / "files.md").read_text("utf-8"))
        if line.startswith("lora-trainer ")
    ]
    ran = 0
    for line in lines:
        words = shlex.split(line)[1:]
        if any(word.startswith("runs/") for word in words) or len(words) < 3:
            continue
        out = Path(words[words.index("--output") + 1] if "--output" in words else words[2])
        out.unlink(missing_ok=True)
        assert main(words) == 0, (line, capsys.readouterr().err)
        assert out.is_file()
        ran += 1
    assert ran >= 8
    exact, found = read_lora(Path("cat.safetensors")).modules, read_lora(Path("extracted.safetensors")).modules
    assert found.keys() == exact.keys()
    for name, pair in exact.items():
        assert torch.allclose(found[name].delta(), pair.delta(), atol=2e-3 * float(pair.delta().abs().max()))
