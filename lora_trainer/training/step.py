"""One optimizer step: forward and backward over its micro batches, reduce, clip, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lora_trainer.core.errors import first_line, is_out_of_memory
from lora_trainer.diffusion.loss import Loss
from lora_trainer.diffusion.process import Process
from lora_trainer.optim.clipping import Clip
from lora_trainer.optim.optimizers import set_rate
from lora_trainer.training.adapter import Adapter
from lora_trainer.training.average import Average, Shown
from lora_trainer.training.micro import Micro

Predict = Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Learner:
    """What a step works on. `reduce` sums a tensor over all processes; None in a run of one.

    `shown` gives the weights that are validated, drawn with and exported: with an average, or
    a schedule-free optimizer, they are not the adapter's.
    """

    denoiser: nn.Module
    predict: Predict
    process: Process
    loss: Loss
    adapter: Adapter
    average: Average | None
    shown: Shown
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    reduce: Callable[[Tensor], Tensor] | None
    device: torch.device
    dtype: torch.dtype
    clip: Clip

    @property
    def masters(self) -> list[nn.Parameter]:
        return list(self.adapter.masters.values())


@dataclass(frozen=True)
class StepResult:
    """Left on the device, so that nothing waits for it: loss and gradient norm (before clipping), each []."""

    loss: Tensor
    grad_norm: Tensor
    skipped: bool


class HalfChanged(Exception):
    """Memory ran out while weights, optimizer or average were changed: they are no longer those of a step.

    Or while gradients were summed: other processes have gone on, and the step cannot be done again by one alone.
    """


@contextmanager
def changing_weights() -> Iterator[None]:
    """Memory that runs out inside the block is raised as HalfChanged: the step cannot simply be done again."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    else:
        return
    raise HalfChanged(reason)  # out here, so that it holds nothing that must be freed


def train_step(learner: Learner, micros: Iterable[Micro], samples: int, rate: float) -> StepResult:
    """One update from the micro batches of a step that has `samples` samples over all processes.

    The loss is the sum over samples divided by their number, so it does not depend on how
    the step is split. Gradients are summed over processes by hand: a process with no
    sample in a short step still takes part.
    """
    total = torch.zeros((), device=learner.device)
    for micro in micros:
        total += backward(learner, micro.to(learner.device, learner.dtype), samples)
    if learner.reduce is not None:
        reduce_gradients(learner.masters, total, learner.reduce)
    set_rate(learner.optimizer, rate)
    # Gradients that are summed already cannot be made again by one process alone.
    with nullcontext() if learner.reduce is None else changing_weights():
        norm, skipped = update(learner)
    return StepResult(total, norm, skipped)


def backward(learner: Learner, micro: Micro, samples: int) -> Tensor:
    """Forward and backward of one micro batch; its part of the step's loss, detached."""
    process = learner.process
    noisy = process.add_noise(micro.latents, micro.added, micro.t).to(learner.dtype)
    predicted = learner.predict(learner.denoiser, noisy, micro.t, micro.cond, micro.sizes)
    target = process.target(micro.latents, micro.noise, micro.t)
    loss = (learner.loss(predicted, target, micro.t, micro.mask) * micro.weights).sum() / samples
    (loss if learner.scaler is None else learner.scaler.scale(loss)).backward()
    learner.adapter.collect_gradients()
    return loss.detach()


def reduce_gradients(masters: list[nn.Parameter], loss: Tensor, reduce: Callable[[Tensor], Tensor]) -> None:
    """Sum gradients and loss over processes, as one flat tensor."""
    for master in masters:
        if master.grad is None:
            master.grad = torch.zeros_like(master)
    gradients = [master.grad for master in masters if master.grad is not None]
    mine = torch.cat([loss.view(1), *(gradient.flatten() for gradient in gradients)])
    with changing_weights():
        flat = reduce(mine)
        loss.copy_(flat[0])
        for gradient, part in zip(gradients, flat[1:].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def update(learner: Learner) -> tuple[Tensor, bool]:
    """Clip, step, publish, clear. Returns the norm before clipping and whether the scaler skipped."""
    scaler, optimizer = learner.scaler, learner.optimizer
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = learner.clip(learner.masters)
    skipped = False
    with changing_weights():
        if scaler is None:
            optimizer.step()
        else:
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < scale
        optimizer.zero_grad(set_to_none=True)
        learner.adapter.publish()
    return norm, skipped


def give_up_step(learner: Learner) -> None:
    """Leave no trace of a step that was not finished: it can be done again, as if for the first time."""
    for parameter in (*learner.masters, *learner.adapter.copies.values()):
        parameter.grad = None
    if (scaler := learner.scaler) is not None:
        scaler.scale(torch.zeros((), device=learner.device))  # it makes its state with the first loss
        scaler.update(scaler.get_scale())  # the same scale; forgets that gradients were unscaled already
