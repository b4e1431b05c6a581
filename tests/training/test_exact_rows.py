"""Rows of metrics and validation after a kill while writing: the same numbers, each once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lora_trainer.core import io
from lora_trainer.monitor import trackers
from tests.recipes.recipe import patched
from tests.training.tiny_run import TinyPlace, outcome

pytestmark = pytest.mark.exact

WRITES = 10  # six rows of steps, four of validations
SETTINGS: dict[str, object] = {"checkpoint__every_n_steps": 2, "validation__every_n_steps": 2}


class PowerCut(BaseException):
    """Ends a run without running error handlers."""


def cut_in(number: int) -> Callable[[Path, str], None]:
    """An `append` that dies in the middle of a row, at its `number`th call."""
    left = [number]

    def append(path: Path, text: str) -> None:
        left[0] -= 1
        if left[0]:
            return io.append_text(path, text)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text[: len(text) // 2])
        raise PowerCut

    return append


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in (5, 8) else pytest.mark.slow) for n in range(1, 1 + WRITES)]
)
def test_rows_continue_after_a_kill_while_writing(number: int, place: TinyPlace) -> None:
    straight = place.run("straight", **SETTINGS)
    place.train(straight)
    with patched(trackers, "append_text", cut_in(number)), pytest.raises(PowerCut):
        place.train(place.run("torn", **SETTINGS))
    torn = place.run("torn", **SETTINGS)
    place.resume(torn)
    assert outcome(torn) == outcome(straight)
    rows = outcome(torn)
    assert [row["step"] for row in rows["metrics.jsonl"]] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows["validation.jsonl"]] == [0, 2, 4, 6]
