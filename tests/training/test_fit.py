"""A step out of memory repeats the same samples in smaller micro-batches, logs it, and grows back later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_trainer.core.errors import TrainingFailed
from lora_trainer.evaluation.validation_loss import ValidationLoss
from lora_trainer.models.memory import block_swap
from lora_trainer.models.memory.block_swap import swappable_blocks, swapped_count
from lora_trainer.models.memory.checkpointing import checkpointed_blocks
from lora_trainer.monitor.trackers import EVENTS, METRICS, VALIDATION, read_lines
from lora_trainer.run_folder.progress import unwatched
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, newest_valid, read_checkpoint
from lora_trainer.training.oom_fallback import agree_across_processes
from lora_trainer.training.reporter import Reporter
from lora_trainer.training.state import OomFallback, TrainState
from lora_trainer.training.training_run import Run
from lora_trainer.training.validation import MOST_SAMPLES_AT_ONCE
from tests.training.tiny_run import TinyPlace, outcome, signal_at_step, together

pytestmark = pytest.mark.exact

SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB."
FOUR = {"train__effective_batch_size": 4, "checkpoint__every_n_steps": 3, "validation__every_n_steps": 0}


class ShortBackward(torch.autograd.Function):
    """Runs out of memory in the backward pass."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(SHORT)


def counted(fails: Callable[[int], bool], work: Callable[..., Any], error: Exception | None = None) -> Any:
    """The same function, which runs out of memory halfway through some of its calls, counted from 0."""
    calls = iter(range(10**9))

    def work_or_fail(*args: Any, **kwargs: Any) -> Any:
        done = work(*args, **kwargs)
        if fails(next(calls)):
            raise error or torch.OutOfMemoryError(SHORT)
        return done

    return work_or_fail


def in_forward(run: Run, fails: Callable[[int], bool], error: Exception | None = None) -> Run:
    return replace(run, context=replace(run.context, predict=counted(fails, run.context.predict, error)))


def in_backward(run: Run, fails: Callable[[int], bool]) -> Run:
    calls, true = iter(range(10**9)), run.context.predict

    def predict(*args: Any) -> Tensor:
        predicted = true(*args)
        short: Tensor = ShortBackward.apply(predicted)  # type: ignore[no-untyped-call]
        return short if fails(next(calls)) else predicted

    return replace(run, context=replace(run.context, predict=predict))


def in_clipping(run: Run, fails: Callable[[int], bool]) -> Run:
    return replace(run, context=replace(run.context, clip=counted(fails, run.context.clip)))


def in_update(run: Run, fails: Callable[[int], bool]) -> Run:
    """After the weights changed, so that simply repeating the step would be wrong."""
    run.context.optimizer.step = counted(fails, run.context.optimizer.step)  # type: ignore[method-assign]
    return run


def on_gpu(run: Run, room: int) -> Run:
    """A GPU with room for `room` samples."""
    true = run.context.predict

    def predict(*args: Any) -> Tensor:
        if len(args[2]) > room:
            raise torch.OutOfMemoryError(SHORT)
        return true(*args)

    return replace(run, context=replace(run.context, predict=predict))


def events(run: Run) -> list[tuple[int, str]]:
    found = [row for row in read_lines(run.folder / EVENTS) if row["kind"] == "memory"]
    return [(row["step"], row["message"]) for row in found]


def trained(run: Run) -> dict[str, Any]:
    """The results of the steps, without events."""
    found = outcome(run)
    return {name: found[name] for name in ("step", "tensors", "optimizer", METRICS)}


FIRST = [in_forward, in_backward, in_clipping, in_update]


@pytest.mark.parametrize("place_of", FIRST)
def test_a_first_step_out_of_memory_is_split_in_halves(place: TinyPlace, place_of: Callable[..., Run]):
    """Bit for bit the run with that split from the start, wherever memory ran out."""
    planned = place.run("asked", steps=4, train__max_micro_batch_size=2, **FOUR)
    place.train(planned)
    short = place_of(place.run("short", steps=4, **FOUR), lambda call: call == 0)
    state, _ = place.train(short)
    assert trained(short) == trained(planned)
    assert state.fit == OomFallback(micro=2)
    ((step, message),) = events(short)
    assert step in (0, 1)
    assert SHORT.rstrip(".") in message
    assert "micro-batches of 2 " in message
    assert "in place of micro-batches of 4 " in message or "in place of micro-batches of 3 " in message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_other_out_of_memory_messages_are_recognized(place: TinyPlace, error: Exception):
    short = in_forward(place.run("short", steps=1, **FOUR), lambda call: call == 0, error)
    assert place.train(short)[0].fit.micro == 2


