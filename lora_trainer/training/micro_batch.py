"""Make micro-batches of cached samples: every random draw of a step, by position.

This runs on the CPU, in the thread that reads ahead, so that the device never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.errors import memory_may_run_out
from lora_trainer.core.randomness import position_uniform
from lora_trainer.diffusion.noise import perturbed, position_noise, training_noise
from lora_trainer.diffusion.timesteps import drawn_timesteps

if TYPE_CHECKING:
    from lora_trainer.config.schema import NoiseSection
    from lora_trainer.data.loader import Batch
    from lora_trainer.diffusion.process import Process
    from lora_trainer.models.family import Caption

COPIED_AHEAD = 2**23  # bytes of a step; several steps are read ahead


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch, ready for the forward pass. B samples of one bucket."""

    latents: Tensor  # [B, C, h, w], scaled
    noise: Tensor  # [B, C, h, w], of the target
    added: Tensor  # [B, C, h, w], added to the latents: the same, but for input perturbation
    t: Tensor  # [B]
    cond: Mapping[str, Tensor]
    sizes: Tensor  # [B, 6]
    weights: Tensor  # [B], what each sample's loss is multiplied by
    mask: Tensor | None = None  # [B, 1, h, w], where the loss counts: 1 fully, 0 not at all; None everywhere
    captions: tuple[Caption, ...] = ()  # B, where text encoders are trained: `cond` is then from frozen ones alone
    copied: torch.cuda.Event | None = None  # on a GPU: the stream that uses it waits for this
    is_idle: bool = False  # of weight 0: it only takes the passes that other processes need (`memory.fsdp`)
    keeps_base: bool = False  # its target is the base's own prediction (`loss.output_preservation_weight`)

    @property
    def is_counted(self) -> bool:
        """Whether its losses are those of the step's samples."""
        return not self.is_idle and not self.keeps_base

    @property
    def bytes(self) -> int:
        """Bytes of all its tensors."""
        tensors = (
            self.latents,
            self.noise,
            self.added,
            self.t,
            *self.cond.values(),
            self.sizes,
            self.weights,
            self.mask,
        )
        return sum(value.nbytes for value in tensors if value is not None)

    def staged(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """Ready for `to`: for a GPU in pinned memory, which it copies from while the CPU continues.

        Conditioning takes the model's precision here: a cast during the copy would make it wait.
        """
        if device.type != "cuda":
            return self
        return self._each(lambda value: value.pin_memory(), lambda value: value.to(dtype).pin_memory())

    def to(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """The same on the device; conditioning in the model's precision, the rest, with `sizes`, in fp32."""
        if self.copied is not None:
            return self._wait_for_copy(device)
        ahead = device.type == "cuda"
        return self._each(
            lambda value: value.to(device, non_blocking=ahead),
            lambda value: value.to(device, dtype, non_blocking=ahead),
        )

    def part(self, start: int, end: int) -> MicroBatch:
        """Samples `start` up to `end`, on the same storage."""
        noise = self.noise[start:end]
        return replace(
            self,
            latents=self.latents[start:end],
            noise=noise,
            added=noise if self.added is self.noise else self.added[start:end],
            t=self.t[start:end],
            cond={name: value[start:end] for name, value in self.cond.items()},
            sizes=self.sizes[start:end],
            weights=self.weights[start:end],
            mask=None if self.mask is None else self.mask[start:end],
            captions=self.captions[start:end],
        )

    def _wait_for_copy(self, device: torch.device) -> MicroBatch:
        """Make the current stream wait for the copy made ahead, and keep its memory until that stream is done."""
        assert self.copied is not None
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self.copied)

        def used(value: Tensor) -> Tensor:
            value.record_stream(stream)
            return value

        return self._each(used, used)

    def _each(self, change: Callable[[Tensor], Tensor], change_cond: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Apply `change` to every tensor, and `change_cond` to the conditioning.

        Masks (bool) stay on the CPU: reading them from a GPU would wait for it.
        """
        noise = change(self.noise)
        return MicroBatch(
            change(self.latents),
            noise,
            noise if self.added is self.noise else change(self.added),
            change(self.t),
            {name: value if value.dtype == torch.bool else change_cond(value) for name, value in self.cond.items()},
            change(self.sizes),
            change(self.weights),
            None if self.mask is None else change(self.mask),
            self.captions,
            is_idle=self.is_idle,
            keeps_base=self.keeps_base,
        )


def make_copier(device: torch.device, dtype: torch.dtype) -> Callable[[list[MicroBatch]], list[MicroBatch]]:
    """A function that copies the micro-batches of a step to the device, in the thread that reads ahead.

    On a GPU they are copied in their own stream, so that no step waits for a copy; those of a step of more than
    `COPIED_AHEAD` bytes wait in pinned memory. On a CPU, and where memory runs out, they stay where they are.
    """
    if device.type != "cuda":
        return lambda micros: micros
    stream = torch.cuda.Stream(device)

    def copy(micros: list[MicroBatch]) -> list[MicroBatch]:
        with memory_may_run_out():
            return move_all(micros)
        return micros  # copied in the step, which has fallbacks for memory

    def move_all(micros: list[MicroBatch]) -> list[MicroBatch]:
        with torch.cuda.device(device), torch.cuda.stream(stream):  # a new thread would pin memory for the first GPU
            staged = [micro.staged(device, dtype) for micro in micros]
            if sum(micro.bytes for micro in staged) > COPIED_AHEAD:
                return staged
            moved = [micro.to(device, dtype) for micro in staged]
            return [replace(micro, copied=stream.record_event()) for micro in moved]

    return copy


def make_micro_batch(batch: Batch, step: int, seed: int, noise: NoiseSection, process: Process) -> MicroBatch:
    """Draw posterior sample, noise and timestep of each sample from its position in the run."""
    shape = tuple(batch.mean.shape[1:])
    places = [(step, sample, occurrence) for sample, occurrence in batch.places]
    posterior = torch.stack([position_noise(shape, seed, "posterior", *place) for place in places])
    drawn = [
        training_noise(
            shape,
            seed,
            *place,
            offset=noise.offset,
            multires_iterations=noise.multires_iterations,
            multires_discount=noise.multires_discount,
        )
        for place in places
    ]
    draws = [position_uniform(seed, "t", *place) for place in places]
    t = drawn_timesteps(draws, process.times, process.timesteps, (shape[-2], shape[-1]))
    latents = batch.mean.float() + batch.spread.float() * posterior
    drawn_noise = added = torch.stack(drawn)
    if noise.input_perturbation:
        more = torch.stack([position_noise(shape, seed, "perturbation", *place) for place in places])
        added = perturbed(drawn_noise, more, noise.input_perturbation)
    return MicroBatch(
        latents, drawn_noise, added, t, batch.cond, batch.sizes, batch.weights, batch.mask, batch.captions
    )
