"""One optimizer step.

For each micro-batch: noise, forward pass, loss, backward pass, gradients into the fp32 masters (`backward`). Then the
processes vote whether all continue, gradients are summed over them, clipped, and the optimizer updates the masters
(`update`), which are copied into the layers. `fallbacks.py` calls it; `hooks.py` has what follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from lora_trainer.core.errors import first_line, is_out_of_memory
from lora_trainer.core.interrupt import abort_if_late, no_more_aborting

if TYPE_CHECKING:
    from lora_trainer.adapters.averages import Average, Shown
    from lora_trainer.adapters.masters import Adapter
    from lora_trainer.diffusion.loss import Loss
    from lora_trainer.diffusion.process import Process
    from lora_trainer.models.compiled import Compiled
    from lora_trainer.optim.clipping import Clip
    from lora_trainer.training.micro_batch import MicroBatch
    from lora_trainer.training.step_phases import PhaseRange
    from lora_trainer.training.texts import TrainedTexts

# How an update whose loss or gradient is not finite is skipped: checked before the update, which waits for the GPU; by
# the optimizer itself, on the device; or not at all, and the step is repeated once it is found.
Guard = Literal["ahead", "on_device", "late"]
Predict = Callable[[nn.Module, Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor]
Evaluated = Callable[[Tensor, Tensor, Mapping[str, Tensor], Tensor], Tensor]  # `Predict` of one denoiser
# Micro-batches of a step, the places (sample id, occurrence) of their samples, and the step -> those that are trained.
AddMicros = Callable[[list["MicroBatch"], Sequence[Sequence[tuple[str, int]]], int], list["MicroBatch"]]
# What the denoiser should predict for noisy latents [B, C, h, w] of a micro-batch.
Target = Callable[["StepContext", "MicroBatch", Tensor], Tensor]


def plain_target(context: StepContext, micro: MicroBatch, noisy: Tensor) -> Tensor:
    """Noise, velocity or flow: what the denoiser was trained on [B, C, h, w]."""
    del noisy
    return context.process.target(micro.latents, micro.noise, micro.t)


def cached_conditioning(micro: MicroBatch) -> Mapping[str, Tensor]:
    """The text embeddings as they were cached."""
    return micro.cond


def nothing_more(*_: object) -> None:
    """Where a step has nothing more to do."""


def whole_rank(t: Tensor) -> AbstractContextManager[None]:
    """All rows of the LoRA are trained at all timesteps t [B]."""
    del t
    return nullcontext()


@dataclass(frozen=True)
class Built:
    """What was chosen when the step context was built.

    `shapes` are the weight shapes of the untouched denoiser and trained text encoders, by name. `notes` are lines for
    the log; `details` are for the record, printed only in a verbose run.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    attention: str = ""
    modules: int = 0  # of the denoiser that are trained
    checkpointed: int = 0  # blocks
    swapped: int = 0  # blocks
    shards: int = 1  # processes that share the denoiser's frozen weights
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepSettings:
    """What differs from step to step: `step` is its number, counted from 0."""

    lr: float
    step: int = 0
    momentum: float | None = None  # beta1, where the optimizer lets it change
    clip_scale: float = 1.0  # factor on the clipping


@dataclass(frozen=True)
class JoinedStep:
    """What a run calls whose passes are joined with those of other runs on its base (`run_group.py`)."""

    begin_step: Callable[[int], None] = nothing_more
    backward: Callable[[], None] = nothing_more  # computes the gradients, once the prediction has its own


ALONE = JoinedStep()


