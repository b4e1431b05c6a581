"""A GPU that never finishes because another process is lost: no wait is unbounded."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.core.interrupt import SIGNALS, Interrupt, StepAborted, listening
from lora_trainer.evaluation.validation_loss import ValidationLoss
from lora_trainer.training import processes as rooms
from lora_trainer.training.loop import report_end
from lora_trainer.training.metrics import Metrics
from lora_trainer.training.oom_fallback import agree_across_processes
from lora_trainer.training.processes import Processes
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.state import OomFallback, TrainState
from lora_trainer.training.stopping import Stopping, any_aborted
from lora_trainer.training.training_run import Run
from lora_trainer.training.validation import broadcast_loss
from tests.training.tiny_run import TinyPlace


def wait_until(ready: Callable[[], bool]) -> None:
    if not ready():
        raise Lost


class Lost(TrainingFailed):
    """A real ProcessLost would make this process exit."""

    def __init__(self) -> None:
        super().__init__(Problem("planted", "Process 1 of 2 has left the run.", "Continue."))


@pytest.fixture
def hanging(monkeypatch) -> Processes:
    """One of two processes, whose GPU waits for the other forever."""
    monkeypatch.setattr(rooms, "when_done", lambda device: lambda: False)
    return Processes(0, 2, torch.device("cpu"), lambda tensor: tensor, lambda: None, wait_until)


def test_a_gpu_has_the_device_name_of_its_tensors(monkeypatch):
    """accelerate names the only GPU `cuda`, which equals no tensor's device."""
    alone = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cuda"))
    monkeypatch.setattr(rooms, "PartialState", lambda **_: alone)
    assert rooms.join_processes().device == torch.device("cuda", 0)


READS: dict[str, Callable[[Run, Reporter], object]] = {
    "numbers of steps": lambda run, reporter: Metrics(run, reporter).flush(TrainState()),
    "what fits": lambda run, reporter: agree_across_processes(run, OomFallback(), 10, reporter),
    "aborted": lambda run, reporter: any_aborted(run, mine=False),
    "the validation loss": lambda run, reporter: broadcast_loss(run, ValidationLoss(1.0, 1.0)),
    "the smallest micro-batch": lambda run, reporter: run.processes.smallest(2),
}


def test_the_cpu_trains_where_the_only_gpu_is_apples(monkeypatch):
    asked = []

    def state(*, cpu: bool, timeout: object) -> SimpleNamespace:
        asked.append(cpu)
        return SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu" if cpu else "mps"))

    monkeypatch.setattr(rooms, "PartialState", state)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rooms.join_processes().device == torch.device("cpu")
    assert asked == [True]


@pytest.mark.parametrize("read", READS)
def test_nothing_is_read_before_the_gpu_is_done(place: TinyPlace, hanging, read):
    run = replace(place.run("a"), processes=hanging)
    with pytest.raises(Lost):
        READS[read](run, Reporter(None, lambda progress: None, lambda line: None))


def test_a_single_process_never_waits(monkeypatch):
    monkeypatch.setattr(rooms, "when_done", lambda device: lambda: False)
    alone = Processes(0, 1, torch.device("cpu"), None, lambda: None, wait_until)
    alone.await_gpu()
    assert alone.sum_of_all(torch.ones(2)).tolist() == [1.0, 1.0]


class Kept(TorchDispatchMode):
    """Records the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_vote_is_written_on_its_device(place: TinyPlace, hanging):
    """On the device itself: a copy from unpinned memory would wait for the whole step."""
    run = replace(place.run("a"), processes=hanging)
    run = replace(run, context=replace(run.context, device=torch.device("meta")))
    with Kept() as kept:
        votes = Stopping(run, Interrupt())._vote(aborted=True)
    assert votes.device.type == "meta"
    assert {"aten.zeros.default", "aten.fill_.Scalar"} <= set(kept.calls)
    assert not [name for name in kept.calls if "copy" in name or "lift" in name]


def test_a_signal_during_the_validation_of_another_process_counts_here(place: TinyPlace):
    """The process without the signal ends as stopped too, not as one whose hours are over."""

    def other_is_signalled(tensor: torch.Tensor) -> torch.Tensor:
        tensor[SIGNALS.index(signal.SIGTERM)] += 1
        tensor[-1] += 1  # aborted
        return tensor

    processes = Processes(0, 2, torch.device("cpu"), other_is_signalled, lambda: None)
    run = replace(place.run("a"), processes=processes)
    events: list[str] = []
    with listening(silent=True) as interrupt:
        assert any_aborted(run, mine=False)
        assert interrupt.signal == signal.SIGTERM
        report_end(run, TrainState(), Reporter(None, lambda progress: None, events.append), interrupt)
    report_end(run, TrainState(), Reporter(None, lambda progress: None, events.append), Interrupt())
    assert events == []  # no trackers: said by the main process alone, and nothing raises


def test_an_aborted_step_is_voted_on_once(place: TinyPlace):
    """However early the signal comes, the others wait for this process's vote."""
    votes: list[list[float]] = []

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        votes.append(tensor.tolist())
        return tensor

    run = replace(place.run("a"), processes=Processes(0, 2, torch.device("cpu"), reduce, lambda: None))
    stopping = Stopping(run, Interrupt())
    with pytest.raises(StepAborted), stopping.step(TrainState()):
        raise StepAborted
    stopping.abort()
    assert [vote[-1] for vote in votes] == [1.0]
    with stopping.step(TrainState()) as gradients_are_there:
        gradients_are_there()
    stopping.abort()
    assert [vote[-1] for vote in votes] == [1.0, 0.0]
