"""Captions to tokens, in pieces as long as a text encoder reads, and words that weigh more or less than others.

Long captions are read as the AUTOMATIC1111 web UI and ComfyUI read them: every 75 tokens are a piece with a start and an
end of its own, pieces are encoded one by one, and what is said of them stands side by side, 77 states for each. Weights
are those of the web UI: each token's hidden state is multiplied by its weight, then all of its piece by one number that
brings back their mean. Start, end and padding weigh 1, and so does the pooled summary, which is that of the first piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lora_trainer.models.family import Caption

AROUND = 2  # start and end of a piece


@dataclass(frozen=True)
class Tokens:
    """B captions in `pieces` of L tokens each, padded or cut. `weights` are None where every word of a piece weighs 1."""

    ids: Tensor  # [B * pieces, L], on the device
    weights: tuple[Tensor | None, ...]  # B * pieces times [L] float32, on the device
    pieces: int = 1

    def weigh(self, states: Tensor) -> Tensor:
        """Hidden states [B * pieces, L, D] -> [B, pieces * L, D], with the words weighed; rows without weights stay."""
        import torch

        if any(weights is not None for weights in self.weights):
            states = torch.stack(
                [
                    row if weights is None else _weighed(row, weights)
                    for row, weights in zip(states, self.weights, strict=True)
                ]
            )
        return states.reshape(len(states) // self.pieces, -1, states.shape[-1])

    def first(self, summaries: Tensor) -> Tensor:
        """Summaries of pieces [B * pieces, P] -> those of each caption's first piece [B, P]."""
        return summaries[:: self.pieces]


def _weighed(states: Tensor, weights: Tensor) -> Tensor:
    """[L, D], in fp32 inside: a mean of many small numbers is lost in fewer bits."""
    import torch

    wide = states.float()
    weighed = wide * weights[:, None]
    before, after = wide.mean(), weighed.mean()
    # Chosen on the device, which nobody waits for; a divisor of 0 would make gradients of nothing.
    divisor = torch.where(after == 0, torch.ones_like(after), after)
    return (weighed * torch.where(after == 0, torch.ones_like(after), before / divisor)).to(states.dtype)


def read_tokens(tokenizer: Any, captions: Sequence[Caption], device: torch.device, pieces: int = 1) -> Tokens:
    """The captions as a text encoder takes them; what is longer than all pieces is cut."""
    import torch

    size = int(tokenizer.model_max_length)
    room = size - AROUND
    ids = torch.full((len(captions) * pieces, size), tokenizer.pad_token_id)
    ids[:, 0] = tokenizer.bos_token_id
    learned = learned_words(tokenizer)
    weights: list[Tensor | None] = []
    for number, caption in enumerate(captions):
        for piece, own in enumerate(_in_pieces(words_of(tokenizer, caption, learned), room, pieces, learned)):
            row, end = ids[number * pieces + piece], len(own) + 1
            row[1:end] = torch.tensor([token for token, _ in own], dtype=ids.dtype)
            row[end] = tokenizer.eos_token_id
            factors = torch.ones(size)
            factors[1:end] = torch.tensor([weight for _, weight in own])
            weights.append(None if isinstance(caption, str) else factors.to(device))
    return Tokens(ids.to(device), tuple(weights), pieces)


def _in_pieces(
    words: list[tuple[int, float]], room: int, pieces: int, learned: Mapping[int, Sequence[int]]
) -> list[list[tuple[int, float]]]:
    """The tokens of each piece. A learned word that a piece has no room for stands whole in the next, where there is one."""
    found, start = [], 0
    for _ in range(pieces - 1):
        end = start + room
        cut = (at for at, (token, _) in enumerate(words[start:end], start) if at + len(learned.get(token, ())) > end)
        end = next(cut, end)
        found.append(words[start:end])
        start = end
    return [*found, words[start : start + room]]


def words_of(
    tokenizer: Any, caption: Caption, learned: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> list[tuple[int, float]]:
    """A caption's tokens with the weight of each, without start and end; in place of a `learned` word all its tokens."""
    parts = ((caption, 1.0),) if isinstance(caption, str) else caption
    return [
        (each, weight)
        for part, weight in parts
        for token in tokenizer(part, add_special_tokens=False, verbose=False).input_ids
        for each in learned.get(token, (token,))
    ]


def learned_words(tokenizer: Any) -> dict[int, tuple[int, ...]]:
    """The tokens of each word that was added with several embeddings: `<zobo>`, `<zobo>_1`, …, by the first of them."""
    added: dict[str, int] = tokenizer.added_tokens_encoder
    found = {}
    for word, first in added.items():
        tokens = [first]
        while (more := added.get(f"{word}_{len(tokens)}")) is not None:
            tokens.append(more)
        if len(tokens) > 1:
            found[first] = tuple(tokens)
    return found
