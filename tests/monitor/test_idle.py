"""Why a GPU is idle: tables of numbers, and the event of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora_trainer.monitor import memory, watches
from lora_trainer.monitor.gpu import GPU
from lora_trainer.monitor.idle import IdleSetup, causes_of, clocks_of, larger_micro, means_of
from lora_trainer.monitor.system_sampler import SystemSample, averaged
from lora_trainer.monitor.watches import LEAST_SECONDS, Watches, local_devices

CUDA = torch.device("cuda", 0)
PLAIN, COMPILED = IdleSetup(), IdleSetup(compiled=True)
SWAPS, FRESH = IdleSetup(swapped=12), IdleSetup(cached=False)


@pytest.mark.parametrize(
    ("means", "setup", "expected"),
    [
        ({}, PLAIN, []),  # nothing was measured
        ({"gpu_utilization": 0.93, "data_wait": 0.02, "main_thread": 1.0}, PLAIN, []),
        ({"gpu_utilization": 0.6, "data_wait": 0.3, "main_thread": 0.5}, PLAIN, ["data"]),
        ({"gpu_utilization": 0.6, "data_wait": 0.03, "main_thread": 0.5}, FRESH, ["unknown"]),  # 5 % is allowed
        ({"gpu_utilization": 0.5, "data_wait": 0.0, "main_thread": 0.99}, PLAIN, ["launches"]),
        ({"gpu_utilization": 0.5, "data_wait": 0.2, "main_thread": 0.99}, FRESH, ["data", "launches"]),
        ({"gpu_utilization": 0.5, "main_thread": 0.3}, SWAPS, ["block_swap"]),
        ({"gpu_utilization": 0.5, "main_thread": 0.99}, SWAPS, ["launches"]),  # copies do not keep the CPU busy
        ({"gpu_utilization": 0.4, "swap_mb_s": 30.0, "system_memory": 0.97}, PLAIN, ["swap"]),
        ({"gpu_utilization": 0.6, "gpu_in_steps": 0.95, "in_steps": 0.6}, PLAIN, ["elsewhere"]),
        ({"gpu_utilization": 0.6, "gpu_in_steps": 0.5, "in_steps": 0.6}, PLAIN, ["unknown"]),
        ({"gpu_utilization": 0.99, "gpu_throttled": 0.5}, PLAIN, ["throttled"]),
        ({"gpu_utilization": 0.5, "gpu_throttled": 0.5, "main_thread": 0.9}, PLAIN, ["launches", "throttled"]),
        ({"gpu_utilization": 0.5, "cpu": 0.99, "main_thread": 0.3}, PLAIN, ["other_programs"]),
        ({"gpu_utilization": 0.5, "gpu_other_gib": 4.0}, PLAIN, ["other_programs"]),
    ],
)
def test_the_evidence_decides_the_cause(means: dict[str, float], setup: IdleSetup, expected: list[str]) -> None:
    causes = causes_of(means, setup)
    assert [cause.name for cause in causes] == expected
    assert all(cause.what and cause.to_do.endswith(".") for cause in causes)


def test_advice_fits_the_settings() -> None:
    launching = {"gpu_utilization": 0.5, "main_thread": 0.97}
    (cause,) = causes_of(launching, PLAIN)
    assert cause.setting == "compile.enabled=true"
    assert "the training thread uses 97% of one core" in str(cause)
    (cause,) = causes_of(launching, IdleSetup(compiled=True, micro=2, samples=8, largest_micro=6))
    assert "A micro-batch of 6 fits: set train.max_micro_batch_size=6." in str(cause)
    assert larger_micro(IdleSetup(micro=2, samples=2, largest_micro=6)).startswith(
        "A micro-batch of 6 fits, and a step"
    )
    assert larger_micro(IdleSetup(micro=6, samples=8, largest_micro=6)) == larger_micro(PLAIN) == ""
    swapping = {"gpu_utilization": 0.5, "main_thread": 0.2}
    for dtype, setting in (("bf16", "memory.weight_dtype=fp8"), ("fp8", "memory.weight_dtype=nf4"), ("nf4", "")):
        (cause,) = causes_of(swapping, IdleSetup(swapped=3, weight_dtype=dtype))
        assert cause.setting == setting
    (cause,) = causes_of({"gpu_utilization": 0.5, "data_wait": 0.2}, FRESH)
    assert cause.setting == "cache.latents=true"


def gpu(clock: float, used: float = 0.9) -> GPU:
    return GPU(used, 0.5, 60.0, 300.0, clock=clock, clock_most=1980.0)


def test_a_row_has_the_averages_of_all_gpus_and_the_slowest_is_named() -> None:
    samples = [
        SystemSample(2.0, (gpu(1900.0), gpu(1200.0, 0.7)), {"cpu": 0.5}),
        SystemSample(6.0, (gpu(1900.0), gpu(1200.0, 0.9)), {"cpu": 0.1, "io_wait": 0.2}),
    ]
    row = averaged(samples)
    assert (row["seconds"], row["gpu_utilization"], row["gpu_watts"], row["cpu"], row["io_wait"]) == (
        pytest.approx((8.0, 0.85, 600.0, 0.2, 0.2))
    )
    assert [each["utilization"] for each in row["gpus"]] == pytest.approx([0.9, 0.8])
    (cause,) = causes_of(means_of([row]), PLAIN, clocks_of([row]))
    assert cause.what == "GPU 1 runs at 1200 MHz, the others at 1900: every step waits for it"
    assert clocks_of([{"gpus": [{"clock_mhz": 1.0}]}, {"gpus": "damaged"}, {}]) == []


def test_means_ignore_what_no_row_should_have() -> None:
    rows: list[dict[str, Any]] = [
        {"seconds": 10, "gpu_utilization": 0.9, "in_steps": 1.0, "gpu_celsius": 70},
        {"seconds": 30, "gpu_utilization": 0.5, "in_steps": 0.4, "gpu_celsius": 60},
        {"seconds": -1, "gpu_utilization": 9.0},
        {"seconds": "ten", "cpu": None},
    ]
    assert means_of(rows) == {
        "gpu_utilization": 0.6,
        "in_steps": 0.55,
        "gpu_in_steps": 0.9,
        "gpu_celsius": 62.5,
        "gpu_celsius_most": 70,
    }


def test_an_idle_gpu_is_reported_once_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "system_memory", lambda: (16 * 2**30, 8 * 2**30))
    monkeypatch.setattr(watches, "gpu_pool", lambda device: None)
    now, messages = [0.0], list[tuple[float, str, str]]()
    watch = Watches(CUDA, every=10.0, clock=lambda: now[0])
    watch.sampler.add(SystemSample(60.0, (GPU(0.0, 0.5, 50.0),), {}))  # while the blocks were compiled
    for _ in range(40):
        row = watch.check(1.0, 0.0, lambda kind, message: messages.append((now[0], kind, message)), steps=9)
        assert row is None or (row["gpu_utilization"], row["in_steps"], row["data_wait"]) == (0.6, 0.9, 0.0)
        now[0] += 10.0
        watch.sampler.add(SystemSample(10.0, (GPU(0.6, 0.5, 50.0),), {"main_thread": 0.98}))
    ((when, kind, message),) = messages
    assert (when, kind) == (LEAST_SECONDS, "idle")
    assert message.startswith("GPU utilization is 60%: the CPU launches the GPU's work too slowly")
    assert message.endswith("Set compile.enabled=true.")


def test_the_main_process_samples_the_gpus_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_devices(CUDA, 8) == [CUDA, torch.device("cuda", 1)]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert local_devices(CUDA, 1) == [CUDA]
    assert local_devices(torch.device("cpu"), 2) == [torch.device("cpu")]
