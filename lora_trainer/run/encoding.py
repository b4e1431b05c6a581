"""Encodes images and captions by a config's base model, without a cache: what `validate` and `check --model` start with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lora_trainer.evaluation.encode import EncodeTexts, encode_samples, text_reader
from lora_trainer.run.choices import ENCODER_DTYPE, usable_bytes

if TYPE_CHECKING:
    import torch

    from lora_trainer.config.schema import Config
    from lora_trainer.data.sample import Sample
    from lora_trainer.data.views import BucketPlan
    from lora_trainer.evaluation.validation_loss import EncodedSample
    from lora_trainer.models.family import Encoders, Family, ModelFacts


def encode_by_base(
    config: Config,
    model: tuple[Family, ModelFacts],
    samples: Sequence[Sample],
    plan: BucketPlan,
    device: torch.device,
) -> list[EncodedSample]:
    """`encode_samples` with the base model's encoders, each of which is loaded when it is first used.

    Raises DatasetRefused for an image that cannot be read.
    """
    family, facts = model

    def encoders() -> Encoders:
        return family.load_encoders(facts.path, ENCODER_DTYPE, device)

    def texts() -> EncodeTexts:
        return text_reader(family, facts, ENCODER_DTYPE, device, usable_bytes(config, device))

    return encode_samples(samples, plan, encoders, texts, device, seen=bool(facts.control_tokens))
