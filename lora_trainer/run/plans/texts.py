"""The text encoders that are trained along, as the plan counts them. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lora_trainer.models.folder import named_parts, read_config
from lora_trainer.models.memory.phases import costs_of, phase_costs
from lora_trainer.models.memory.texts import NO_TEXTS, EncoderSize, TextSizes
from lora_trainer.models.unet import CLIP_TOKENS

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.models.family import Family, ModelFacts

OF_CLIP = ("num_hidden_layers", "hidden_size", "intermediate_size")
OF_T5 = ("num_layers", "d_model", "d_ff", "num_heads", "d_kv")
T5_HEAD = 64  # width of a head of the published T5


def text_sizes(config: Config, family: Family, facts: ModelFacts) -> TextSizes:
    """What of the text encoders is in memory while training, and trained. Raises UsageError as `text_rates`."""
    rates = family.text_rates(config.text_encoder.learning_rates)
    if not config.trains_text:
        return NO_TEXTS
    held = {
        name: size
        for name, size in zip(family.text.targets, costs_of(facts).text_encoders, strict=False)
        if name not in family.text.left_in_cache(rates)
    }
    words = family.text.clips if config.textual_inversion.placeholder_tokens else ()
    sizes, rank = text_layers(family, facts), config.text_encoder.lora_rank or config.lora.rank
    patterns = config.lora.rank_pattern.items()  # the largest rank counts, whichever layers have it
    rank = max([rank, *(each for pattern, each in patterns if pattern.startswith(("text_encoder", "*")))])
    trained = [name for name in held if name in rates or name in words]
    return TextSizes(
        held=held,
        encoders=tuple(replace(sizes[name], rank=rank if name in rates else 0) for name in trained),
    )


def text_layers(family: Family, facts: ModelFacts) -> dict[str, EncoderSize]:
    """The size of each text encoder that can be trained: a folder's own, or the published model's."""
    clip_tokens, t5_tokens = (
        CLIP_TOKENS * family.text.options.chunks,
        family.text.options.t5_tokens or facts.caption_tokens,
    )
    if not facts.path.is_dir():
        public = zip(family.text.targets, phase_costs(family.name).text_layers, strict=True)
        return {
            name: EncoderSize(layers, width, inner, scores=width // T5_HEAD, tokens=t5_tokens)
            if name in family.text.cached
            else EncoderSize(layers, width, inner, tokens=clip_tokens)
            for name, (layers, width, inner) in public
        }
    found = {}
    for name in named_parts(facts.path, tuple(family.text.targets)):
        asked = OF_T5 if name in family.text.cached else OF_CLIP
        config = read_config(facts.path, f"{name}/config.json", asked)
        layers, width, inner, *heads = (int(config[key]) for key in asked)
        found[name] = EncoderSize(layers, width, inner, tokens=clip_tokens)
        if heads:
            found[name] = replace(found[name], attention=heads[0] * heads[1], scores=heads[0], tokens=t5_tokens)
    return found
