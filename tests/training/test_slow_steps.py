"""A run reports steps that become slow from an outside cause."""

from __future__ import annotations

import time
from types import SimpleNamespace

from lora_trainer.monitor.slowness import KNOWN, LASTING
from lora_trainer.monitor.trackers import EVENTS, read_lines
from lora_trainer.training import loop, metrics
from tests.recipes.recipe import patched
from tests.training.tiny_run import TinyPlace

QUICK = KNOWN + 2  # steps


def test_slow_steps_are_reported_with_both_times(place: TinyPlace) -> None:
    """By a clock of the test's own: each forward pass takes 0.01 s, and from some step on 0.31 s."""
    run = place.run("slow", steps=QUICK + LASTING, train__effective_batch_size=1, validation__split=0.0)
    calls, clock = list[object](), [0.0]

    def take_time(*_: object) -> None:
        calls.append(None)
        clock[0] += 0.01 if len(calls) <= QUICK else 0.31

    run.context.denoiser.register_forward_pre_hook(take_time)
    own_time = SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic)
    with patched(loop, "time", own_time), patched(metrics, "time", own_time):
        place.train(run)
    assert len(calls) == QUICK + LASTING
    (event,) = [event for event in read_lines(run.folder / EVENTS) if event["kind"] == "slow"]
    assert event["step"] == QUICK + LASTING
    assert "0.31 s" in event["message"]
    assert "0.01 s" in event["message"]
