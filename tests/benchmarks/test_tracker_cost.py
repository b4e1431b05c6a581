"""The arithmetic of `bench trackers`: intervals, rare events in their share, and the trackers' own processes."""

from __future__ import annotations

import subprocess
import sys
from math import comb
from types import SimpleNamespace

import pytest

from lora_trainer.benchmarks.trials import tracker_cost
from lora_trainer.benchmarks.trials.tracker_cost import ChildrenTime, median_interval, times_per_step, weighted
from lora_trainer.benchmarks.turns import Timed
from lora_trainer.config.schema import Config


@pytest.mark.parametrize("count", [6, 7, 45, 100, 190])
def test_the_interval_contains_the_median_in_95_of_100_cases(count: int) -> None:
    """Exactly: the median is between two order statistics if the number of values below it is (binomial)."""
    low, high = median_interval([float(number) for number in reversed(range(count))])
    covered = sum(comb(count, below) for below in range(int(low) + 1, int(high) + 1)) / 2**count
    assert 0.95 <= covered < 0.99


def test_rare_events_count_in_their_share() -> None:
    """A block of 3 steps takes 3 s; images of 5 s every 500 steps add 3/500 of that, round by round."""
    times = {"step": Timed([3.0, 6.0], [1.0, 2.0]), "images": Timed([5.0, 10.0], [4.0, 0.0])}
    total = weighted({"step": 1.0, "images": 3 / 500}, times)
    assert total.wall == pytest.approx([3.03, 6.06])
    assert total.cpu == pytest.approx([1.024, 2.0])


def test_rare_events_are_as_often_as_the_settings_do_them() -> None:
    config = Config.model_validate(
        {
            "sample": {"every_n_steps": 500},
            "validation": {"every_n_steps": 100},
            "run": {"system_every_seconds": 10},
        }
    )
    often = times_per_step(SimpleNamespace(config=config), 0.5)
    assert often == {"samples": 1 / 500, "validation": 1 / 100, "system": 1 / 20}
    never = config.model_copy(update={"sample": config.sample.model_copy(update={"every_n_steps": 0})})
    assert "samples" not in times_per_step(SimpleNamespace(config=never), 0.5)


def test_a_process_of_a_tracker_is_named_with_its_longest_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn of 200 s must not look like a cost of every step."""
    clock = {"seconds": 0.0}

    def times() -> SimpleNamespace:
        return SimpleNamespace(user=clock["seconds"], system=0.0)

    child = SimpleNamespace(pid=7, name=lambda: "wandb-core", cpu_times=times)
    monkeypatch.setattr(tracker_cost.psutil, "Process", lambda: SimpleNamespace(children=lambda recursive: [child]))
    children = ChildrenTime()
    for way, used in [("nothing", 9.0), ("each step", 0.3), ("samples", 5.0), ("each step", 200.0)]:
        children.belong_to(way)
        clock["seconds"] += used
    children.belong_to("nothing")
    (line,) = children.notes({"each step": 1.0, "samples": 0.1}, steps=1000)
    assert line == "wandb-core: 200.80 ms of CPU a step, beside these; at most 200.00 s in one turn"


def test_a_real_process_is_found_by_its_name() -> None:
    children = ChildrenTime()
    children.belong_to("each step")
    code = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        children.belong_to("nothing")
        child.communicate(b"\n")
    lines = [line for line in children.notes({"each step": 1.0}, steps=10) if "python" in line]
    assert len(lines) == 1
    assert float(lines[0].split()[1]) >= 9.0  # ms: 0.1 s in 10 steps


def test_no_process_is_reported_as_none() -> None:
    assert ChildrenTime().notes({}, steps=10) == ["the trackers started no process"]
