"""Latents of a run without cached ones (`cache.latents=false`): encoded while the step before is trained."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_trainer.core.errors import memory_may_run_out
from lora_trainer.core.hardware import free_memory
from lora_trainer.data.caches.filling import usual_workers
from lora_trainer.data.fresh import Fresh
from lora_trainer.data.views import View, turn_of
from lora_trainer.run.caching import in_halves

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.data.images.pixels import EncodeImage
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.steps import Ref
    from lora_trainer.run.choices import Choices
    from lora_trainer.run.inputs import Inputs

WAITS = (0.0, 0.3, 1.0, 3.0, 10.0)  # seconds until an encoding that ran out of memory is tried again


def fresh_latents(config: Config, inputs: Inputs, choices: Choices, world: int) -> Fresh:
    """For a run without cached latents: threads decode images, which are encoded while the step before is trained.

    On a GPU the encoder runs in its own stream, so that no step waits for it. It stays in memory until the
    fresh latents are closed.
    """
    seed, plan, device = config.train.seed, inputs.train_plan, choices.encodes_on

    def shown(ref: Ref) -> tuple[Sample, View]:
        views = plan.views[ref.index]
        return inputs.train[ref.index], views[turn_of(ref, len(views), seed)]

    encoders = inputs.family.load_encoders(inputs.facts.path, choices.encoder_dtype, device)
    encode = in_halves(patiently(encoders.encode_image, device), device)
    workers = max(1, usual_workers() // world) if config.cache.workers is None else config.cache.workers
    return Fresh(shown, beside_training(encode, device), workers)


def patiently(encode: EncodeImage, device: torch.device) -> EncodeImage:
    """The same encoder, tried again after a wait where memory runs out: between steps more is free."""

    def encode_at_last(pixels: Tensor) -> tuple[Tensor, Tensor]:
        for wait in WAITS:
            with memory_may_run_out():
                return encode(pixels)
            time.sleep(wait)
            free_memory(device)
        return encode(pixels)

    return encode_at_last


def beside_training(encode: EncodeImage, device: torch.device) -> EncodeImage:
    """The same encoder, on a GPU in its own stream; its results on the CPU."""
    if device.type != "cuda":
        return encode
    stream = torch.cuda.Stream(device)

    def encode_beside(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            mean, spread = encode(pixels.pin_memory())
            return mean.cpu(), spread.cpu()  # waits for this stream alone

    return encode_beside
