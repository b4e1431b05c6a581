"""Steps are timed without the pause for garbage, which walks through all that the libraries hold."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from lora_trainer.jobs import rates, turns


@pytest.fixture(autouse=True)
def nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "little_garbage", nullcontext)
    monkeypatch.setattr(rates, "SIDE", 128)
