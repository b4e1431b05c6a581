"""Qwen3 as a text encoder: loaded, and captions to the tokens of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.family import Caption, TextParts
from lora_trainer.models.frozen import load_frozen, load_tokenizer_folder
from lora_trainer.models.weighting import Tokens, padded_tokens, tokens_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lora_trainer.models.places import Place

QWEN, TOKENIZER = "text_encoder", "tokenizer"
TOKENS = 512  # of a caption, the chat's own among them
MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


def check_qwen3(folder: Path) -> None:
    """Raise UsageError where the tokenizer's file is missing."""
    if not (folder / TOKENIZER / "tokenizer.json").is_file():
        fix = f"Copy the tokenizer of the model, or of Qwen3, to {folder / TOKENIZER}."
        raise UsageError(Problem("file_missing", f"{folder / TOKENIZER / 'tokenizer.json'} is missing.", fix))


def crop_layers(model: nn.Module, places: dict[str, Place], layers: int | None = None) -> None:
    """Leave the final norm of a language model out, and all layers after the first so many."""
    from torch import nn

    model.layers = cast("nn.ModuleList", model.layers)[:layers]
    model.norm = nn.Identity()
    for name in set(places) - set(model.state_dict()):
        del places[name]


def load_qwen3(folder: Path, dtype: torch.dtype | None, device: torch.device, layers: int | None = None) -> TextParts:
    """The language model, frozen, on the device, and its tokenizer.

    `layers`: the first of them alone, without the final norm, for models that read states from the middle.
    """
    from transformers import Qwen2TokenizerFast, Qwen3Model

    crop = partial(crop_layers, layers=layers) if layers else None
    encoder = load_frozen(Qwen3Model, folder / QWEN, dtype, device, crop=crop)
    return TextParts({QWEN: encoder}, {QWEN: load_tokenizer_folder(Qwen2TokenizerFast, folder / TOKENIZER)})


def read_chat(
    tokenizer: Any, captions: Sequence[Caption], size: int, device: torch.device, *, thinking: bool
) -> tuple[Tokens, Tensor]:
    """The captions as a user's chat messages, truncated to `size` tokens; and where there is text [B, size], bool.

    Without `thinking` the reply begins after an empty thought.
    """
    rows = []
    for caption in captions:
        plain = isinstance(caption, str)
        around = _chat(tokenizer, caption if isinstance(caption, str) else MARK, thinking)
        parts = ((around, 1.0),) if plain else _between(around, cast("Any", caption))
        rows.append(tokens_of(tokenizer, parts)[:size])
    return padded_tokens(tokenizer, captions, rows, size, device)


def _chat(tokenizer: Any, text: str, thinking: bool) -> str:
    """The chat with the text as the user's message, before the model's reply."""
    chat = [{"role": "user", "content": text}]
    return str(
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
    )


def _between(around: str, parts: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """The weighted parts in place of the mark, with the rest of the chat around them."""
    before, _, after = around.partition(MARK)
    return ((before, 1.0), *parts, (after, 1.0))
