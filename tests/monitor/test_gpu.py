"""GPU readings from NVML and what follows from them.

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
from lora_trainer.monitor.gpu import GPU, open_gpus
from lora_trainer.monitor.memory import ALLOCATOR, gpu_pool, grows_in_place, set_allocator
from lora_trainer.monitor.system_sampler import SystemSampler

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
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=93),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=6, total=8),
        nvmlDeviceGetTemperature=lambda gpu, sensor: 84,
        nvmlDeviceGetPowerUsage=lambda gpu: 210_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 220_000,
        nvmlDeviceGetClockInfo=lambda gpu, clock: 1000,
        nvmlDeviceGetMaxClockInfo=lambda gpu, clock: 1900,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x4,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    return fake


def test_a_reading_has_what_the_gpu_reports(nvml):
    (gpu_reader,), why = open_gpus([CUDA])
    assert why == ""
    gpu = gpu_reader()
    assert gpu == GPU(0.93, 0.75, 84.0, 210.0, 220.0, 1000.0, 1900.0, 0x4)
    assert str(gpu.throttled).startswith("power limits the GPU to 1000 of 1900 MHz (210 of 220 W)")
    nvml.nvmlDeviceGetPowerUsage = nvml.nvmlDeviceGetMaxClockInfo = refuse
    assert gpu_reader() == GPU(0.93, 0.75, 84.0, None, 220.0, 1000.0, None, 0x4)
    assert gpu_reader().throttled is None


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (GPU(1.0, 0.5, 92.0, clock=800.0, clock_most=1900.0, reasons=0x20), "heat limits the GPU to 800"),
        (GPU(1.0, 0.5, 92.0, clock=1850.0, clock_most=1900.0, reasons=0x20), None),
        (GPU(1.0, 0.5, 70.0, 450.0, 450.0, clock=2400.0, clock_most=3100.0, reasons=0x4), None),  # as healthy GPUs do
        (GPU(0.0, 0.5, 40.0, clock=300.0, clock_most=1900.0, reasons=0x1), None),  # idle
    ],
)
def test_only_lower_clocks_with_a_reason_are_throttling(gpu, expected):
    assert gpu.throttled is None if expected is None else str(gpu.throttled).startswith(expected)


def test_without_a_gpu_or_nvml_nothing_is_read_and_the_reason_is_known(nvml, monkeypatch):
    assert open_gpus([torch.device("cpu")]) == ((), "")
    nvml.nvmlInit = refuse
    assert open_gpus([CUDA]) == ((), "the driver does not answer: not supported")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus([CUDA]) == ((), "a package is missing: pip install 'lora-trainer[gpu]'")


def test_an_amd_gpu_is_read_through_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 4))
    for name, value in (("utilization", 70), ("temperature", 61), ("power_draw", 250_000)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "clock_rate", refuse)
    (gpu_reader,), _ = open_gpus([CUDA])
    assert gpu_reader() == GPU(0.7, 0.75, 61.0, 250.0)
    assert gpu_reader().throttled is None

    def no_package(device: torch.device) -> int:
        raise ModuleNotFoundError("amdsmi")

    monkeypatch.setattr(torch.cuda, "utilization", no_package)
    assert open_gpus([CUDA]) == ((), "a package is missing: amdsmi, which comes with ROCm")


def test_the_host_is_still_sampled_when_the_gpu_stops_responding():
    looks = iter([GPU(0.5, 0.5, 50.0)] * 2)
    sampler = SystemSampler(every=0.005)
    sampler.start([lambda: next(looks)])
    for _ in range(60_000):
        row = sampler.take() or {}
        if "system_memory" in row and "gpu_utilization" not in row:
            break
        time.sleep(0.005)
    sampler.stop()
    assert "gpu_utilization" not in row
    assert 0.0 < row["system_memory"] <= 1.0


def test_the_memory_of_the_allocator(monkeypatch):
    stats = {"allocated_bytes.all.current": 3, "reserved_bytes.all.current": 7, "reserved_bytes.all.peak": 9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats | {"num_alloc_retries": 2})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=20))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    memory = gpu_pool(CUDA)
    assert memory is not None
    assert (memory.unused, memory.most_reserved, memory.limit, memory.retries) == (4, 9, 10, 2)
    assert gpu_pool(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("platform", "expandable", "grows"), [("linux", True, True), ("linux", False, False), ("win32", True, False)]
)
def test_the_allocator_is_configured_before_the_gpu_is_initialized(monkeypatch, platform, expandable, grows):
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
def test_allocator_settings_of_the_user_are_kept(monkeypatch, name):
    for each in ALLOCATOR:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_allocator(expandable=True)
    assert {each: memory.os.environ[each] for each in ALLOCATOR if each in memory.os.environ} == {
        name: "max_split_size_mb:64"
    }


@pytest.mark.gpu
def test_an_available_gpu_is_read() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.zeros(2**24, device=device)
    ((gpu_reader,), _), allocator = open_gpus([device]), gpu_pool(device)
    assert allocator is not None
    assert 0.0 <= gpu_reader().utilization <= 1.0
    assert 0.0 < gpu_reader().memory <= 1.0
    assert 0.0 < gpu_reader().celsius < 120.0
    assert kept.nbytes <= allocator.allocated <= allocator.reserved <= allocator.most_reserved <= allocator.limit
