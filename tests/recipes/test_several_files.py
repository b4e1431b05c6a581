"""A model with sharded denoiser and text encoder: trained, resumed, evaluated."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from diffusers import UNet2DConditionModel
from transformers import CLIPTextModel

from lora_trainer.monitor.trackers import Trackers
from tests.recipes.recipe import Bench, exported, patched, record
from tests.recipes.test_resume import stop

pytestmark = pytest.mark.exact


def in_several_files(model: Path, folder: Path) -> Path:
    copy = shutil.copytree(model, folder)
    for part, kind in (("unet", UNet2DConditionModel), ("text_encoder", CLIPTextModel)):
        whole = kind.from_pretrained(copy / part)
        shutil.rmtree(copy / part)
        whole.save_pretrained(copy / part, max_shard_size="20KB")
        assert len(list((copy / part).glob("*-of-*.safetensors"))) > 1
    return copy


@pytest.mark.slow
def test_a_sharded_model_trains_resumes_and_exports_like_a_single_file(
    finished: Bench, bench: Bench, tmp_path: Path
) -> None:
    several = replace(bench, model=in_several_files(bench.model, tmp_path / "model"))
    with patched(Trackers, "steps", stop(signal.SIGTERM)):
        assert several.run("first", checkpoint__every_n_steps=3) == 143
    assert several.run("first", "--resume", checkpoint__every_n_steps=3) == 0
    assert record(several.folder("first"))["status"] == "done"
    assert exported(several.folder("first")) == exported(finished.folder("first"))
    part = several.model / "unet"
    for each in sorted(part.glob("*.safetensors"))[:1]:
        each.write_bytes(each.read_bytes()[:-1] + b"\x01")  # another weight
    assert several.run("first", "--resume", checkpoint__every_n_steps=3, steps=8) == 2
