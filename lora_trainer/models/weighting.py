"""Captions to tokens, and words that weigh more or less than others, for CLIP text encoders.

As in the AUTOMATIC1111 web UI: each token's hidden state is multiplied by its weight, then all of
them by one number that brings back their mean. Start, end and padding weigh 1, and so does the pooled
summary that SDXL takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lora_trainer.models.family import Caption


@dataclass(frozen=True)
class Tokens:
    """B captions padded or cut to L tokens. `weights` are None where every word weighs 1."""

    ids: Tensor  # [B, L], on the device
    weights: tuple[Tensor | None, ...]  # B times [L] float32, on the device

    def weigh(self, states: Tensor) -> Tensor:
        """Hidden states [B, L, D] with the words weighed; rows without weights stay as they are."""
        import torch

        if all(weights is None for weights in self.weights):
            return states
        return torch.stack(
            [
                row if weights is None else _weighed(row, weights)
                for row, weights in zip(states, self.weights, strict=True)
            ]
        )


def _weighed(states: Tensor, weights: Tensor) -> Tensor:
    """[L, D], in fp32 inside: a mean of many small numbers is lost in fewer bits."""
    wide = states.float()
    weighed = wide * weights[:, None]
    before, after = wide.mean(), weighed.mean()
    return (weighed * (before / after) if after != 0 else weighed).to(states.dtype)


def read_tokens(tokenizer: Any, captions: Sequence[Caption], device: torch.device) -> Tokens:
    """The captions as a text encoder takes them."""
    import torch

    size = int(tokenizer.model_max_length)
    plain = [caption if isinstance(caption, str) else "" for caption in captions]
    read = tokenizer(plain, padding="max_length", max_length=size, truncation=True, return_tensors="pt")
    ids = cast("Tensor", read.input_ids).clone()
    weights: list[Tensor | None] = [None] * len(captions)
    for row, caption in enumerate(captions):
        if isinstance(caption, str):
            continue
        words: list[tuple[int, float]] = []
        for part, weight in caption:
            words += [(token, weight) for token in tokenizer(part, add_special_tokens=False).input_ids]
        del words[size - 2 :]
        end = len(words) + 1
        ids[row, 1:end] = torch.tensor([token for token, _ in words], dtype=ids.dtype)
        ids[row, end] = tokenizer.eos_token_id
        ids[row, end + 1 :] = tokenizer.pad_token_id
        factors = torch.ones(size)
        factors[1:end] = torch.tensor([weight for _, weight in words])
        weights[row] = factors.to(device)
    return Tokens(ids.to(device), tuple(weights))
