"""The number of images encoded at once, as planned for the model's own VAE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_trainer.core.errors import UsageError
from lora_trainer.data.buckets import Bucket
from lora_trainer.models.memory.phases import encoding_bytes, phase_costs
from lora_trainer.run import caching
from lora_trainer.run.caching import images_together


def test_the_models_own_vae_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, pixels = phase_costs("sdxl"), 512 * 512
    encoder, each = encoding_bytes(costs)
    own = SimpleNamespace(**{**vars(costs), "autoencoder": 3 * costs.autoencoder})
    monkeypatch.setattr(caching, "usable_bytes", lambda *_: encoder + int(3.5 * each * pixels))
    plans: Any = SimpleNamespace(counts={Bucket(512, 512): 1})
    inputs: Any = SimpleNamespace(
        train_plan=plans, validation_plan=plans, family=SimpleNamespace(name="sdxl"), facts=SimpleNamespace()
    )
    config: Any = SimpleNamespace(cache=SimpleNamespace(batch_size=8))
    choices: Any = SimpleNamespace(
        device=torch.device("cpu"), encodes_on=torch.device("cpu"), encoder_dtype=torch.float32
    )
    monkeypatch.setattr(caching, "costs_of", lambda facts, without=(): costs)
    assert images_together(config, inputs, choices, missing=True) == 3
    monkeypatch.setattr(caching, "costs_of", lambda facts, without=(): own)
    assert images_together(config, inputs, choices, missing=True) < 3
    monkeypatch.setattr(caching, "usable_bytes", lambda *_: encoder + each * pixels)
    with pytest.raises(UsageError, match=r"Encoding one image of 0\.3 megapixels"):
        images_together(config, inputs, choices, missing=True)