@dataclass(frozen=True)
class StepContext:
    """What a step works on. `reduce` sums a tensor over all processes; None in a run of one.

    `shown` returns the weights that are validated, sampled with and exported: with EMA or a schedule-free optimizer
    they are not the adapter's.
    """

    denoiser: nn.Module
    predict: Predict
    process: Process
    loss: Loss
    adapter: Adapter
    average: Average | None
    shown: Shown
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # of fp16's losses; not enabled in any other precision
    reduce: Callable[[Tensor], Tensor] | None
    device: torch.device
    dtype: torch.dtype
    clip: Clip
    guard: Guard = "ahead"
    compiled: Compiled | None = None  # the denoiser's blocks, where they are compiled
    optimizer_waits: bool = False  # whether its step waits for the GPU
    await_gpu: Callable[[], None] = lambda: None  # raises ProcessLost, unlike other waits
    rank: int = 0
    world: int = 1
    compressed_to: torch.dtype | None = None  # the precision that gradients are summed in over processes; None: fp32
    texts: TrainedTexts | None = None
    conditioning: Callable[[MicroBatch], Mapping[str, Tensor]] = cached_conditioning
    target: Target = plain_target
    add_micros: AddMicros = lambda micros, places, step: micros
    validated: Callable[[StepContext], Evaluated] | None = None  # what validation losses are of, where not `predict`
    shares: tuple[float, ...] = ()  # factor on the learning rate of each parameter group; empty: 1
    built: Built = Built()
    phase: PhaseRange = nullcontext  # a range around each phase, for a profile
    limit_rank: Callable[[Tensor], AbstractContextManager[None]] = whole_rank  # `lora.timestep_min_rank`, at t [B]
    add_noise: Callable[[int], object] = nothing_more  # to the gradients of a step, after clipping
    bf16_step: Callable[[int], object] | None = None  # in place of the optimizer's, where weights are bf16 alone
    joined: JoinedStep = ALONE

    @property
    def is_joined(self) -> bool:
        return self.joined is not ALONE

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules with trained weights: the denoiser, and the text encoders where they are trained."""
        return (self.denoiser, *(self.texts.parts.encoders.values() if self.texts else ()))

    @property
    def is_sharded(self) -> bool:
        """Whether each pass gathers weights from the other processes, so that none may take one more or less."""
        return self.built.shards > 1

    @property
    def stored_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the trained weights, and of what checkpoints and LoRA files hold beside them."""
        return [tuple(value.shape) for value in (*self.adapter.masters.values(), *self.adapter.fixed.values())]

    @property
    def masters(self) -> list[nn.Parameter]:
        return list(self.adapter.masters.values())


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm (before clipping), each [], on the device, so that nothing waits for them.

    `losses`, concatenated, are the samples' own: process by process, micro-batch by micro-batch. The update is skipped
    where loss or norm is not finite; `skipped` is set where that is known already, as with the guard `ahead`. With the
    guard `late` the update was made.
    """

    loss: Tensor
    grad_norm: Tensor
    losses: tuple[Tensor, ...]
    guard: Guard
    skipped: bool
    samples: int = 0  # over all processes
    scale: Tensor | None = None  # [] of fp16's losses, after the step


class OomDuringUpdate(Exception):
    """Memory ran out while weights, optimizer or their average were changed: they are half changed."""


class OomDuringAllReduce(Exception):
    """Memory ran out while gradients were summed or clipped: other processes continued, so no step can be repeated.

    The weights are still those of the step before.
    """


@contextmanager
def changing_weights(kind: type[Exception] = OomDuringUpdate) -> Iterator[None]:
    """Raise `kind` where memory runs out inside the block: the step cannot simply be repeated."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    else:
        return
    raise kind(reason)  # out here, so that its frames keep no memory


def train_step(
    context: StepContext,
    micro_batches: Iterable[MicroBatch],
    samples: int,
    settings: StepSettings,
    gradients_are_there: Callable[[], None] = no_more_aborting,
) -> StepResult:
    """One update from the micro-batches of a step that has `samples` samples over all processes.

    The loss is the sum over samples divided by their number, so it does not depend on how the step is split. Gradients
    are summed over processes here: a process with no sample in a short step still takes part.
    `gradients_are_there` is called when they are: until then the step can be aborted unchanged.
    """
    total = torch.zeros((), device=context.device)
    losses: tuple[Tensor, ...] = ()
    for number, micro in enumerate(micro_batches):
        # In fp32 the gradients so far are in the memory of CUDA graphs, which `begin_step` would reuse.
        if number > 0 and context.compiled is not None and not context.adapter.is_shared:
            context.compiled.begin_step()
        with context.phase("copy"):
            micro = micro.to(context.device, context.dtype)
        with context.limit_rank(micro.t):
            loss, sample_losses = backward(context, micro, samples)
        total += loss
        if micro.is_counted:
            losses = (*losses, sample_losses)
    sums = sums_of_step(context, total, losses, samples)
    # After all processes have settled, one alone cannot repeat the step.
    with nullcontext() if context.reduce is None else changing_weights(OomDuringAllReduce):
        gradients_are_there()
        for flat, parts in zip(sums.flats, sums.parts, strict=True):
            assert context.reduce is not None
            with context.phase("all_reduce"):
                spread(context.reduce(flat), parts)
        set_lr(context.optimizer, settings.lr, context.shares, settings.momentum)
        norm, skipped = update(context, total, settings)
    # A product, since the scaler changes its own in place; on the device, so that nothing waits.
    scale = context.scaler.scale(torch.ones((), device=context.device)) if context.scaler.is_enabled() else None
    return StepResult(total, norm, sums.losses, context.guard, skipped, samples, scale)


def backward(context: StepContext, micro: MicroBatch, samples: int) -> tuple[Tensor, Tensor]:
    """Forward and backward of one micro-batch: its part of the step's loss [] and its samples' own [B], detached."""
    abort_if_late()
    with context.phase("forward"):
        noisy = context.process.add_noise(micro.latents, micro.added, micro.t).to(context.dtype)
        # Before the pass that autograd keeps: a target that takes a pass of its own is never in memory beside it.
        target = context.target(context, micro, noisy)
        cond = context.conditioning(micro)
        predicted = context.predict(context.denoiser, noisy, micro.t, cond, micro.sizes)
        losses = context.loss(predicted, target, micro.t, micro.mask) * micro.weights
        loss = losses.sum() / samples
    with context.phase("backward"):
        context.scaler.scale(loss).backward()
        context.joined.backward()
        context.adapter.collect_gradients()
    return loss.detach(), losses.detach()


