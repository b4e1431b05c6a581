"""CLIP text embeddings: which layer is read, in how many chunks; the same for every family.

Layers are counted as the AUTOMATIC1111 web UI, ComfyUI and kohya's scripts count them: 1 is the last, 2 the one before.
diffusers' `clip_skip` counts the layers skipped beyond the model's own: 1 less for SD1.x and SD2.x, 2 less for
SDXL and SD3, which read the last layer but one by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.models.folder import read_config
from lora_trainer.models.weighting import read_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from lora_trainer.models.family import Caption, TextOptions, TextParts

LAST, LAST_BUT_ONE = 1, 2


@dataclass(frozen=True)
class ClipOutput:
    """The output for B captions: `states` [B, L, D] of their tokens, `pooled` [B, P] of their first chunk."""

    states: Tensor
    pooled: Tensor


def encode_clip(
    parts: TextParts, name: str, captions: Sequence[Caption], options: TextOptions, *, own: int, normed: bool
) -> ClipOutput:
    """Encode with `name`; `own` is the layer that the model reads where `clip_skip` is not set.

    `normed` puts the layer through the encoder's final norm. The summary is always that of the last layer.
    """
    tokens = read_tokens(parts.tokenizers[name], captions, parts.device, options.chunks)
    encoder: Any = parts.encoders[name]
    layer = options.clip_skip or own
    deeper = layer > LAST or not normed
    output = encoder(tokens.ids, output_hidden_states=True) if deeper else encoder(tokens.ids)
    states = output.hidden_states[-layer] if deeper else output.last_hidden_state
    if deeper and normed:
        states = getattr(encoder, "text_model", encoder).final_layer_norm(states)  # transformers 5.6 moved it
    summary = output.text_embeds if "text_embeds" in output else output.pooler_output
    return ClipOutput(tokens.weigh(states), tokens.first(summary))


def check_clip(folder: Path, names: Sequence[str], options: TextOptions, *, t5: bool = False) -> None:
    """Raise UsageError, all problems at once, for options that these encoders cannot follow; `t5`: the model has one."""
    problems = []
    for name in names:
        layers = read_config(folder, f"{name}/config.json").get("num_hidden_layers")
        if options.clip_skip is not None and isinstance(layers, int) and options.clip_skip > layers:
            message = f"text_encoder.clip_skip={options.clip_skip}: {name} of {folder} has {counted(layers, 'layer')}."
            highest = f"{layers} or lower" if layers > 1 else "1"
            problems.append(Problem("clip_skip_too_large", message, f"Set it to {highest}, or remove it."))
    if not t5:
        problems += refuse_t5(options)
    if problems:
        raise UsageError(problems)


def refuse_t5(options: TextOptions) -> list[Problem]:
    """Options of a T5 text encoder, for a model that has none."""
    if options.t5_tokens is None:
        return []
    return [
        Problem(
            "no_t5",
            f"text_encoder.max_sequence_length={options.t5_tokens}: the model has no T5 text encoder.",
            "Remove it.",
        )
    ]
