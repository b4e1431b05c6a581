"""Several runs on one frozen base: their passes are joined, and all else of each stays as it is alone.

Each run has its own data, adapter, optimizer, hooks and files, in a thread that takes turns with the others
(`core/taking_turns.py`). Where it needs the base it asks. When all of them ask, those whose samples have the same shapes are
computed in one pass (`adapters/joined.py`), forward and backward, one shape after the other. A run's loss depends on its own parameters alone, so its
gradients are those of the run alone, but for the rounding of the batched products.

A run that fails, stops or is refused ends its thread, and the others continue without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_trainer.adapters.joined import JoinedBatch, adapted_layers, bare_copy, join_layers
from lora_trainer.core.errors import first_line, is_out_of_memory
from lora_trainer.core.hardware import free_memory
from lora_trainer.core.interrupt import Interrupt, listening_alone
from lora_trainer.core.taking_turns import Turns
from lora_trainer.training.step import JoinedStep, StepContext

if TYPE_CHECKING:
    from lora_trainer.models.family import Family

Inputs = tuple[Tensor, Tensor, Mapping[str, Tensor], Tensor]  # noisy, t, cond, sizes; the first dimension of each is B
Layout = tuple[str, ...]  # what must be equal of the bases of runs that share one
Shapes = tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True)
class Pass:
    """A run's request: the prediction of the base with its adapter on these samples, for training or with no gradient."""

    inputs: Inputs
    trains: bool
    step: int  # the run's in this session
    kind: tuple[bool, Shapes]  # what passes must have in common to be joined: without gradients, shapes

    @property
    def samples(self) -> int:
        return len(self.inputs[0])


@dataclass(frozen=True)
class Backward:
    """A run's request: the gradients of its adapter, given that of its loss by its prediction."""

    gradient: Tensor


class Finished:
    """A run's request: to continue when no other run needs the base any more."""


@dataclass(eq=False)
class Member:
    """One run of a group. What it calls itself is called in its own thread."""

    group: RunGroup
    name: str
    interrupt: Interrupt = field(default_factory=lambda: Interrupt(silent=True))
    context: StepContext | None = None  # from when it was built until its training ends
    layers: Mapping[str, nn.Module] = field(default_factory=dict)
    turns: Turns | None = None
    step: int | None = None
    began: int = 0  # steps
    threads: int = 0
    say: Callable[[str], None] = lambda line: None
    _predicted: Any = None

    def sharing(self, family: Family, layout: Layout) -> Family:
        """The family whose denoiser is the group's base, where one of its runs has loaded it with this layout."""
        bare = self.group.bare
        if bare is None or self.group.layout != layout:
            return family
        return replace(family, denoiser=replace(family.denoiser, load=lambda *_: bare_copy(bare)))

    def join(self, context: StepContext, layout: Layout, say: Callable[[str], None]) -> StepContext:
        """The run's step context, with passes that are joined with those of the other runs.

        A run whose base must be stored or swapped otherwise than that of the first trains its own.
        """
        if self.group.bare is None:
            self.group.bare, self.group.layout = bare_copy(context.denoiser), layout
        elif self.group.layout != layout:
            say(
                f"trains alone: its base model would be {', '.join(layout)}, that of the others {', '.join(self.group.layout)}"
            )
            return context
        self.context, self.threads, self.say = context, torch.get_num_threads(), say
        self.layers = adapted_layers(context.denoiser)
        return replace(context, predict=self.predict, joined=JoinedStep(self.begin_step, self.backward))

    def begin_step(self, step: int) -> None:
        """A step begins, or is repeated."""
        if step != self.step:
            self.step, self.began = step, self.began + 1

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: Mapping[str, Tensor], sizes: Tensor
    ) -> Tensor:
        """As a family's `predict`, of the run's own denoiser. With gradients, the result's is what `backward` takes."""
        del denoiser
        inputs, trains = (noisy, t, cond, sizes), torch.is_grad_enabled()
        predicted: Tensor = self._ask(Pass(inputs, trains, self.began, (not trains, shapes_of(inputs))))
        self._predicted = predicted
        return predicted

    def backward(self) -> None:
        """Compute the gradients of the adapter, once the prediction has one."""
        gradient, self._predicted = self._predicted.grad, None
        self._ask(Backward(gradient))

    def finish_training(self) -> None:
        """Let go of the base, and return when no other run needs it: what follows loads one of its own."""
        self.context, self.layers = None, {}
        self._ask(Finished())

    def _ask(self, request: object) -> Any:
        assert self.turns is not None
        return self.turns.ask(request)


