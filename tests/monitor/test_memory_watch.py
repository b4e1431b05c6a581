"""System memory is checked now and then, with one warning each time it becomes full."""

from __future__ import annotations

from lora_trainer.monitor import memory
from lora_trainer.monitor.memory import CHECK_EVERY, MemoryWatch
from lora_trainer.monitor.system import system_memory


def test_full_system_memory_is_reported_once_each_time(monkeypatch):
    shares, now = iter([0.5, 0.9, 0.95, 0.6, 0.86]), [0.0]
    monkeypatch.setattr(memory, "system_memory", lambda: (1000, round(1000 * (1.0 - next(shares)))))
    watch = MemoryWatch(lambda: now[0])
    messages = []
    for _ in range(5):
        messages.append(watch.check())
        assert watch.check() is None, "not between checks"
        now[0] += CHECK_EVERY
    assert [line is not None for line in messages] == [False, True, False, False, True]
    assert "90% full" in str(messages[1])


def test_free_memory_is_less_than_total_memory():
    total, available = system_memory()
    assert 0 <= available <= total
    assert total > 2**20
