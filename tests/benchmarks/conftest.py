"""Steps are timed without garbage collection, which walks through all objects of the libraries."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from lora_trainer.benchmarks import interleaved
from lora_trainer.monitor import device_rates


@pytest.fixture(autouse=True)
def nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "freeze_garbage", nullcontext)
    monkeypatch.setitem(device_rates.SIDES, "cpu", 128)
