"""Captions to tokens, in chunks as long as a text encoder reads, with prompt weighting.

Long captions are read as the AUTOMATIC1111 web UI and ComfyUI read them: every 75 tokens are a chunk with a start and an
end of its own, chunks are encoded one by one, and their states are concatenated, 77 for each. Weights are those of the
web UI: each token's hidden state is multiplied by its weight, then all of its chunk by one number that restores their
mean. Start, end and padding weigh 1, and so does the pooled summary, which is that of the first chunk.
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

AROUND = 2  # start and end of a chunk


@dataclass(frozen=True)
class Tokens:
    """B captions in `chunks` of L tokens each, padded or truncated. `weights` are None where every token weighs 1."""

    ids: Tensor  # [B * chunks, L], on the device
    weights: tuple[Tensor | None, ...]  # B * chunks times [L] float32, on the device
    chunks: int = 1

    def weigh(self, states: Tensor) -> Tensor:
        """Hidden states [B * chunks, L, D] -> [B, chunks * L, D], weighted; rows without weights stay."""
        import torch

        if any(weights is not None for weights in self.weights):
            states = torch.stack(
                [
                    row if weights is None else _weighed(row, weights)
                    for row, weights in zip(states, self.weights, strict=True)
                ]
            )
        return states.reshape(len(states) // self.chunks, -1, states.shape[-1])

    def first(self, summaries: Tensor) -> Tensor:
        """Summaries of chunks [B * chunks, P] -> those of each caption's first chunk [B, P]."""
        return summaries[:: self.chunks]


def _weighed(states: Tensor, weights: Tensor) -> Tensor:
    """[L, D], in fp32 inside: a mean of many small numbers is lost in fewer bits."""
    import torch

    wide = states.float()
    weighed = wide * weights[:, None]
    before, after = wide.mean(), weighed.mean()
    # Chosen on the device, without a wait; a divisor of 0 would make the gradients nan.
    divisor = torch.where(after == 0, torch.ones_like(after), after)
    return (weighed * torch.where(after == 0, torch.ones_like(after), before / divisor)).to(states.dtype)


def read_tokens(tokenizer: Any, captions: Sequence[Caption], device: torch.device, chunks: int = 1) -> Tokens:
    """The captions as tokens of a text encoder; longer captions are truncated."""
    import torch

    size = int(tokenizer.model_max_length)
    room = size - AROUND
    ids = torch.full((len(captions) * chunks, size), tokenizer.pad_token_id)
    ids[:, 0] = tokenizer.bos_token_id
    learned = learned_tokens(tokenizer)
    weights: list[Tensor | None] = []
    for number, caption in enumerate(captions):
        for chunk, own in enumerate(_in_chunks(tokens_of(tokenizer, caption, learned), room, chunks, learned)):
            row, end = ids[number * chunks + chunk], len(own) + 1
            row[1:end] = torch.tensor([token for token, _ in own], dtype=ids.dtype)
            row[end] = tokenizer.eos_token_id
            factors = torch.ones(size)
            factors[1:end] = torch.tensor([weight for _, weight in own])
            weights.append(None if isinstance(caption, str) else factors.to(device))
    return Tokens(ids.to(device), tuple(weights), chunks)


def padded_tokens(
    tokenizer: Any,
    captions: Sequence[Caption],
    rows: Sequence[Sequence[tuple[int, float]]],
    size: int,
    device: torch.device,
    cut: int = 0,
) -> tuple[Tokens, Tensor]:
    """A row of tokens and weights for each caption, padded to `size`; and where there is text [B, size], bool.

    The weights are those of the tokens after the first `cut`.
    """
    import torch

    ids = torch.full((len(rows), size), tokenizer.pad_token_id)
    here = torch.zeros(len(rows), size, dtype=torch.bool)
    factors = torch.ones(len(rows), size)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor([token for token, _ in row], dtype=ids.dtype)
        factors[number, : len(row)] = torch.tensor([weight for _, weight in row])
        here[number, : len(row)] = True
    weights = (
        None if isinstance(caption, str) else own[cut:].to(device)
        for caption, own in zip(captions, factors, strict=True)
    )
    return Tokens(ids.to(device), tuple(weights)), here.to(device)


def _in_chunks(
    tokens: list[tuple[int, float]], room: int, chunks: int, learned: Mapping[int, Sequence[int]]
) -> list[list[tuple[int, float]]]:
    """The tokens of each chunk. Learned tokens of one name are not split between chunks, but moved to the next one."""
    found, start = [], 0
    for _ in range(chunks - 1):
        end = start + room
        cut = (at for at, (token, _) in enumerate(tokens[start:end], start) if at + len(learned.get(token, ())) > end)
        end = next(cut, end)
        found.append(tokens[start:end])
        start = end
    return [*found, tokens[start : start + room]]


def tokens_of(
    tokenizer: Any, caption: Caption, learned: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> list[tuple[int, float]]:
    """A caption's tokens with the weight of each, without start and end; a `learned` token becomes all of its own."""
    parts = ((caption, 1.0),) if isinstance(caption, str) else caption
    return [
        (each, weight)
        for part, weight in parts
        for token in tokenizer(part, add_special_tokens=False, verbose=False).input_ids
        for each in learned.get(token, (token,))
    ]


def learned_tokens(tokenizer: Any) -> dict[int, tuple[int, ...]]:
    """Learned tokens with several embeddings: `<zobo>`, `<zobo>_1`, …, by the first of them."""
    added: dict[str, int] = tokenizer.added_tokens_encoder
    found = {}
    for token_name, first in added.items():
        tokens = [first]
        while (more := added.get(f"{token_name}_{len(tokens)}")) is not None:
            tokens.append(more)
        if len(tokens) > 1:
            found[first] = tuple(tokens)
    return found
