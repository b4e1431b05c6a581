"""Background writing: the newest snapshot always reaches the disk, and errors reach the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.monitor.trackers import EVENTS, read_lines
from lora_trainer.training.checkpoints import save as saving
from lora_trainer.training.checkpoints.best import read_best
from lora_trainer.training.checkpoints.checkpoint import (
    Checkpoint,
    list_checkpoints,
    read_checkpoint,
    save_checkpoint,
    step_of,
)
from lora_trainer.training.checkpoints.save import save, settle, take
from lora_trainer.training.checkpoints.writer import Item, Kind, Writer, still_wanted
from lora_trainer.training.state import TrainState
from lora_trainer.training.training_run import Run
from tests.recipes.recipe import patched
from tests.training.tiny_run import TinyPlace, outcome

kinds = st.sampled_from(["checkpoint", "best", "weights"])


@given(st.lists(kinds, min_size=1, max_size=12))
def test_the_writer_queues_only_the_newest_of_each_kind(handed: list[Kind]) -> None:
    items = [Item(kind, lambda: None, {}) for kind in handed]
    waiting: list[Item] = []
    for item in items:
        waiting = still_wanted([*waiting, item])
    order = [items.index(next(each for each in items if each is item)) for item in waiting]
    left = [item.kind for item in waiting]
    assert order == sorted(order)
    assert left.count("checkpoint") <= 1
    assert left.count("best") <= 2
    assert left.count("weights") == handed.count("weights")
    for kind in {"checkpoint", "best"} & set(handed):
        newest = max(index for index, each in enumerate(handed) if each == kind)
        assert any(item is items[newest] for item in waiting)
    if "checkpoint" in handed:  # the best weights that it names exist before it
        at = max(index for index, each in enumerate(handed) if each == "checkpoint")
        named = [index for index, each in enumerate(handed[:at]) if each == "best"]
        assert not named or any(item is items[named[-1]] for item in waiting)


class Gate:
    """A disk that blocks until it is released."""

    def __init__(self) -> None:
        self.open, self.began = threading.Event(), threading.Event()
        self.written: list[str] = []

    def write(self, name: str) -> Callable[[], None]:
        def write() -> None:
            self.began.set()
            assert self.open.wait(300)
            self.written.append(name)

        return write


def test_a_newer_snapshot_replaces_the_queued_one_and_the_last_is_written() -> None:
    gate = Gate()
    with Writer() as writer:
        writer.put("checkpoint", gate.write("1"), {})
        assert gate.began.wait(300)
        skipped = [
            writer.put("checkpoint", gate.write(str(step)), writer.buffers("checkpoint"), step) for step in (2, 3, 4)
        ]
        assert skipped == [[], [2], [3]]
        assert gate.written == []
        gate.open.set()
        writer.settle()
        assert gate.written == ["1", "4"]
        assert writer.summary()["written"] == 2
        assert writer.replaced == 2
    with writer:  # and again
        writer.put("best", gate.write("5"), {})
    assert gate.written == ["1", "4", "5"]
    assert not [thread for thread in threading.enumerate() if thread.name == "writer"]


def test_buffers_are_reused_but_never_those_of_queued_snapshots() -> None:
    gate = Gate()
    sets: list[dict[str, torch.Tensor]] = [{"a": torch.zeros(1)} for _ in range(3)]
    with Writer() as writer:
        writer.put("checkpoint", gate.write("1"), sets[0])
        assert gate.began.wait(300)
        assert writer.buffers("checkpoint") == {}
        writer.put("checkpoint", gate.write("2"), sets[1])
        writer.put("checkpoint", gate.write("3"), sets[2])
        assert writer.buffers("checkpoint") is sets[1], "of the one that was replaced"
        assert writer.buffers("best") == {}
        gate.open.set()


def refuse() -> None:
    raise TrainingFailed(Problem("planted", "The disk refuses."))


def test_a_write_error_is_raised_in_the_loop_once() -> None:
    with Writer() as writer:
        writer.put("checkpoint", refuse, {})
        with pytest.raises(TrainingFailed, match="refuses"):
            writer.settle()
        writer.check()
        writer.put("checkpoint", refuse, {})
        while True:  # at the next step at the latest
            try:
                writer.check()
            except TrainingFailed:
                break
    with pytest.raises(TrainingFailed, match="refuses"), Writer() as writer:
        writer.put("checkpoint", refuse, {})

    def ends_otherwise() -> None:
        with Writer() as writer:
            writer.put("checkpoint", refuse, {})
            raise KeyError

    with pytest.raises(KeyError):  # the end of the loop counts
        ends_otherwise()


def test_a_snapshot_does_not_change_with_the_weights(place: TinyPlace) -> None:
    run = place.run("run", steps=3, train__ema_decay=0.5, checkpoint__every_n_steps=1)
    taken: list[Checkpoint] = []
    copies: list[dict[str, torch.Tensor]] = []

    def remembered(run: Run, state: TrainState, *buffers: Any) -> Checkpoint:
        taken.append(take(run, state))
        copies.append({name: value.detach().clone() for name, value in run.context.adapter.masters.items()})
        return take(run, state, *buffers)

    with patched(saving, "take", remembered):
        place.train(run)
    assert len(taken) == 3
    for checkpoint, copy in zip(taken, copies, strict=True):
        assert all(torch.equal(checkpoint.adapter[name], copy[name]) for name in copy)
    moments = [checkpoint.optimizer["state"][0]["exp_avg"] for checkpoint in taken]
    assert not torch.equal(moments[0], moments[1])
    assert taken[0].average is not None


def test_a_slow_disk_skips_some_checkpoints_and_loses_nothing(place: TinyPlace) -> None:
    settings: dict[str, object] = {
        "checkpoint__every_n_steps": 1,
        "validation__every_n_steps": 1,
        "optimizer__learning_rate": 0.3,
    }
    quick, slow = (place.run(name, steps=6, **settings) for name in ("quick", "slow"))
    place.train(quick)
    opened = threading.Event()

    def late(folder: Any, checkpoint: Checkpoint) -> Any:
        assert opened.wait(300)
        return save_checkpoint(folder, checkpoint)

    def samples_in(step: int) -> int:
        if step == 5:
            opened.set()
        return quick.feed.samples_in(step)

    with patched(saving, "save_checkpoint", late):
        place.train(replace(slow, feed=replace(slow.feed, samples_in=samples_in)))
    assert slow.writer.replaced > 0
    events = [row for row in read_lines(slow.folder / EVENTS) if row["kind"] == "checkpoint"]
    assert len(events) == slow.writer.replaced
    assert outcome(slow) == outcome(quick)
    assert step_of(list_checkpoints(slow.checkpoints)[0]) == 6
    named = {read_checkpoint(path).state.best_step for path in list_checkpoints(slow.checkpoints)} - {None}
    assert {path.name for path in slow.checkpoints.glob("best-*")} == {f"best-{step:06d}.safetensors" for step in named}
    assert all(read_best(slow.checkpoints, step) is not None for step in named if step)


def test_a_full_disk_ends_the_run_by_the_next_step(place: TinyPlace) -> None:
    run = place.run("run", steps=40, checkpoint__every_n_steps=2)
    calls: list[int] = []

    def samples_in(step: int) -> int:
        calls.append(step)
        run.writer._changed.acquire()
        run.writer._changed.wait_for(lambda: not run.writer._busy, timeout=300)  # a loop as slow as a real one
        run.writer._changed.release()
        return run.feed.samples_in(step)

    def full(*_: object) -> None:
        raise TrainingFailed(Problem("planted", "The disk is full."))

    with patched(saving, "save_checkpoint", full), pytest.raises(TrainingFailed, match="full"):
        place.train(replace(run, feed=replace(run.feed, samples_in=samples_in)))
    assert max(calls) <= 3


def test_a_checkpoint_of_a_stop_never_replaces_a_regular_one(place: TinyPlace) -> None:
    run = place.run("run", steps=6, checkpoint__every_n_steps=4, checkpoint__keep_last=1)
    with run.writer:
        for step in (4, 5, 6):
            save(run, TrainState(step=step), last=step == 6)
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == [6, 4]
    settle(run)


def test_samples_come_after_the_checkpoint_of_their_step(place: TinyPlace) -> None:
    run = place.run("run", steps=4, checkpoint__every_n_steps=4, sample__every_n_steps=2)
    there: list[list[int]] = []
    drawn = replace(
        run, sample=lambda state: there.append([step_of(path) for path in list_checkpoints(run.checkpoints)])
    )
    place.train(drawn)
    assert there == [[2]]


@pytest.mark.parametrize("kept", [{"keep_last": 9}, {"keep_every": 1}, {"keep_best": 9}])
def test_a_slow_disk_loses_none_of_the_checkpoints_to_keep(place: TinyPlace, kept: dict[str, int]) -> None:
    """The loop waits for the writer, which begins to write only when the loop cannot continue without it."""
    more = {f"checkpoint__{name}": value for name, value in kept.items()}
    run = place.run("run", steps=4, checkpoint__every_n_steps=1, validation__every_n_steps=1, **more)
    opened, settle = threading.Event(), run.writer.settle

    def late(folder: Any, checkpoint: Checkpoint) -> Any:
        assert opened.wait(300)
        return save_checkpoint(folder, checkpoint)

    def waited_for() -> None:
        opened.set()
        settle()

    run.writer.settle = waited_for  # type: ignore[method-assign]
    with patched(saving, "save_checkpoint", late):
        place.train(run)
    assert {step_of(path) for path in list_checkpoints(run.checkpoints)} == {1, 2, 3, 4}
    assert run.writer.replaced == 0


def test_epochs_between_checkpoints(place: TinyPlace) -> None:
    run = place.run("run", steps=12, checkpoint__every_n_steps=4, checkpoint__every_n_epochs=1, checkpoint__keep_last=9)
    place.train(run)
    epochs = set(range(run.feed.plan.steps_per_epoch, 13, run.feed.plan.steps_per_epoch))
    assert len(epochs) > 1
    assert {step_of(path) for path in list_checkpoints(run.checkpoints)} == {4, 8, 12} | epochs


def test_the_time_a_checkpoint_blocks_the_loop_counts_from_its_start(place: TinyPlace) -> None:
    """With the check of the weights and the wait for earlier snapshots."""
    run, clock = place.run("a", checkpoint__every_n_steps=2), [100.0]

    def settle() -> None:
        clock[0] += 5.0

    run.writer.settle = settle  # type: ignore[method-assign]
    with patched(saving.time, "perf_counter", lambda: clock[0]):
        save(run, TrainState(step=2), held_up=0.25)
        save(run, TrainState(step=3), held_up=0.25)
    assert run.writer.stalls == [0.25, 5.25]