def test_another_error_is_not_taken_for_out_of_memory(place: TinyPlace):
    broken = in_forward(place.run("broken", steps=1, **FOUR), lambda call: call == 0, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        place.train(broken)


@pytest.mark.slow
def test_fp16_repeats_a_step_whose_gradients_were_already_unscaled(place: TinyPlace):
    settings = FOUR | {"memory__weight_dtype": "fp16", "steps": 2}
    asked = place.run("asked", train__max_micro_batch_size=2, **settings)
    place.train(asked)
    short = in_clipping(place.run("short", **settings), lambda call: call == 0)
    place.train(short)
    assert outcome(short)["scaler"] == outcome(asked)["scaler"]
    assert trained(short) == trained(asked)


def test_an_update_out_of_memory_is_repeated_from_the_last_checkpoint(place: TinyPlace):
    calm = place.run("calm", **FOUR)
    place.train(calm)
    short = in_update(place.run("short", **FOUR), lambda call: call == 4)
    state, _ = place.train(short)
    assert events(short)[0][1].endswith("training continues from step 3")
    # The same three steps, then the rest in halves.
    rows, calm_rows = (read_lines(each.folder / METRICS) for each in (short, calm))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows[:3]] == [row["loss"] for row in calm_rows[:3]]
    start = read_checkpoint(calm.checkpoints / "step-000003")
    halves = place.run("halves", **FOUR)
    place.train(halves, replace(start, state=replace(start.state, fit=state.fit)))
    assert trained(short)["tensors"] == trained(halves)["tensors"]


def test_gradient_checkpointing_is_enabled_when_one_sample_does_not_fit(place: TinyPlace):
    """This changes no bit."""
    settings = FOUR | {"train__effective_batch_size": 1, "steps": 4}
    calm = place.run("calm", **settings)
    place.train(calm)
    short = in_forward(place.run("short", **settings), lambda call: call in (2, 3))
    state, _ = place.train(short)
    blocks = checkpointed_blocks(short.context.denoiser)
    assert blocks > 1
    assert (state.fit.micro, state.fit.checkpointed) == (None, blocks)
    assert [step for step, _ in events(short)] == [3, 3]
    assert trained(short) == trained(calm)


def test_a_run_with_no_fallback_left_saves_what_was_trained(place: TinyPlace):
    short = in_forward(place.run("short", **FOUR | {"checkpoint__every_n_steps": 100}), lambda call: call >= 9)
    with pytest.raises(TrainingFailed, match="nothing left to reduce") as failed:
        place.train(short)
    problem = failed.value.problems[0]
    assert SHORT.rstrip(".") in problem.message
    assert "data.resolution" in problem.fix
    found, _ = newest_valid(short.checkpoints)
    assert found is not None
    step = found[1].state.step
    assert step > 0
    assert f"step-{step:06d} is safe" in problem.fix
    assert len(read_lines(short.folder / METRICS)) == step
    place.resume(place.run("short", **FOUR))
    assert outcome(short)["step"] == 6


def test_the_micro_batch_grows_back_and_waits_twice_as_long_after_a_failed_try(place: TinyPlace):
    settings = FOUR | {"memory__oom_recovery_steps": 2, "steps": 9}
    short = on_gpu(place.run("short", **settings), room=2)
    place.train(short)
    tries = [(step, "trying" in message) for step, message in events(short)]
    assert tries == [(1, False), (3, True), (4, False), (8, True), (8, False)]


@pytest.mark.slow
def test_a_run_that_fits_again_returns_to_its_plan(place: TinyPlace):
    settings = FOUR | {"memory__oom_recovery_steps": 2, "train__effective_batch_size": 1, "steps": 9}
    short = in_forward(place.run("short", **settings), lambda call: call in (0, 1))
    state, _ = place.train(short)
    assert (state.fit.micro, state.fit.checkpointed, state.fit.failed) == (None, None, 0)
    assert checkpointed_blocks(short.context.denoiser) == 0
    assert [step for step, _ in events(short)] == [1, 1, 3, 5]


