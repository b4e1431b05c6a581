"""Slow steps: never reported for noise, once for each lasting slowdown; likewise for a slow loader."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.monitor import memory, watches
from lora_trainer.monitor.gpu import GPU
from lora_trainer.monitor.memory import CHECK_EVERY, GpuPool
from lora_trainer.monitor.slowness import KNOWN, LASTING, UNDER_WAY, WINDOW, Change, Pace, paced
from lora_trainer.monitor.system_sampler import SystemSample
from lora_trainer.monitor.watches import Watches


@pytest.fixture(autouse=True)
def half_the_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the system's, whatever other programs hold."""
    monkeypatch.setattr(memory, "system_memory", lambda: (16 * 2**30, 8 * 2**30))


def watched(steps: list[tuple[float, float]], *, cached: bool = True) -> tuple[Pace, list[tuple[int, Change]]]:
    pace, found = Pace(), list[tuple[int, Change]]()
    for number, (seconds, waited) in enumerate(steps):
        pace, changes = paced(pace, seconds, waited, cached=cached, under_way=UNDER_WAY)
        found += [(number, change) for change in changes]
    return pace, found


def noise(seed: int, count: int, usual: float, spread: float) -> list[float]:
    draw = random.Random(seed)
    return [usual * math.exp(draw.gauss(0.0, spread)) for _ in range(count)]


@given(st.integers(0, 10**6), st.floats(1e-3, 100.0), st.floats(0.0, 0.3))
def test_noise_is_never_called_slow(seed, usual, spread):
    assert watched([(seconds, 0.0) for seconds in noise(seed, 400, usual, spread)])[1] == []


@given(st.integers(0, 10**6), st.floats(1e-3, 100.0), st.floats(0.0, 0.15), st.floats(4.0, 100.0))
def test_a_lasting_slowdown_and_its_end_are_reported_once(seed, usual, spread, factor):
    quick = noise(seed, 60, usual, spread)
    slow = [factor * seconds for seconds in noise(seed + 1, 60, usual, spread)]
    found = watched([(seconds, 0.0) for seconds in (*quick, *slow, *noise(seed + 2, 60, usual, spread))])[1]
    assert [change for _, change in found] == ["slow", "not_slow"]
    assert found[0][0] == 60 + LASTING - 1
    assert found[1][0] >= 120


@given(st.integers(1, LASTING - 1), st.floats(2.5, 1000.0))
def test_a_short_slowdown_is_not_reported(count, factor):
    steps = [1.0] * 30 + [factor] * count + [1.0] * 30
    assert watched([(seconds, 0.0) for seconds in steps])[1] == []


def test_the_first_steps_set_no_usual_time():
    assert watched([(1.0, 0.0)] * (KNOWN - 1) + [(9.0, 0.0)] * (LASTING - 1))[1] == []


@given(st.integers(2, 2 * KNOWN), st.floats(3.5, 100.0))
def test_a_slowdown_in_the_first_steps_is_reported(quick, factor):
    steps = [3.0, *[0.3] * quick, *[0.3 * factor] * 30, *[0.3] * 10]
    assert [change for _, change in watched([(seconds, 0.0) for seconds in steps])[1]] == ["slow", "not_slow"]


def test_spilling_from_the_fifth_step_is_reported_once_a_usual_time_is_known():
    pace, found = watched([(0.3, 0.0)] * 5 + [(2.4, 0.0)] * 5)
    assert found == [(9, "slow")]
    assert pace.usual_seconds == 0.3


@pytest.mark.parametrize(("used", "spilling", "messages"), [(0.97, True, 1), (0.97, False, 0), (0.9, True, 0)])
def test_a_gpu_full_from_the_first_step_is_reported_once_if_it_can_spill(monkeypatch, used, spilling, messages):
    monkeypatch.setattr(watches, "gpu_pool", lambda device: None)
    monkeypatch.setattr(watches, "spills", lambda: spilling)
    watch = Watches(CUDA)
    watch.sampler.add(SystemSample(1.0, (GPU(0.9, used, 60.0),), {}))
    found = heard(watch, [30.0] * 30)
    assert [kind for kind, _ in found] == ["memory"] * messages
    assert all("97% full since the start" in message for _, message in found)


@pytest.mark.parametrize(
    ("cached", "waited", "messages"), [(True, 0.02, True), (False, 0.02, False), (False, 0.06, True)]
)
def test_a_slow_loader_is_reported_with_its_limit(cached, waited, messages):
    pace, found = watched([(1.0, waited)] * (2 * WINDOW), cached=cached)
    assert [change for _, change in found] == ["starved"] * messages
    assert pace.waited_share == pytest.approx(waited)
    _, found = watched([(1.0, waited)] * WINDOW + [(1.0, 0.0)] * WINDOW, cached=cached)
    assert [change for _, change in found] == ["starved", "not_starved"] * messages


