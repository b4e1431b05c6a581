"""The trained denoiser leaves the GPU for sampling, by the size of an unquantized one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lora_trainer.config.schema import Config, Precision
from lora_trainer.lora_format.weights import shapes_of
from lora_trainer.models.quantization.store import make_quantizer, store_layers
from lora_trainer.run import release
from lora_trainer.run.release import ROOM_TO_DRAW, making_room

WIDE = 2 * 64 * 64  # bytes of the layer below in bf16


@pytest.mark.parametrize("stored", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize(("usable", "leaves"), [(ROOM_TO_DRAW * WIDE + 1, False), (ROOM_TO_DRAW * WIDE, True)])
def test_the_model_leaves_the_gpu_when_another_does_not_fit_next_to_it(
    monkeypatch: pytest.MonkeyPatch, stored: Precision, usable: float, leaves: bool
) -> None:
    if stored == "nf4":
        pytest.importorskip("bitsandbytes")
    denoiser = nn.Sequential(nn.Linear(64, 64, bias=False)).to(torch.bfloat16).requires_grad_(False)
    if narrow := make_quantizer(stored):
        store_layers(denoiser, narrow)
    context: Any = SimpleNamespace(denoiser=denoiser, built=SimpleNamespace(shapes=shapes_of({"unet": denoiser})))
    choices: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    went: list[str] = []
    monkeypatch.setattr(release, "usable_bytes", lambda config, device: usable)
    monkeypatch.setattr(release, "free_memory", lambda device: None)
    monkeypatch.setattr(release, "move_to_device", lambda denoiser, device: went.append(device.type))
    with making_room(context, cast("Config", None), choices):
        assert went == ["cpu"] * leaves
    assert went == ["cpu", "cuda"] * leaves
