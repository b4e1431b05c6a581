"""The share of the machine of each worker."""

from __future__ import annotations

import pytest

from lora_trainer.batch.executors import local
from lora_trainer.core import hardware


@pytest.mark.parametrize(
    ("named", "count", "gpus"),
    [(None, 0, []), (None, 3, ["0", "1", "2"]), ("2,5", 2, ["2", "5"]), ("GPU-a, GPU-b", 2, ["GPU-a", "GPU-b"])],
)
def test_gpus_keep_the_names_from_the_user(named, count, gpus, monkeypatch):
    """Only the number of GPUs is simulated."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert hardware.visible_gpus() == gpus


def test_workers_take_gpus_in_turn_and_share_the_cpu(monkeypatch):
    """For eight cores and two GPUs; the rest is that of this machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(local, "available_cpus", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen = [local.worker_environment(index, 3) for index in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["4", "7", "4"]
    assert {each["OMP_NUM_THREADS"] for each in seen} == {"2"}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS" not in local.worker_environment(0, 3), "the user's own word stands"