@dataclass(frozen=True)
class StepSums:
    """What a step adds up over all processes: nothing in a run of one. `losses` are then those of the whole step.

    `flats` are flat copies of `parts`: what is added up at once.
    """

    losses: tuple[Tensor, ...]
    flats: tuple[Tensor, ...] = ()
    parts: tuple[list[Tensor], ...] = ()


def sums_of_step(context: StepContext, total: Tensor, losses: tuple[Tensor, ...], samples: int) -> StepSums:
    """The loss, the samples' losses and the gradients, in flat tensors. Losses are never compressed."""
    if context.reduce is None:
        return StepSums(losses)
    placed = place_in_step(context, losses, samples)
    gradients = all_gradients(context.masters)
    parts = ([total, placed], gradients) if context.compressed_to else ([total, placed, *gradients],)
    flats = [torch.cat([each.flatten() for each in some]) for some in parts]
    flats[-1] = flats[-1].to(context.compressed_to)
    return StepSums((placed,), tuple(flats), parts)


def place_in_step(context: StepContext, losses: tuple[Tensor, ...], samples: int) -> Tensor:
    """This process's losses at their positions in the step [samples], 0 elsewhere: `reduce` joins them."""
    world, joined = context.world, torch.zeros(samples, device=context.device)
    start = sum(math.ceil((samples - rank) / world) for rank in range(min(context.rank, samples)))
    for each in losses:
        joined[start : start + len(each)] = each
        start += len(each)
    return joined


def all_gradients(masters: list[nn.Parameter]) -> list[Tensor]:
    """The gradient of each master: zeros where this process had no sample."""
    for master in masters:
        if master.grad is None:
            master.grad = torch.zeros_like(master)
    return [master.grad for master in masters if master.grad is not None]


def spread(flat: Tensor, into: list[Tensor]) -> None:
    """Copy one flat tensor into tensors of the same total size."""
    for each, part in zip(into, flat.split([each.numel() for each in into]), strict=True):
        each.copy_(part.view_as(each))


def update(context: StepContext, loss: Tensor, settings: StepSettings) -> tuple[Tensor, bool]:
    """Clip, add noise where it is set, step, copy the masters to the model.

    Returns the norm before clipping, and whether the update was skipped. Noise comes after clipping, which would scale it.
    """
    scaler, optimizer = context.scaler, context.optimizer
    with context.phase("clip"):
        scaler.unscale_(optimizer)
        norm = context.clip(context.masters, settings.clip_scale)
        context.add_noise(settings.step)
    if context.guard == "ahead" or context.optimizer_waits:
        context.await_gpu()
    # The scaler's own `step` would check gradients alone, and wait for the GPU.
    skipped = context.guard == "ahead" and not (math.isfinite(float(loss)) and math.isfinite(float(norm)))
    with changing_weights(), context.phase("optimizer"):
        take = optimizer.step if context.bf16_step is None else partial(context.bf16_step, settings.step)
        if context.guard == "on_device":
            step_if(optimizer, torch.isfinite(loss) & torch.isfinite(norm), take)
        elif not skipped:
            take()
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        context.adapter.copy_to_model()
    return norm, skipped


def set_lr(
    optimizer: torch.optim.Optimizer, lr: float, shares: Sequence[float] = (), beta1: float | None = None
) -> None:
    """Set the learning rate of every group, or its share of it; and beta1, unless None."""
    for group, share in zip(optimizer.param_groups, shares or (1.0,) * len(optimizer.param_groups), strict=True):
        group["lr"] = lr * share
        if beta1 is not None:
            group["betas"] = (beta1, *group["betas"][1:])


def step_if(optimizer: torch.optim.Optimizer, good: Tensor, take: Callable[[], object]) -> None:
    """Take a step where `good` [] is true, on the device, else change nothing. For torch's fused optimizers.

    They read `found_inf`, as torch's GradScaler sets it for an overflow.
    """
    optimizer.found_inf = (~good).float()  # type: ignore[attr-defined]
    try:
        take()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def abort_step(context: StepContext) -> None:
    """Undo an unfinished step: it can be repeated as if for the first time."""
    for parameter in (*context.masters, *context.adapter.copies.values()):
        parameter.grad = None
    scaler = context.scaler
    scaler.scale(torch.zeros((), device=context.device))  # creates its state, else made with the first loss
    scaler.update(scaler.get_scale())  # the same scale; resets that gradients were unscaled