def test_a_run_that_was_out_of_memory_resumes_bit_exactly(place: TinyPlace):
    """Stopped after any step, on the same GPU: the same micro-batches and the same tries to grow."""
    settings = FOUR | {"memory__oom_recovery_steps": 2, "steps": 8, "checkpoint__every_n_steps": 100}
    whole = on_gpu(place.run("whole", **settings), room=2)
    place.train(whole)
    for stop in (2, 4, 7):
        name = f"stopped_{stop}"
        place.train(signal_at_step(on_gpu(place.run(name, **settings), room=2), stop - 1))
        again = on_gpu(place.run(name, **settings), room=2)
        place.resume(again)
        assert outcome(again) == outcome(whole), stop


def validated_on_gpu(run: Run, room: int) -> Run:
    """A GPU with room for `room` validation samples."""
    true = run.validate
    assert true is not None

    def validate(asked: int) -> ValidationLoss:
        if asked > room:
            raise torch.OutOfMemoryError(SHORT)
        return true(asked)

    return replace(run, validate=validate)


def test_a_validation_out_of_memory_uses_smaller_micro_batches(place: TinyPlace):
    """The same losses up to rounding. A resumed run keeps the micro-batch size, bit for bit."""
    settings = FOUR | {"validation__every_n_steps": 2}
    calm = place.run("calm", **settings)
    place.train(calm)
    whole = validated_on_gpu(place.run("whole", **settings), room=1)
    state, _ = place.train(whole)
    assert [step for step, _ in events(whole)] == [0, 0]
    assert "2 samples at once in place of 4" in events(whole)[0][1]
    assert (MOST_SAMPLES_AT_ONCE, state.fit.validation_samples, state.fit.micro) == (4, 1, None)
    measured, expected = ([row["loss"] for row in read_lines(each.folder / VALIDATION)] for each in (whole, calm))
    assert len(measured) == 4
    assert measured == pytest.approx(expected, rel=1e-5)
    assert trained(whole) == trained(calm)
    place.train(signal_at_step(validated_on_gpu(place.run("stopped", **settings), room=1), 3))
    again = validated_on_gpu(place.run("stopped", **settings), room=1)
    place.resume(again)
    assert outcome(again) == outcome(whole)


def test_a_validation_that_never_fits_saves_what_was_trained(place: TinyPlace):
    asked = iter(range(100))
    run = place.run("short", **FOUR | {"validation__every_n_steps": 2, "checkpoint__every_n_steps": 100})
    true = run.validate
    assert true is not None

    def validate(most: int) -> ValidationLoss:
        if next(asked) >= 2:
            raise torch.OutOfMemoryError(SHORT)
        return true(most)

    with pytest.raises(TrainingFailed, match="while validating step 4"):
        place.train(replace(run, validate=validate))
    assert run.context.denoiser.training
    assert newest_valid(run.checkpoints)[0] is not None


def test_one_of_two_processes_shrinks_its_micro_batch_alone(place: TinyPlace):
    """No process waits in vain. Ten steps later both use the smaller micro-batches, reported once."""
    settings = FOUR | {"steps": 11}
    calm = [place.run("calm", processes=each, **settings) for each in together(2)]
    place.resume_together(calm)
    first, second = (place.run("short", processes=each, **settings) for each in together(2))
    short = [first, in_forward(second, lambda call: call == 4)]
    states = place.resume_together(short)
    assert [state.fit for state in states] == [states[0].fit] * 2
    assert states[0].fit.micro == 1
    ((step, message),) = events(first)
    assert step == 10
    assert "another process ran out of memory" in message
    mine, theirs = ([row["loss"] for row in read_lines(run.folder / METRICS)] for run in (short[0], calm[0]))
    assert mine[:2] == theirs[:2]
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_one_of_two_processes_does_not_retry_its_update_alone(place: TinyPlace):
    """The other has continued: from there the two would sum gradients of different steps."""
    first, second = (place.run("short", processes=each, **FOUR) for each in together(2))
    with pytest.raises(TrainingFailed, match="Process 0: Out of memory while the weights were changed, at step 3"):
        place.resume_together([in_update(first, lambda call: call == 2), second])
    assert not list_checkpoints(first.checkpoints), "these weights are of no step"


def in_the_sum(run: Run, fails: Callable[[int], bool]) -> Run:
    return replace(run, context=replace(run.context, reduce=counted(fails, run.context.reduce)))


