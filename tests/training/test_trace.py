"""The traced memory of offloading, compared with a real step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.benchmarks.peak_memory import own_tensors
from lora_trainer.memory_plan.trace import Counted, Subject, Watched, _micro_batch, make_subject, trace
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Architecture
from lora_trainer.models.folder import read_config
from lora_trainer.models.memory import offload
from lora_trainer.models.memory.checkpointing import checkpoint_blocks
from lora_trainer.models.quantization.store import make_quantizer, store_layers
from lora_trainer.training.step import StepContext, backward
from tests.training.tiny_run import TinyPlace

CPU = torch.device("cpu")
MICRO, SIDE = 2, 32


def subject_of(place: TinyPlace, *, products: bool = False, kind: str = "lora") -> Subject:
    family = FAMILIES["sd15"]
    architecture = Architecture(family.describe(place.model), read_config(place.model, "unet/config.json"))
    return make_subject(
        family,
        architecture,
        rank=4,
        targets="attention",
        dtype=torch.float32,
        stored="int8" if products else "fp32",
        products=products,
        kind=kind,
    )


def really_held(context: StepContext, subject: Subject, *, offloaded: bool) -> int:
    """Peak bytes of a step on the CPU without the weights. Offloaded tensors do not count."""
    account = Counted()
    frozen, adapter = own_tensors(context)
    for tensor in (*frozen, *adapter):
        account.follow(tensor)
    before = account.live
    if offloaded:
        context = replace(context, predict=Watched(account, context.denoiser, CPU).around(context.predict))
    micro = _micro_batch(subject, MICRO, SIDE, SIDE)
    filled = {name: torch.zeros_like(each) for name, each in vars(micro).items() if isinstance(each, torch.Tensor)}
    cond = {name: torch.zeros_like(each) for name, each in micro.cond.items()}
    with account:
        backward(context, replace(micro, **filled, cond=cond).to(CPU, torch.float32), MICRO)
    return account.most - before


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [0, 2])
def test_a_trace_shows_what_offloading_leaves_on_a_gpu(place: TinyPlace, monkeypatch, checkpointed):
    """Tensors below `least` bytes stay; of the others only those in transfer count."""
    subject, context = subject_of(place), place.run("traced").context
    checkpoint_blocks(context.denoiser, checkpointed)

    def moved_bytes(least: int, *, offloaded: bool) -> int:
        monkeypatch.setattr(offload, "LEAST_BYTES", least)
        found = trace(
            subject, micro=MICRO, height=SIDE, width=SIDE, checkpointed=checkpointed, offloaded=offloaded
        ).peak
        assert found == pytest.approx(really_held(context, subject, offloaded=offloaded), rel=0.05)
        return found

    whole = moved_bytes(64, offloaded=False)
    assert moved_bytes(2**30, offloaded=True) == whole
    most, some = moved_bytes(64, offloaded=True), moved_bytes(2**17, offloaded=True)
    assert most < some < whole
    assert most < 0.5 * whole


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointed", "chosen"), [(0, "full"), (99, "full"), (99, "selective")])
def test_a_trace_counts_the_memory_of_int8_matmuls(place: TinyPlace, checkpointed, chosen):
    subject, context = subject_of(place, products=True), place.run("products").context
    store_layers(context.denoiser, make_quantizer("int8", products=True))
    checkpoint_blocks(context.denoiser, checkpointed, chosen)
    found = trace(subject, micro=MICRO, height=SIDE, width=SIDE, checkpointed=checkpointed, recompute=chosen).peak
    assert found == pytest.approx(really_held(context, subject, offloaded=False), rel=0.05)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_trace_counts_the_memory_of_each_adapter_kind(place: TinyPlace, kind):
    """What the plan of a run with `lora.type` expects."""
    subject, context = subject_of(place, kind=kind), place.run(kind, lora__type=kind).context
    found = trace(subject, micro=MICRO, height=SIDE, width=SIDE, checkpointed=0).peak
    assert found == pytest.approx(really_held(context, subject, offloaded=False), rel=0.05)
    assert subject.adapter.size == context.adapter.size
