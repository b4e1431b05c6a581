"""No step reads a number from a GPU: every synchronizing call is counted, also torch's own."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.core.interrupt import Interrupt
from lora_trainer.data.loader import prefetch
from lora_trainer.optim import clipping
from lora_trainer.run_folder.progress import unwatched
from lora_trainer.training.loop import read_steps, training_loop
from lora_trainer.training.micro_batch import MicroBatch
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.state import TrainState
from tests.training.tiny_run import TinyPlace, flush_every

ASKED = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__", "cpu", "numpy")
ASKED_WITHIN = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "allclose")


STEPS = 3


class Questions(TorchFunctionMode):
    """The names of all calls that read a tensor's numbers on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.within = Within(self.found)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        self.found += [name] if name in ASKED else []
        return function(*args, **(named or {}))

    def __enter__(self) -> Self:
        self.within.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self.within.__exit__(*raised)


class Within(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.found += [name] if name in ASKED_WITHIN else []
        return function(*args, **(named or {}))


def asked_in_steps(place: TinyPlace, patch: pytest.MonkeyPatch, guard: str, **settings: object) -> list[str]:
    """The reads of some loop steps when metrics are flushed every tenth step, as on a GPU."""
    flush_every(10, patch)
    settings = {"validation__every_n_steps": 0, "checkpoint__every_n_steps": 100, "validation__split": 0, **settings}
    run = place.run("run", steps=8, **settings)
    run = replace(run, context=replace(run.context, guard=guard))
    reporter = Reporter(None, unwatched, print)
    with run.writer, closing(prefetch(read_steps(run, 0), 8)) as source:
        ready: list[list[MicroBatch]] = list(source)  # the thread that reads ahead works on the CPU
        states = training_loop(run, TrainState(), iter(ready), reporter, Interrupt())
        next(states)  # the optimizer creates its state
        with Questions() as questions:
            for _ in range(STEPS):
                next(states)
        states.close()
    return questions.found


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer__max_grad_norm": 1e-3},
        {
            "train__effective_batch_size": 4,
            "train__max_micro_batch_size": 1,
            "memory__weight_dtype": "bf16",
            "train__ema_decay": 0.99,
        },
    ],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("guard", ["on_device", "late"])
def test_a_step_reads_no_number_from_the_device(place, monkeypatch, guard, settings):
    monkeypatch.setattr(clipping, "is_here", lambda norm: False)  # as on a GPU
    assert asked_in_steps(place, monkeypatch, guard, **settings) == []


def test_waiting_for_the_device_is_detected(place, monkeypatch):
    """The guard that checks ahead reads two numbers per step."""
    assert asked_in_steps(place, monkeypatch, "ahead").count("__float__") >= 2 * STEPS


@pytest.mark.gpu
def test_the_gpu_is_not_waited_for(place, monkeypatch):
    """By torch's sync debug mode: any call that waits for the GPU is an error."""
    flush_every(10, monkeypatch)
    run = place.run("run", steps=8, validation__every_n_steps=0, checkpoint__every_n_steps=100, validation__split=0)
    assert run.context.device.type == "cuda"
    assert run.context.guard == "on_device"
    try:
        with run.writer, closing(prefetch(read_steps(run, 0), 4)) as source:
            states = training_loop(run, TrainState(), source, Reporter(None, unwatched, print), Interrupt())
            next(states)
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(STEPS):
                next(states)
            states.close()
    finally:
        torch.cuda.set_sync_debug_mode("default")
