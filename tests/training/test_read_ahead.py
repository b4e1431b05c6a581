"""An error in the prefetch thread loses no trained step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from lora_trainer.core.errors import TrainingFailed
from lora_trainer.training import micro_batch as micros_ahead
from lora_trainer.training import processes
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints
from lora_trainer.training.micro_batch import MicroBatch, make_copier
from lora_trainer.training.training_run import Run
from tests.training.tiny_run import TinyPlace, outcome

SHORT = "CUDA out of memory. Tried to allocate 20.00 MiB."


def without_data_of(run: Run, step: int, error: Exception) -> Run:
    """The same job, whose data of `step`, counted from 0, cannot be read."""
    micros_of_step = run.feed.micros

    def micros(at: int) -> list[MicroBatch]:
        if at == step:
            raise error
        return micros_of_step(at)

    return replace(run, feed=replace(run.feed, micros=micros))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError(SHORT), "Memory ran out while reading the data of step 5 "),
        (MemoryError(), "Memory ran out while reading the data of step 5 "),
        (OSError(5, "Input/output error"), "The system failed while reading the data of step 5 .*Input/output error"),
    ],
)
def test_the_trained_steps_are_saved_and_the_resumed_run_is_the_same(place: TinyPlace, error: Exception, words: str):
    settings: dict[str, Any] = {"steps": 6, "checkpoint__every_n_steps": 100}
    whole = place.run("whole", **settings)
    place.train(whole)
    broken = without_data_of(place.run("broken", **settings), 4, error)
    with pytest.raises(TrainingFailed, match=f"{words}.*step-000004 is safe"):
        place.train(broken)
    assert [path.name for path in list_checkpoints(broken.checkpoints)] == ["step-000004"]
    resumed = place.run("broken", **settings)
    place.resume(resumed)
    assert outcome(resumed) == outcome(whole)


def test_without_memory_to_prefetch_the_step_copies_for_itself(monkeypatch: pytest.MonkeyPatch):
    """On a GPU; this one only raises an out-of-memory error."""

    def full(*args: Any) -> MicroBatch:
        raise torch.OutOfMemoryError(SHORT)

    for name in ("Stream", "device", "stream"):
        monkeypatch.setattr(micros_ahead.torch.cuda, name, lambda *args: nullcontext())
    monkeypatch.setattr(MicroBatch, "staged", full)
    values = torch.zeros(2, 4, 8, 8)
    one = MicroBatch(values, values, values, torch.zeros(2), {}, torch.zeros(2, 6), torch.ones(2))
    (found,) = make_copier(torch.device("cuda"), torch.bfloat16)([one])
    assert found is one


def test_attention_masks_of_the_conditioning_stay_on_the_cpu():
    """Caption lengths are read in every step; the rest is cast for the model."""
    values, padding = torch.zeros(2, 4, 8, 8), torch.tensor([[False, True], [False, False]])
    cond = {"embeds": torch.zeros(2, 2, 3), "padding": padding}
    one = MicroBatch(values, values, values, torch.zeros(2), cond, torch.zeros(2, 6), torch.ones(2))
    moved = one.to(torch.device("meta"), torch.bfloat16)
    assert (moved.cond["embeds"].device.type, moved.cond["embeds"].dtype) == ("meta", torch.bfloat16)
    assert moved.cond["padding"] is padding
    assert torch.equal(moved.part(0, 1).cond["padding"], padding[:1])


def test_an_all_reduce_out_of_memory_is_not_taken_for_a_lost_process(monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError(SHORT)

    monkeypatch.setattr(processes, "Group", lambda *args: type("Alone", (), {"meet": None, "wait_until": None}))
    monkeypatch.setattr(processes, "_groups", [])
    monkeypatch.setattr(processes.dist, "all_reduce", full)
    reduce = processes._together(0, 2, torch.device("cpu"), 1.0).reduce
    assert reduce is not None
    with pytest.raises(torch.OutOfMemoryError):
        reduce(torch.zeros(1))