def shapes_of(inputs: Inputs) -> Shapes:
    """What inputs must have in common to be joined: all shapes without the batch, and types."""
    noisy, t, cond, sizes = inputs
    named = {"": noisy, "t": t, "sizes": sizes, **{f"cond {name}": value for name, value in cond.items()}}
    return tuple((name, tuple(each.shape[1:]), str(each.dtype)) for name, each in sorted(named.items()))


@dataclass(eq=False)
class RunGroup:
    """Runs that share a base. `most` is how many of them are in one pass; after memory ran out it is lower.

    `passes` counts those of the base: forward passes with gradients.
    """

    most: int
    passes: int = 0
    bare: nn.Module | None = None  # the base without adapters, from the first run that built it
    layout: Layout = ()  # of `bare`
    _kind: tuple[bool, Shapes] | None = None  # of the newest pass
    _host: nn.Module | None = None
    _batch: JoinedBatch = field(default_factory=JoinedBatch)
    _members: list[Member] = field(default_factory=list)

    def run(self, works: Mapping[str, Callable[[Member], None]]) -> None:
        """Do these works together, each with its member. Raises, when all have ended, the error of the first that raised one."""
        for name, work in works.items():
            member = Member(self, name)
            member.turns = Turns(partial(self._work, work, member), name)
            self._members.append(member)
        for member in self._members:
            self._resume(member)
        while waiting := [member for member in self._members if not turns_of(member).has_ended]:
            asking = [member for member in waiting if isinstance(turns_of(member).request, Pass)]
            finished = [member for member in waiting if member not in asking]
            for member in [each for each in finished if each.interrupt] or ([] if asking else finished[:1]):
                if not asking and self.bare is not None:  # no run trains on it any more
                    self.bare, self._host, self._batch.runs = None, None, ()
                    free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
                self._resume(member)
            if asking:
                self._compute(self._next_pass(asking))
        for member in self._members:
            if (error := turns_of(member).error) is not None:
                raise error

    def _work(self, work: Callable[[Member], None], member: Member) -> None:
        with listening_alone(member.interrupt):
            work(member)

    def _resume(self, member: Member, answer: object = None) -> None:
        turns_of(member).resume(answer)
        if turns_of(member).has_ended:  # in whatever way
            member.context, member.layers = None, {}

    def _next_pass(self, asking: Sequence[Member]) -> Sequence[Member]:
        """Whose passes are computed next, in one: those of the next kind, round and round, of the fewest steps first.

        Runs do not keep step: datasets with several buckets have other shapes in a step of each run, and one run waits for
        its shape's turn until others need it. The shapes of one step come in this order, so a turn takes a step whole.
        """
        kinds = sorted({turns_of(member).request.kind for member in asking})
        self._kind = next((kind for kind in kinds if self._kind is not None and kind > self._kind), kinds[0])
        of_kind = [member for member in asking if turns_of(member).request.kind == self._kind]
        return sorted(of_kind, key=lambda member: turns_of(member).request.step)[: self.most]

    def _compute(self, members: Sequence[Member]) -> None:
        """Answer the passes of these runs, in one; in several where memory runs out."""
        requests = [turns_of(member).request for member in members]
        outputs: list[Tensor] = []  # held nowhere else, so that it can be freed
        try:
            outputs.append(self._forward(members, requests))
        except Exception as error:  # noqa: BLE001  raised in the runs that asked
            if not self._lower(error, len(members)):
                for member in members:
                    self._resume(member, error)
                return
        if not outputs:
            for half in (members[: self.most], members[self.most :]):
                self._compute(half)
            return
        answers = outputs[0].detach().split([request.samples for request in requests])
        if requests[0].trains:
            self._train(members, requests, outputs, [each.clone().requires_grad_() for each in answers])
            return
        for member, answer in zip(members, answers, strict=True):
            self._resume(member, answer)

    def _train(
        self, members: Sequence[Member], requests: list[Pass], outputs: list[Tensor], leaves: list[Tensor]
    ) -> None:
        """Let the runs compute their losses, then the gradients of all whose loss came that far."""
        for member, leaf in zip(members, leaves, strict=True):
            self._resume(member, leaf)
        asked = [turns_of(member).request for member in members]
        there = [
            each.gradient if isinstance(each, Backward) else torch.zeros_like(leaf)
            for each, leaf in zip(asked, leaves, strict=True)
        ]
        error = self._add_gradients(members, requests, outputs, there)
        for member, request in zip(members, asked, strict=True):
            if isinstance(request, Backward):
                self._resume(member, error)

    def _add_gradients(
        self, members: Sequence[Member], requests: list[Pass], outputs: list[Tensor], gradients: list[Tensor]
    ) -> Exception | None:
        """Add the gradients of the runs' adapters to what they have; the error where that is impossible.

        Nothing is added where memory runs out: it is repeated with fewer runs in a pass.
        """
        owners = [index for index, member in enumerate(members) if isinstance(turns_of(member).request, Backward)]
        parameters = [each for index in owners for each in context_of(members[index]).adapter.copies.values()]
        if not parameters:
            return None
        output: Tensor | None = None
        try:
            output = outputs.pop() if outputs else self._forward(members, requests)
            computed: Any = torch.autograd.grad(output, parameters, torch.cat(gradients), allow_unused=True)
        except Exception as error:  # noqa: BLE001  raised in the runs that asked
            if not self._lower(error, len(members)):
                return error
        else:
            for parameter, gradient in zip(parameters, computed, strict=True):
                if gradient is None:
                    continue
                if gradient.stride() != parameter.stride():  # fused optimizers take them as equal
                    gradient = torch.empty_like(parameter).copy_(gradient)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            return None
        output = None  # freed, before it is computed again
        for half in (owners[: self.most], owners[self.most :]):
            own = [members[index] for index in half], [requests[index] for index in half]
            if (found_error := self._add_gradients(*own, [], [gradients[index] for index in half])) is not None:
                return found_error
        return None

    def _forward(self, members: Sequence[Member], requests: Sequence[Pass]) -> Tensor:
        """The base with the runs' adapters on all samples [B, …]; a run alone is computed as it always is."""
        trains = requests[0].trains
        if torch.get_num_threads() != members[0].threads:  # which each thread has of its own
            torch.set_num_threads(members[0].threads)
        self.passes += trains
        first = context_of(members[0])
        predict = first.predict
        with torch.set_grad_enabled(trains):
            if len(members) == 1:
                return predict(first.denoiser, *requests[0].inputs)
            if self._host is None:
                assert self.bare is not None
                self._host = bare_copy(self.bare)
            host = self._host.train(trains)
            join_layers(host, [name for member in members for name in member.layers], self._batch)
            self._batch.runs = [
                (member.layers, request.samples) for member, request in zip(members, requests, strict=True)
            ]
            columns = list(zip(*(request.inputs for request in requests), strict=True))
            noisy, t, cond, sizes = columns
            named = {name: torch.cat([each[name] for each in cond]) for name in cond[0]}
            return predict(host, torch.cat(noisy), torch.cat(t), named, torch.cat(sizes))

    def _lower(self, error: Exception, count: int) -> bool:
        """Whether memory ran out with several runs in a pass: from now on fewer are. What is computed stays the same."""
        if not is_out_of_memory(error) or count == 1:
            return False
        self.most = -(-count // 2)
        line = f"out of memory ({first_line(error)}): {self.most} runs in one pass in place of {count}; it is repeated"
        training = [member for member in self._members if member.context is not None]
        for member in training:
            member.say(line)
        free_memory(context_of(training[0]).device)
        return True


def turns_of(member: Member) -> Turns:
    assert member.turns is not None
    return member.turns


def context_of(member: Member) -> StepContext:
    assert member.context is not None
    return member.context