@pytest.mark.parametrize("place_of", [in_the_sum, in_clipping])
def test_one_of_two_processes_out_of_memory_in_the_all_reduce_saves_and_leaves(place: TinyPlace, place_of: Any):
    """It cannot retry alone either, but its weights are still those of the step before."""
    first, second = (place.run("short", processes=each, **FOUR) for each in together(2))
    with pytest.raises(
        TrainingFailed, match="Process 0: Out of memory while gradients were summed or clipped, at step 3"
    ):
        place.resume_together([place_of(first, lambda call: call == 2), second])
    assert [path.name for path in list_checkpoints(first.checkpoints)] == ["step-000002"]


def test_blocks_are_swapped_when_all_are_already_checkpointed(place: TinyPlace):
    """More and more of them, as the last fallback, and back again. This changes no bit."""
    settings = FOUR | {
        "train__effective_batch_size": 1,
        "steps": 8,
        "memory__blocks_to_swap": 1,
        "memory__gradient_checkpointing": "true",
    }
    calm = place.run("calm", **settings)
    place.train(calm)
    assert calm.planned.swapped == swapped_count(calm.context.denoiser) == 1
    short = in_forward(place.run("short", memory__oom_recovery_steps=3, **settings), lambda call: call in (2, 3, 4))
    state, _ = place.train(short)
    blocks = len(swappable_blocks(short.context.denoiser))
    swaps = [message.split(" in place of ")[0].split(" and ")[-1] for _, message in events(short)]
    assert [step for step, _ in events(short)] == [3, 3, 3, 6]
    assert swaps == [f"{count} swapped" for count in (-(-blocks // 4), -(-blocks // 2), blocks, -(-blocks // 2))]
    assert (state.fit.swapped, state.fit.checkpointed) == (-(-blocks // 2), None)
    assert swapped_count(short.context.denoiser) == state.fit.swapped
    assert trained(short) == trained(calm)


def test_a_run_with_block_swap_resumes_bit_exactly(place: TinyPlace):
    settings = FOUR | {
        "train__effective_batch_size": 1,
        "steps": 6,
        "memory__blocks_to_swap": 2,
        "memory__gradient_checkpointing": "true",
    }
    whole = in_forward(place.run("whole", **settings), lambda call: call == 1)
    place.train(whole)
    place.train(signal_at_step(in_forward(place.run("stopped", **settings), lambda call: call == 1), 3))
    again = place.run("stopped", **settings)
    state, _ = place.resume(again)
    assert swapped_count(again.context.denoiser) == state.fit.swapped
    assert state.fit.swapped is not None
    assert outcome(again) == outcome(whole)


def test_a_gpu_without_room_to_grow_continues_unchanged(place: TinyPlace, monkeypatch: pytest.MonkeyPatch):
    """If blocks find no room to stay on the GPU again, the step keeps swapping them."""
    settings = FOUR | {
        "train__effective_batch_size": 1,
        "steps": 6,
        "memory__blocks_to_swap": 1,
        "memory__gradient_checkpointing": "true",
    }
    short = in_forward(place.run("short", memory__oom_recovery_steps=2, **settings), lambda call: call == 0)
    monkeypatch.setattr(
        block_swap.SwappedBlock, "settle", counted(lambda call: call == 0, block_swap.SwappedBlock.settle)
    )
    state, _ = place.train(short)
    assert state.step == 6
    assert [("trying" in message) for _, message in events(short)][:3] == [False, True, False]


def test_a_checkpoint_without_block_swap_is_read():
    fit = TrainState(fit=OomFallback(micro=2)).to_json()
    del fit["fit"]["swapped"]
    assert TrainState.from_json(fit).fit == OomFallback(micro=2)


def test_two_processes_agree_on_the_fewest_resident_blocks(place: TinyPlace):
    """Among processes with equal micro-batches and checkpointing, the largest number of swapped blocks counts."""
    settings = FOUR | {"memory__blocks_to_swap": 1, "memory__gradient_checkpointing": "true"}
    runs = [place.run("short", processes=each, **settings) for each in together(2)]
    fallbacks = [OomFallback(), OomFallback(swapped=3, since=7, failed=1)]
    reporters = [Reporter(None, unwatched, lambda line: None) for _ in runs]
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda run, fit, reporter: agree_across_processes(run, fit, 10, reporter), runs, fallbacks, reporters
            )
        )
    assert found == [fallbacks[1]] * 2
    assert swapped_count(runs[0].context.denoiser) == 3
