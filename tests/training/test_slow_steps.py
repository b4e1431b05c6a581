"""A run reports steps that become slow from an outside cause."""

from __future__ import annotations

import time

from lora_trainer.monitor.slowness import KNOWN, LASTING
from lora_trainer.monitor.trackers import EVENTS, read_lines
from tests.training.tiny_run import TinyPlace

QUICK = KNOWN + 2  # steps


def test_slow_steps_are_reported_with_both_times(place: TinyPlace) -> None:
    """A hook really sleeps in the forward pass, many times as long as the step takes."""
    run = place.run("slow", steps=QUICK + LASTING, train__effective_batch_size=1, validation__split=0.0)
    calls: list[object] = []

    def sleep(*_: object) -> None:
        calls.append(None)
        if len(calls) > QUICK:
            time.sleep(0.3)

    run.context.denoiser.register_forward_pre_hook(sleep)
    place.train(run)
    assert len(calls) == QUICK + LASTING
    events = [event for event in read_lines(run.folder / EVENTS) if event["kind"] == "slow"]
    assert events[-1]["step"] == QUICK + LASTING
    assert "a step takes 0." in events[-1]["message"]
    assert "check what else runs on this machine" in events[-1]["message"]
