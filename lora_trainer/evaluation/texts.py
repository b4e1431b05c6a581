"""Text embeddings from the text encoders of a pipeline, with the LoRA on them and without."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_trainer.core.hardware import free_memory
from lora_trainer.evaluation.loading import at_strength, without_lora
from lora_trainer.models.drawing import texts_of
from lora_trainer.models.encoders import offload_layers
from lora_trainer.models.textual_inversion import add_learned_tokens, from_embeddings

if TYPE_CHECKING:
    from lora_trainer.evaluation.compute import Compute
    from lora_trainer.evaluation.validation_loss import EncodedSample
    from lora_trainer.lora_format.weights import AdapterWeights
    from lora_trainer.models.family import Caption, Family, TextParts


@dataclass(frozen=True)
class EncodedTexts:
    """A denoiser's conditioning: that of prompts, each with B first, and samples with theirs; `uncounted` are samples whose
    captions are drawn to look at, and not counted."""

    prompts: Mapping[str, Tensor]
    samples: Sequence[EncodedSample]
    uncounted: Sequence[EncodedSample] = ()


def reads_again(weights: AdapterWeights, samples: Sequence[EncodedSample], family: Family) -> bool:
    """Whether captions must be encoded: the LoRA is on a text encoder, has learned tokens, or they are not encoded yet."""
    changed = bool(weights.embeddings) or bool(changed_texts(weights, family))
    return changed or not all(sample.cond for sample in samples)


def changed_texts(weights: AdapterWeights, family: Family) -> list[str]:
    """The text encoders that a LoRA changes."""
    components = {name.partition(".")[0] for name in weights.modules}
    return [name for name in family.text.targets if name in components]


def texts_at(
    pipeline: Any,
    family: Family,
    known: EncodedTexts,
    weights: AdapterWeights,
    wanted: tuple[Sequence[str], Sequence[float]],
    compute: Compute,
) -> tuple[EncodedTexts, dict[float, EncodedTexts]]:
    """Prompts and samples as the pipeline's encoders read them without the LoRA, and with it and its learned tokens at each
    strength; `wanted` are the prompts and the strengths.

    The encoders are moved to the device for it. `known` holds what all of them said of the captions; what is not in it, or is
    of a large encoder that the LoRA changes, is read by that, too. Learned tokens have no strength: they are the same at
    each. The LoRA is left at the last one. Raises UsageError for words of another kind of model.
    """
    (prompts, strengths), device, dtype = wanted, compute.device, compute.dtype
    every = texts_of(pipeline, device)
    there = all(sample.cond for sample in known.samples)
    left = family.text.left_in_cache(changed_texts(weights, family)) if there else ()
    parts = replace(every, encoders={name: part for name, part in every.encoders.items() if name not in left})
    for name, encoder in parts.encoders.items():
        if name in family.text.clips:
            encoder.to(device)
        else:  # it is as it was stored
            offload_layers(encoder, dtype, device)
    with without_lora(pipeline):
        original = _encode(family, parts, prompts, known, dtype)
    add_learned_tokens(parts, from_embeddings(weights.embeddings, family.text.clips))
    found = dict[float, EncodedTexts]()
    for strength in strengths:
        with contextlib.nullcontext() if list(strengths) == [1.0] else at_strength(pipeline, strength):
            found[strength] = _encode(family, parts, prompts, known, dtype)
    for name in family.text.clips:
        parts.encoders[name].to("cpu")
    free_memory(device)
    return original, found


@torch.no_grad()
def _encode(
    family: Family, parts: TextParts, prompts: Sequence[str], known: EncodedTexts, dtype: torch.dtype
) -> EncodedTexts:
    def read(captions: Sequence[Caption], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        there = {name: value.to(parts.device, dtype) for name, value in before.items()}
        return {name: value.to(dtype) for name, value in family.text.encode_captions(parts, captions, there).items()}

    def read_sample(sample: EncodedSample) -> EncodedSample:
        cond = read((sample.caption,), {name: value[None] for name, value in sample.cond.items()})
        return replace(sample, cond={name: value[0] for name, value in cond.items()})

    return EncodedTexts(
        read(prompts, known.prompts), list(map(read_sample, known.samples)), list(map(read_sample, known.uncounted))
    )
