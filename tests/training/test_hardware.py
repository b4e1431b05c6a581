"""`[hardware]`: what is set, what is overridden, and that settings do not leak into the next run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.schema import Config
from lora_trainer.models.memory.phases import no_more
from lora_trainer.training.torch_settings import (
    hardware_note,
    rounds_alike_anywhere,
    set_hardware,
    set_memory_order,
    try_convolutions,
)
from tests.training.tiny_run import TinyPlace

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config(**hardware: object) -> Config:
    return resolve([Layer("test", {"hardware": hardware})]).config


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads, backends = torch.get_num_threads(), torch.backends
    products, found = torch.get_float32_matmul_precision(), (backends.cudnn.allow_tf32, backends.cudnn.benchmark)
    onednn = backends.mkldnn.enabled
    yield
    backends.mkldnn.enabled = onednn
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(products)
    backends.cudnn.allow_tf32, backends.cudnn.benchmark = found


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_onednn_is_used_unless_disabled() -> None:
    """Also in the next run of the same process. Results are equal up to rounding."""
    x, weight = torch.randn(4, 8, 32, 32), torch.randn(8, 8, 3, 3)
    answers = []
    for wanted in (True, False, True):
        set_hardware(config(onednn=wanted), CPU)
        with torch.profiler.profile() as seen:
            answers.append(torch.conv2d(x, weight))
        assert any("mkldnn" in event.key for event in seen.key_averages()) == wanted
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4)
    assert "oneDNN off" in hardware_note(config(onednn=False), CPU, channels_last=False, has_benchmark=False)


@pytest.mark.parametrize(("wanted", "exactness", "named"), [(True, "tf32", "high"), (False, "ieee", "highest")])
def test_fp32_matmuls_are_exact_unless_tf32_is_set(wanted: bool, exactness: str, named: str) -> None:
    """By all of torch's settings for it: Inductor reads the older ones, which raise if set through the newer."""
    set_hardware(config(tf32=wanted), GPU)
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    assert products.fp32_precision == exactness
    assert (convolutions.conv.fp32_precision == "tf32") == wanted
    assert torch.get_float32_matmul_precision() == named
    assert (products.allow_tf32, convolutions.allow_tf32) == (wanted, wanted)


def test_cudnn_benchmarks_few_sizes_unless_deterministic() -> None:
    assert try_convolutions(config(), GPU, shapes=8)
    assert torch.backends.cudnn.benchmark
    assert not try_convolutions(config(), GPU, shapes=9)
    assert not torch.backends.cudnn.benchmark
    assert try_convolutions(config(cudnn_benchmark=True), GPU, shapes=9)
    assert not try_convolutions(config(cudnn_benchmark=False), GPU, shapes=1)
    assert not try_convolutions(config(cudnn_benchmark=True), CPU, shapes=1)
    exact = resolve([Layer("test", {"train": {"deterministic": True}})]).config
    assert not try_convolutions(exact, GPU, shapes=1)


def test_channels_last_for_a_unet_on_a_gpu_or_when_set() -> None:
    def unet() -> nn.Module:
        return nn.Sequential(*[nn.Conv2d(4, 4, 3) for _ in range(8)])

    def last(module: nn.Module) -> bool:
        return all(each.weight.is_contiguous(memory_format=torch.channels_last) for each in module.children())

    patches = nn.Sequential(*[nn.Conv2d(4, 4, 2, stride=2) for _ in range(8)])
    assert set_memory_order(first := unet(), config(), GPU)
    assert last(first)
    assert not set_memory_order(patches, config(), GPU)
    assert not set_memory_order(second := unet(), config(), CPU)
    assert not last(second)
    assert set_memory_order(second, config(channels_last=True), CPU)
    assert "channels last" in hardware_note(config(), GPU, channels_last=True, has_benchmark=False)


@pytest.mark.slow
def test_channels_last_changes_only_rounding(place: TinyPlace) -> None:
    usual, other = place.run("first", steps=3), place.run("last", steps=3, hardware__channels_last=True)
    place.train(usual)
    place.train(other)
    convolution = next(m for m in other.context.denoiser.modules() if isinstance(m, nn.Conv2d) and m.in_channels > 4)
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    for name, value in usual.context.adapter.masters.items():
        torch.testing.assert_close(other.context.adapter.masters[name], value, rtol=1e-3, atol=1e-5)


def test_matmuls_round_the_same_at_every_address() -> None:
    assert rounds_alike_anywhere()


def test_more_blocks_than_there_are_is_reported():
    assert no_more(1000, 5) == "; 1000 were requested"
    assert no_more(True, 5) == no_more(True, 0) == no_more("auto", 5) == no_more(5, 5) == ""
