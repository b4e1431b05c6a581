"""T5 as a text encoder: loaded, and captions to its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.folder import tokenizer_of
from lora_trainer.models.frozen import load_frozen, load_tokenizer_folder
from lora_trainer.models.weighting import Tokens, padded_tokens, tokens_of

if TYPE_CHECKING:
    import torch

    from lora_trainer.models.family import Caption

# sd-scripts puts a LoRA on these: all linear layers.
T5_TARGETS = tuple(
    f"encoder.block.*.{name}" for name in (*(f"SelfAttention.{part}" for part in "qkvo"), "DenseReluDense.w*")
)


def load_t5(folder: Path, text_encoder: str, dtype: torch.dtype | None, device: torch.device) -> Any:
    """The encoder, frozen, on the device; without `dtype` as it is stored."""
    from transformers import T5EncoderModel

    return load_frozen(T5EncoderModel, folder / text_encoder, dtype, device)


def check_t5_tokenizer(folder: Path, text_encoder: str) -> None:
    """Raise UsageError unless the tokenizer's file is there: the library would build one without a vocabulary."""
    words = folder / tokenizer_of(text_encoder)
    if (words / "tokenizer.json").is_file():
        return
    found = "holds only spiece.model, which needs sentencepiece" if (words / "spiece.model").is_file() else "is missing"
    fix = f"Copy tokenizer.json of google/t5-v1_1-xxl, or of any FLUX.1 or SD3 folder, to {words}."
    raise UsageError(
        Problem("tokenizer_missing", f"{words / 'tokenizer.json'} is missing: the tokenizer of T5 {found}.", fix)
    )


def load_t5_tokenizer(folder: Path, text_encoder: str, longest: int) -> Any:
    """The tokenizer, from `tokenizer.json`, which knows how many tokens the model reads. Raises UsageError as
    `check_t5_tokenizer`."""
    from transformers import T5TokenizerFast

    check_t5_tokenizer(folder, text_encoder)
    tokenizer = load_tokenizer_folder(T5TokenizerFast, folder / tokenizer_of(text_encoder))
    tokenizer.model_max_length = longest
    return tokenizer


def read_t5_tokens(tokenizer: Any, captions: Sequence[Caption], size: int, device: torch.device) -> Tokens:
    """The captions as `size` tokens each: text, end, padding. Padding is read like text, as in diffusers."""
    rows = [[*tokens_of(tokenizer, caption)[: size - 1], (int(tokenizer.eos_token_id), 1.0)] for caption in captions]
    return padded_tokens(tokenizer, captions, rows, size, device)[0]