def test_a_negligible_wait_is_not_reported():
    assert watched([(0.005, 0.0005)] * (2 * WINDOW))[1] == []


def test_waits_of_a_short_run_are_not_reported():
    now, messages = [0.0], list[tuple[float, str]]()
    watch = Watches(torch.device("cpu"), clock=lambda: now[0])
    for _ in range(4 * WINDOW):
        now[0] += 0.5
        watch.check(0.5, 0.1, lambda kind, message: messages.append((now[0], kind)))
    assert messages == [(UNDER_WAY, "starved")]


CUDA = torch.device("cuda")


def heard(watch: Watches, steps: list[float]) -> list[tuple[str, str]]:
    messages = list[tuple[str, str]]()
    for seconds in steps:
        watch.check(seconds, 0.0, lambda kind, message: messages.append((kind, message)))
    return messages


@pytest.mark.parametrize(
    ("reserved", "used", "expected"),
    [(7.3, 0.8, "7.3 of 7.4 GiB"), (3.0, 0.99, "other programs"), (3.0, 0.6, "what else runs")],
)
def test_the_cause_of_slow_steps_is_reported(monkeypatch, reserved, used, expected):
    gib = 2**30
    memory = GpuPool(gib, int(reserved * gib), int(reserved * gib), int(7.4 * gib), 0)
    monkeypatch.setattr(watches, "gpu_pool", lambda device: memory)
    watch = Watches(CUDA)
    watch.sampler.add(SystemSample(1.0, (GPU(0.9, used, 60.0),), {}))
    ((kind, message), end) = heard(watch, [0.5] * 20 + [30.0] * 20 + [0.5] * 20)
    assert kind == "slow"
    assert "a step takes 30.00 s (usual 0.50 s)" in message
    assert expected in message
    assert end == ("slow", "steps take 0.50 s again")


def test_steps_with_another_split_are_not_slow():
    watch, messages = Watches(torch.device("cpu")), list[str]()
    for split, seconds in (("whole", 0.5), ("halves", 30.0), ("whole", 0.5)):
        for _ in range(30):
            watch.check(seconds, 0.0, lambda kind, message: messages.append(kind), split)
    assert messages == []


def test_heat_is_reported_once_until_it_is_over(monkeypatch):
    monkeypatch.setattr(watches, "gpu_pool", lambda device: None)
    watch = Watches(CUDA, every=10.0)
    hot = GPU(0.99, 0.9, 91.0, clock=900.0, clock_most=1800.0, reasons=0x40)
    messages = heard(watch, [0.5])
    cool = GPU(0.9, 0.9, 70.0, clock=1790.0, clock_most=1800.0)
    for gpus in ((cool, hot, hot), (hot, cool, hot), (cool, cool, cool), (hot, hot, hot)):  # at the limit it varies
        for gpu in gpus:
            watch.sampler.add(SystemSample(4.0, (gpu,), {}))
        messages += heard(watch, [0.5, 0.5])
    assert [kind for kind, _ in messages] == ["throttled", "throttled"]
    assert "900 of 1800 MHz (91 degrees)" in messages[0][1]


@pytest.mark.parametrize(
    ("platform", "allocator", "advice"),
    [
        ("linux", "garbage_collection_threshold:0.8", "Set memory.expandable_segments=true"),
        ("linux", "expandable_segments:True", "set train.max_micro_batch_size=1"),
        ("win32", "garbage_collection_threshold:0.8", "set train.max_micro_batch_size=1"),
    ],
)
def test_fragmented_memory_is_reported_when_it_costs_time(monkeypatch, platform, allocator, advice):
    gib, now, memory = 2**30, [0.0], list[GpuPool]()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", allocator)
    monkeypatch.setattr(watches.sys, "platform", platform)
    monkeypatch.setattr(watches, "gpu_pool", lambda device: memory[-1])
    watch, messages = Watches(CUDA, clock=lambda: now[0]), list[str]()
    for allocated, retries in ((4, 0), (4, 3), (4, 3), (7, 5)):
        memory.append(GpuPool(allocated * gib, 7 * gib, 7 * gib, 8 * gib, retries))
        messages += [message for _, message in heard(watch, [0.5, 0.5])]
        now[0] += CHECK_EVERY
    (message,) = messages
    assert "3.0 of 8.0 GiB are reserved but not in use" in message
    assert "3 times" in message
    assert advice in message


def test_cpu_monitoring_works_without_a_gpu():
    with Watches(torch.device("cpu")) as watch:
        assert heard(watch, [0.5] * 20) == []
    report = watch.summary()
    assert 0.0 < report["system_memory"] <= 1.0
    assert all(0.0 <= report[name] <= 1.0 for name in ("io_wait", "cpu") if name in report)
    assert not [name for name in report if name.startswith("gpu")]
