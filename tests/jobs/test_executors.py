"""The share of the machine of each worker, and what Ray is asked for."""

from __future__ import annotations

import copy
import sys

import pytest

from lora_trainer.core import hardware
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.jobs.executors import ExecutorOptions, local, ray


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


def test_all_that_is_wrong_with_the_options_of_ray_is_one_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    wrong = {"adress": "auto", "gpus": "2", "cpus": "none"}
    with pytest.raises(UsageError) as refused:
        ray.check(ExecutorOptions(1, wrong))
    assert [problem.message for problem in refused.value.problems] == [
        "--executor ray has no option adress.",
        "--executor-option gpus=2: a job trains on one GPU or a part of one.",
        "--executor-option cpus=none is no number of CPUs.",
        "--executor ray needs Ray, which is not installed.",
    ]


def test_an_error_of_a_node_keeps_its_words():
    """Ray makes it again in another process, as a copy does."""
    error = UsageError([Problem("one", "One is wrong.", "Correct it."), Problem("two", "Two is wrong.")])
    assert str(copy.copy(error)) == "One is wrong. Correct it.\nTwo is wrong."
