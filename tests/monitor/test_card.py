"""The card as NVML tells of it: what is made of its readings.

The readings alone are made up, at the border of the machine, where the driver would give them; on a GPU the last test
reads real ones.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from lora_trainer.monitor import memory
from lora_trainer.monitor.card import Card, CardWatch, open_card
from lora_trainer.monitor.memory import ALLOCATOR, grows_in_place, held_on, set_allocator

CUDA = torch.device("cuda", 0)


def refuse(*_: object) -> float:
    raise RuntimeError("not supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=93),
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=6, total=8),
        nvmlDeviceGetTemperature=lambda card, sensor: 84,
        nvmlDeviceGetPowerUsage=lambda card: 210_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda card: 220_000,
        nvmlDeviceGetClockInfo=lambda card, clock: 1000,
        nvmlDeviceGetMaxClockInfo=lambda card, clock: 1900,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: 0x4,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    return fake


def test_a_look_has_what_the_card_says(nvml):
    look = open_card(CUDA)
    assert look is not None
    card = look()
    assert card == Card(0.93, 0.75, 84.0, 210.0, 220.0, 1000.0, 1900.0, 0x4)
    assert str(card.throttled).startswith("power holds the card at 1000 of 1900 MHz (210 of 220 W)")
    nvml.nvmlDeviceGetPowerUsage = nvml.nvmlDeviceGetMaxClockInfo = refuse
    assert look() == Card(0.93, 0.75, 84.0, None, 220.0, 1000.0, None, 0x4)
    assert look().throttled is None


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (Card(1.0, 0.5, 92.0, clock=800.0, clock_most=1900.0, reasons=0x20), "heat holds the card at 800"),
        (Card(1.0, 0.5, 92.0, clock=1850.0, clock_most=1900.0, reasons=0x20), None),
        (Card(1.0, 0.5, 70.0, 450.0, 450.0, clock=2400.0, clock_most=3100.0, reasons=0x4), None),  # as healthy cards do
        (Card(0.0, 0.5, 40.0, clock=300.0, clock_most=1900.0, reasons=0x1), None),  # idle
    ],
)
def test_only_lower_clocks_with_a_reason_are_throttling(card, said):
    assert card.throttled is None if said is None else str(card.throttled).startswith(said)


def test_without_a_card_or_nvml_nothing_is_looked_at(nvml, monkeypatch):
    assert open_card(torch.device("cpu")) is None
    nvml.nvmlInit = refuse
    assert open_card(CUDA) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_card(CUDA) is None
    CardWatch().start(None)


def test_the_watch_looks_in_a_thread_until_the_card_stops_answering():
    looks = iter([Card(0.5, 0.5, 50.0)] * 3)
    watch = CardWatch(every=0.001)
    watch.start(lambda: next(looks))
    for _ in range(60_000):
        if len(watch.seen) == 3:
            break
        time.sleep(0.005)
    watch.stop()
    assert len(watch.seen) == 3


def test_what_the_allocator_holds(monkeypatch):
    stats = {"allocated_bytes.all.current": 3, "reserved_bytes.all.current": 7, "reserved_bytes.all.peak": 9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats | {"num_alloc_retries": 2})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=20))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    held = held_on(CUDA)
    assert held is not None
    assert (held.unused, held.most_reserved, held.limit, held.retries) == (4, 9, 10, 2)
    assert held_on(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("platform", "expandable", "grows"), [("linux", True, True), ("linux", False, False), ("win32", True, False)]
)
def test_the_allocator_is_told_before_the_card_is_woken(monkeypatch, platform, expandable, grows):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(memory.sys, "platform", platform)
    set_allocator(expandable=expandable)
    found = memory.os.environ["PYTORCH_ALLOC_CONF"]
    assert ("expandable_segments:True" in found) == grows == grows_in_place()
    assert ("garbage_collection_threshold" in found) == (not grows), "torch heeds one of them alone"
    set_allocator(expandable=not expandable)  # the next job of the same process
    assert grows_in_place() == (not expandable and platform == "linux")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize("name", ALLOCATOR)
def test_what_the_user_told_the_allocator_stays(monkeypatch, name):
    for each in ALLOCATOR:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_allocator(expandable=True)
    assert {each: memory.os.environ[each] for each in ALLOCATOR if each in memory.os.environ} == {
        name: "max_split_size_mb:64"
    }


@pytest.mark.gpu
def test_a_card_that_is_there_is_read() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.zeros(2**24, device=device)
    look, held = open_card(device), held_on(device)
    assert look is not None
    assert held is not None
    assert 0.0 <= look().utilisation <= 1.0
    assert 0.0 < look().memory <= 1.0
    assert 0.0 < look().celsius < 120.0
    assert kept.nbytes <= held.allocated <= held.reserved <= held.most_reserved <= held.limit
