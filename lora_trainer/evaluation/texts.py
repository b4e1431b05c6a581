"""Captions read by the text encoders of a pipeline, with the LoRA on them and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lora_trainer.evaluation.held_out import EncodedSample
from lora_trainer.evaluation.loading import free_memory, without_lora
from lora_trainer.export.weights import LoraWeights
from lora_trainer.models.drawing import texts_of
from lora_trainer.models.family import Caption, Family, TextParts
from lora_trainer.models.words import add_words, from_embeddings


@dataclass(frozen=True)
class Told:
    """What a denoiser is asked under: conditioning of prompts, each with B first, and samples with theirs."""

    prompts: Mapping[str, Tensor]
    samples: Sequence[EncodedSample]


def reads_again(weights: LoraWeights, samples: Sequence[EncodedSample], family: Family) -> bool:
    """Whether captions must be read anew: the LoRA is on a text encoder too, it has new words, or they are not encoded yet."""
    trained = tuple(f"{name}." for name in family.text_targets)
    changed = bool(weights.embeddings) or any(name.startswith(trained) for name in weights.modules)
    return changed or not all(sample.cond for sample in samples)


def told_by(
    pipeline: Any,
    family: Family,
    prompts: Sequence[str],
    known: Told,
    device: torch.device,
    dtype: torch.dtype,
    embeddings: Mapping[str, Tensor],
) -> tuple[Told, Told]:
    """The same prompts and samples as the pipeline's encoders read them (without the LoRA, with it and its new words).

    They visit `device` for it. `known` holds what the encoders said that no LoRA is ever on, if the family has such.
    `embeddings` are the file's words. Raises UsageError for words of another kind of model.
    """
    every = texts_of(pipeline, device)
    parts = replace(every, encoders={name: every.encoders[name] for name in family.text_targets})
    for encoder in parts.encoders.values():
        encoder.to(device)
    with without_lora(pipeline):
        without = _told(family, parts, prompts, known, dtype)
    add_words(parts, from_embeddings(embeddings, tuple(family.text_targets)))
    with_lora = _told(family, parts, prompts, known, dtype)
    for encoder in parts.encoders.values():
        encoder.to("cpu")
    free_memory(device)
    return without, with_lora


@torch.no_grad()
def _told(family: Family, parts: TextParts, prompts: Sequence[str], known: Told, dtype: torch.dtype) -> Told:
    def read(captions: Sequence[Caption], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        there = {name: value.to(parts.device, dtype) for name, value in before.items()}
        return {name: value.to(dtype) for name, value in family.told(parts, captions, there).items()}

    samples = []
    for sample in known.samples:
        said = read((sample.caption,), {name: value[None] for name, value in sample.cond.items()})
        samples.append(replace(sample, cond={name: value[0] for name, value in said.items()}))
    return Told(read(prompts, known.prompts), samples)
