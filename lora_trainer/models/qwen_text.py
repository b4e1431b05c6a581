"""What the families with a Qwen-VL text encoder share: its prompt template, its weights without the half that sees images,
and captions of different lengths in one batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.family import Caption, LoadTexts, TextParts
from lora_trainer.models.folder import read_config, tokenizer_folder
from lora_trainer.models.frozen import load_frozen, load_tokenizer_folder
from lora_trainer.models.qwen3 import crop_layers
from lora_trainer.models.weighting import Tokens, padded_tokens, tokens_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QWEN, TOKENIZER = "text_encoder", "tokenizer"
BEFORE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
CUT = 34  # tokens of the system message, whose states are not read
VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def check_tokenizer(folder: Path) -> None:
    """Raise UsageError where the folder of a tokenizer holds no vocabulary."""
    if not any(all((folder / name).is_file() for name in names) for names in VOCABULARIES):
        message = f"{folder} holds neither tokenizer.json nor vocab.json with merges.txt."
        raise UsageError(Problem("tokenizer_missing", message, f"Copy the tokenizer of the model to {folder}."))


def text_config(folder: Path) -> Mapping[str, Any]:
    """The part of a Qwen-VL config that is about text, which the first ones have among all others. Raises UsageError."""
    config = read_config(folder, "config.json")
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def language_model(kind: str, *, final_norm: bool = True) -> LoadTexts:
    """`load` of a `TextSpec`: for the language model, transformers' class `kind`, and its tokenizer.

    The half that sees images is not loaded; without `final_norm` the last state is that of the last layer.
    """

    def load(
        folder: Path, dtype: torch.dtype | None, device: torch.device, without: Collection[str] = (), /
    ) -> TextParts:
        import transformers

        crop = None if final_norm else crop_layers
        encoder = load_frozen(getattr(transformers, kind), folder / QWEN, dtype, device, crop=crop)
        reader = load_tokenizer_folder(transformers.Qwen2TokenizerFast, folder / tokenizer_folder(folder))
        return TextParts({QWEN: encoder}, {QWEN: reader})

    return load


def read_template(
    tokenizer: Any,
    captions: Sequence[Caption],
    size: int,
    device: torch.device,
    *,
    begin: tuple[str, int] = (BEFORE, CUT),
    whole_end: bool = False,
) -> tuple[Tokens, Tensor]:
    """The captions in the template, truncated and padded to `size` tokens after the system message; and where there is
    text [B, cut + size], bool. Weights are those of the tokens after the system message.

    `begin`: the template up to the caption, and of how many of its tokens, `cut`, the states are not read. `whole_end`: the
    end of the template is tokenized by itself, and never truncated.
    """
    before, cut = begin
    end, after = (tokens_of(tokenizer, AFTER), "") if whole_end else ([], AFTER)
    room, rows = max(0, cut + size - len(end)), []
    for caption in captions:
        parts = f"{before}{caption}{after}" if isinstance(caption, str) else ((before, 1.0), *caption, (after, 1.0))
        rows.append([*tokens_of(tokenizer, parts)[:room], *end])
    return padded_tokens(tokenizer, captions, rows, cut + size, device, cut)


def as_long_as_needed(embeds: Tensor, padding: Tensor) -> tuple[Tensor, Tensor | None]:
    """States [B, T, ...] up to the longest caption of the batch, and where there is text [B, n]; None where all of it is.

    Without a mask every attention backend can be used. `padding` on the CPU spares a wait for the GPU.
    """
    import torch

    if padding.is_meta:
        return embeds, None
    here = padding < 0.5
    ends = torch.where(here, torch.arange(1, here.shape[1] + 1, device=here.device), 0)
    longest = max(1, int(ends.max()))
    here = here[:, :longest]
    return embeds[:, :longest], None if bool(here.all()) else here.to(embeds.device)
