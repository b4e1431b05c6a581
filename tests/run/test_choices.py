"""Settings chosen for a GPU without bf16: fp16 in its place, also with 8-bit weights.

The GPU is simulated by replacing what torch reads from its driver: size, free memory, compute capability.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.presets import preset_layers
from lora_trainer.config.schema import Config
from lora_trainer.core import hardware, imports
from lora_trainer.core.errors import UsageError
from lora_trainer.doctor.facts import TorchDevice
from lora_trainer.doctor.this_run import describe_run
from lora_trainer.memory_plan.estimate import CONTEXT_GIB, GIB, LARGEST_SHARE, usable_gib
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.published import public_architecture
from lora_trainer.run import choices
from lora_trainer.run.choices import (
    Choices,
    Gpu,
    choose,
    choose_encoder_device,
    processes_on_their_gpus,
)
from lora_trainer.run.plans.plan import make_plan
from lora_trainer.run.settings import settle
from lora_trainer.training.processes import Processes
from lora_trainer.web.planner import memory_of_gpu
from tests.doctor.planted import HEALTHY


def put_in_gpu(monkeypatch: pytest.MonkeyPatch, gib: float, free: float | None = None, *, bf16: bool = True) -> None:
    """A GPU with the given total and free GiB; by default 95 % is free."""
    total, left = int(gib * GIB), int((0.95 * gib if free is None else free) * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bf16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (left, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_gpu(monkeypatch, 5.8, bf16=False)


def chosen(family: str, *user: Layer, tier: str = "6gb") -> Choices:
    resolved = resolve([*preset_layers([tier]).layers, *user])
    return choose(resolved, FAMILIES[family], public_architecture(family), torch.device("cuda"), 1)


@pytest.mark.parametrize(("family", "precision"), [("sd15", "fp16"), ("sdxl", "fp8")])
def test_an_old_gpu_computes_in_fp16_and_the_saved_config_repeats_it(
    family: str, precision: str, old_gpu: None
) -> None:
    first = chosen(family)
    assert (first.precision.value, first.dtype) == (precision, torch.float16)
    # As in a run's config.toml: choices count as set.
    again = chosen(family, Layer("--config", {"memory": {"weight_dtype": precision}}))
    assert (again.precision.value, again.dtype) == (precision, torch.float16)
    assert (again.micro, again.checkpointing) == (first.micro, first.checkpointing)


@pytest.mark.parametrize(("works", "precision"), [(True, "nf4"), (False, "fp8")])
def test_a_run_and_a_plan_for_its_gpu_agree_on_what_nf4_needs(works, precision, monkeypatch, tmp_path):
    """An installed library that fails to load counts as missing. It is not tried unless nf4 would be chosen."""
    put_in_gpu(monkeypatch, 11.8)
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    tried = tmp_path / "tried"
    if not works:
        broken = (
            f"open({str(tried)!r}, 'w').close()\nraise OSError('libcudart.so.11.0: cannot open shared object file')\n"
        )
        (tmp_path / "bitsandbytes.py").write_text(broken, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "bitsandbytes")
        monkeypatch.setattr(imports, "_broken", {})
    chosen("sdxl", tier="12gb")
    assert not tried.exists()
    found = chosen("flux", tier="12gb")
    resolved = resolve([*preset_layers(["12gb"]).layers, Layer("--set", {"model": {"family": "flux"}})])
    assert (found.precision.value, make_plan(resolved, here=True).fit.precision) == (precision, precision)
    assert tried.exists() is not works
    elsewhere = make_plan(resolved)
    assert elsewhere.fit.precision == "nf4"
    assert "pip install bitsandbytes" in elsewhere.advice[0]


@given(st.one_of(st.none(), st.floats(1.0, 48.0)), st.floats(2.0, 48.0), st.floats(0.0, 1.0))
def test_a_capped_process_stays_below_its_cap_and_the_plan_fits_under_it(limit, gpu, free):
    total = int(gpu * GIB)
    alone, crowded = (choices.capped_share(limit, int(part * total), total) for part in (1.0, free))
    assert 0.0 <= crowded <= alone <= LARGEST_SHARE
    assert crowded * total <= max(free * total - choices.LEFT_GIB * GIB, 0.0) + 1.0
    usable = usable_gib(min(gpu, limit or gpu))  # the plan's limit for torch's allocator
    assert usable * GIB <= alone * total or alone == 0.0


def test_a_gpu_in_use_is_reported(monkeypatch):
    caps = []
    put_in_gpu(monkeypatch, 8.0, 4.0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: caps.append(share))
    message = choices.cap_memory(Config(), torch.device("cuda"))
    assert message == "other programs hold 4.0 of the GPU's 8.0 GiB: this run stays under 3.8"
    put_in_gpu(monkeypatch, 8.0, 8.0)
    assert choices.cap_memory(Config(), torch.device("cuda")) is None
    assert caps == [pytest.approx(3.8 / 8), pytest.approx(LARGEST_SHARE)]
    assert choices.cap_memory(Config(), torch.device("cpu")) is None


def test_a_run_is_planned_for_the_free_memory_of_its_gpu(monkeypatch):
    def planned(free: float) -> Choices:
        put_in_gpu(monkeypatch, 12.0, free)
        batch = Layer("--set", {"train": {"effective_batch_size": 16}, "memory": {"weight_dtype": "bf16"}})
        return chosen("sd15", batch, tier="12gb")

    alone, crowded, hardly = (planned(free) for free in (11.5, 4.0, 1.5))
    assert "other programs" not in str(alone.predicted)
    assert 0 < crowded.micro < alone.micro
    assert "of 5.0, which other programs leave of 12.0" in str(crowded.predicted)
    assert crowded.precision.value == hardly.precision.value == alone.precision.value
    assert hardly.micro == 1
    peak = float(str(crowded.predicted).split()[2])
    assert peak - CONTEXT_GIB <= 4.0 - choices.LEFT_GIB


GPUS = [Gpu(0, "RTX 4090", 24.0), Gpu(1, "RTX 3060", 12.0), Gpu(2, "RTX 3090", 24.0)]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("wanted", "device", "gpus", "world", "expected"),
    [
        (None, CUDA, GPUS, 1, None),
        ("auto", CUDA, GPUS, 1, "cuda:1"),
        ("auto", torch.device("cuda", 1), GPUS, 1, "cuda:0"),
        ("auto", CUDA, GPUS[:1], 1, None),
        ("auto", CUDA, GPUS, 2, None),  # each process encodes its share on its own GPU
        ("auto", torch.device("cpu"), GPUS, 1, None),
        ("cuda:2", CUDA, GPUS, 1, "cuda:2"),
        ("cuda:0", CUDA, GPUS, 2, None),
        ("cpu", CUDA, GPUS, 2, "cpu"),
        ("cpu", torch.device("cpu"), [], 1, None),
    ],
)
def test_where_images_and_captions_are_encoded(wanted, device, gpus, world, expected):
    found = choose_encoder_device(wanted, device, gpus, world)
    assert (found and found.value) == expected


@pytest.mark.parametrize(
    ("gpus", "world", "message"),
    [
        ([], 1, "cuda:3, and this machine shows no GPU"),
        (GPUS, 1, "cuda:3, and this machine shows only cuda:0, cuda:1, cuda:2"),
        (GPUS, 4, "4 processes would share that GPU"),
    ],
)
def test_an_encoder_device_that_is_not_there_is_refused(gpus, world, message):
    with pytest.raises(UsageError, match=message):
        choose_encoder_device("cuda:3", CUDA, gpus, world)


LAPTOP = [Gpu(0, "RTX 4070", 12.0), Gpu(1, "RTX 3090", 24.0)]
ALIKE = [Gpu(0, "RTX 3090", 23.7), Gpu(1, "RTX 3090", 24.0)]  # the first one shows the desktop


@pytest.mark.parametrize(
    ("wanted", "gpus", "trains", "encodes"),
    [
        ("auto", LAPTOP, 1, "cuda:0"),
        ("auto", LAPTOP[:1], 0, None),
        ("auto", ALIKE, 0, "cuda:1"),
        ("auto", GPUS, 0, "cuda:1"),
        ("cuda:1", LAPTOP, 0, "cuda:1"),
        ("cpu", LAPTOP, 0, "cpu"),
        (None, LAPTOP, 0, None),
    ],
)
def test_the_larger_gpu_trains_and_the_smaller_one_encodes(monkeypatch, wanted, gpus, trains, encodes):
    """By the sizes of the GPUs that the machine describes: two processes have a GPU each."""
    current = []
    monkeypatch.setattr(hardware, "training_gpu", 7)  # of a former run in this Python process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=int(gpus[index].gib * GIB))
    )
    monkeypatch.setattr(choices, "visible_gpus", lambda: gpus)
    more = {"hardware": {"text_encoder_device": wanted}, "memory": {"limit_gib": None}}
    config = resolve([Layer("--set", more)]).config
    several = Processes(1, 2, torch.device("cuda", 1), None, lambda: None)
    monkeypatch.setattr(choices, "join_processes", lambda minutes: several)
    assert processes_on_their_gpus(config) is several
    assert current == []
    assert choices.gpu_gib(config) == pytest.approx(gpus[0].gib)
    assert choices.gpu_gib_for_auto([Layer("--set", more)]) == pytest.approx(gpus[trains].gib)
    assert memory_of_gpu([Layer("the page", more)]) == pytest.approx(gpus[trains].gib)
    monkeypatch.setattr(choices, "join_processes", lambda minutes: Processes(0, 1, CUDA, None, lambda: None))
    processes = processes_on_their_gpus(config)
    assert (processes.device, current) == (torch.device("cuda", trains), [processes.device])
    assert choices.gpu_gib(config) == pytest.approx(gpus[trains].gib)
    found = choose_encoder_device(wanted, processes.device, gpus, 1)
    assert (found and found.value) == encodes


@pytest.mark.parametrize(("wanted", "limit"), [("auto", 24.0), (None, 8.0)])
def test_doctor_plans_for_the_gpu_that_trains(wanted, limit):
    of_two = replace(HEALTHY.torch, devices=(TorchDevice("small", 8.0), TorchDevice("large", 24.0)))
    layers = [Layer("--set", {"model": {"family": "sd15"}, "hardware": {"text_encoder_device": wanted}})]
    described = describe_run(settle([], layers, builtin_if_none=False), replace(HEALTHY, torch=of_two))
    assert described.plan.demand.limit_gib == limit
