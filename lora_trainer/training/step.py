"""One optimizer step: forward and backward over its micro batches, reduce, clip, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
    flat = reduce(torch.cat([loss.view(1), *(gradient.flatten() for gradient in gradients)]))
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
