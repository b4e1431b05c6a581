"""Stop training before its last step, for a signal or `train.max_hours`, and do what is requested: in all processes at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.interrupt import (
    SIGNALS,
    Interrupt,
    StepAborted,
    abortable,
    no_more_aborting,
    note_signal,
    signal_that_came,
)
from lora_trainer.training.requests import KINDS
from lora_trainer.training.training_run import Run, is_finished, is_unvalidated

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.training.state import TrainState


class Stopping:
    """Decides in each step. Processes vote before they sum their gradients, so that none continues alone.

    On the CPU the votes are read at once, and a step that one process aborts is aborted in all. On GPUs the host
    would have to wait for them: they are read one step later, and all GPUs finish their step.
    """

    def __init__(self, run: Run, interrupt: Interrupt) -> None:
        self._run, self._interrupt = run, interrupt
        self._alone = run.processes.reduce is None
        self._is_on_gpu = run.context.device.type != "cpu"
        self._has_voted = False
        self._seconds = 0.0  # of the newest step
        self._votes: Tensor | None = None  # of the newest step, on the CPU once the event `_there` is done
        self._there: torch.cuda.Event | None = None
        self._late = False
        self._agreed = False  # all processes end the loop after this step,
        self._signalled = False  # and for a signal
        run.requests.restart()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """While the data of a step is waited for."""
        if not self._alone:
            yield
            return
        with abortable(0.0):
            yield

    @contextmanager
    def step(self, state: TrainState) -> Iterator[Callable[[], None]]:
        """Around the step after `state`. Yields the function that the step calls when its gradients are there.

        Raises StepAborted, before any weight is changed.
        """
        self._late, began = out_of_time(self._run.config, state), time.monotonic()
        if self._alone:
            with abortable(self._seconds):
                yield no_more_aborting
        elif self._is_on_gpu:
            yield self._vote_on_gpu
        else:
            self._has_voted = False
            # Others would wait for the blocks of a pass that only this process left.
            with nullcontext() if self._run.context.is_sharded else abortable(self._seconds):
                yield self._vote_and_count
        self._seconds = time.monotonic() - began

    def decide(self, state: TrainState) -> None:
        """Decide, once for each step, whether the loop ends after it, and what is requested: `state` is the one after it."""
        if self._alone:
            requests = self._run.requests
            requests.agree(compress(KINDS, requests.read()))
            self._signalled = bool(self._interrupt)
            self._agreed = self._signalled or out_of_time(self._run.config, state)

    def is_last(self, state: TrainState) -> bool:
        """Whether the loop ends after the step that led to `state`."""
        # An aborted validation is done on resuming.
        return is_finished(self._run, state) or self._agreed or is_unvalidated(self._run, state)

    @property
    def is_signalled(self) -> bool:
        """Whether a signal ends it."""
        return self._signalled

    def abort(self) -> None:
        """Tell the other processes that this one aborted the step; called for every aborted step."""
        if not self._alone and not self._is_on_gpu and not self._has_voted:
            self._count(self._vote(aborted=True))

    def _vote_and_count(self) -> None:
        no_more_aborting()
        self._has_voted = True
        if self._count(self._vote(aborted=False)):
            raise StepAborted

    def _vote(self, *, aborted: bool) -> Tensor:
        """The votes of all processes, summed, [requests + signals + 2]: how many read each kind of request (the main one
        alone does), got each signal, are late, have aborted."""
        assert self._run.processes.reduce is not None
        mine = [*self._run.requests.read(), *votes_for(self._interrupt.signal), self._late, aborted]
        votes = torch.zeros(len(mine), device=self._run.context.device)
        for place, is_set in enumerate(mine):
            if is_set:
                votes[place].fill_(1.0)  # by the GPU itself: a copy to it would wait for all queued work
        return self._run.processes.reduce(votes)

    def _vote_on_gpu(self) -> None:
        """Read the votes of the previous step, which are there, and send those of this one."""
        if self._votes is not None and self._there is not None:
            self._run.processes.wait_until(self._there.query)
            self._count(self._votes)
        votes = self._vote(aborted=False)
        self._votes = torch.empty(votes.shape, pin_memory=True)
        self._votes.copy_(votes, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()

    def _count(self, votes: Tensor) -> bool:
        """Whether a process aborted its step. A signal that came to any process counts here too."""
        *counts, late, aborted = votes.tolist()
        self._run.requests.agree(compress(KINDS, counts))
        signal = voted_signal(counts[len(KINDS) :])
        if signal is not None and not self._interrupt:
            self._interrupt.note(signal)
        self._signalled = signal is not None
        self._agreed = self._signalled or late > 0.0
        return bool(aborted > 0.0)


def any_aborted(run: Run, mine: bool) -> bool:
    """Whether any process aborted what all of them were doing. A signal that came to any process counts here too."""
    if run.processes.reduce is None:
        return mine
    votes = torch.tensor([*votes_for(signal_that_came()), mine], dtype=torch.float32)
    *signaled, aborted = run.processes.sum_of_all(votes).tolist()
    if (signal := voted_signal(signaled)) is not None:
        note_signal(signal)
    return bool(aborted > 0.0)


def votes_for(signal: int | None) -> list[bool]:
    """One process's votes for the signal that it got: one for each of `SIGNALS`."""
    return [signal == each for each in SIGNALS]


def voted_signal(counts: Sequence[float]) -> int | None:
    """The first signal that any process got, from all their votes."""
    return next((each for each, count in zip(SIGNALS, counts, strict=True) if count), None)


def out_of_time(config: Config, state: TrainState) -> bool:
    return config.train.max_hours is not None and state.seconds >= config.train.max_hours * 3600.0
