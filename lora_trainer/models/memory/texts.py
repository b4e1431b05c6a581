"""GPU memory of text encoders that are trained. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Values that a layer keeps of a token for its backward pass, frozen but for a LoRA on all of its matmuls: for each of
# its width, of its attention's, of its inner width, of the LoRA's rank. Counted on the CPU (tests/run),
# T5's in bf16, whose norms keep fp32.
OF_CLIP = (4, 4, 3, 6)
OF_T5 = (8, 4, 7, 7)


@dataclass(frozen=True)
class EncoderSize:
    """A text encoder with gradients. `rank` is that of its LoRA, 0 for none; `tokens` are those of a caption.

    T5 has `scores`, the heads of a bias that each of its layers keeps [heads, tokens, tokens] of, and a gate.
    """

    layers: int
    width: int
    inner: int
    attention: int = 0  # its width where that is another
    scores: int = 0
    rank: int = 0
    tokens: int = 0

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The LoRA's tensors: of three matmuls into attention and one out, of one or two to the inner width, one back."""
        if not self.rank:
            return []
        width, inner, rank = self.width, self.inner, self.rank
        wide = self.attention or width
        into = [(rank, width), (wide, rank)] * 3 + [(rank, wide), (width, rank)]
        inner_too = [(rank, width), (inner, rank)] * (2 if self.scores else 1) + [(rank, inner), (width, rank)]
        return [*(into + inner_too) * self.layers]

    def kept(self, samples: int, *, checkpointed: bool) -> int:
        """Values that wait for the backward pass, of so many samples in one forward pass."""
        of_width, of_attention, of_inner, of_rank = OF_T5 if self.scores else OF_CLIP
        layer = (
            of_width * self.width
            + of_attention * (self.attention or self.width)
            + of_inner * self.inner
            + of_rank * self.rank
        )
        values = (self.layers + 1) * self.width + layer if checkpointed else self.layers * layer + 2 * self.width
        biases = 2 if checkpointed else self.layers
        return samples * self.tokens * values + biases * self.scores * self.tokens**2

    @property
    def products(self) -> int:
        """Weights that a token is multiplied with."""
        return self.layers * (4 * (self.attention or self.width) + (3 if self.scores else 2) * self.inner) * self.width


@dataclass(frozen=True)
class TextSizes:
    """`held` counts the weights of all text encoders that stay in memory, by component; `encoders` are those that
    gradients go through."""

    held: Mapping[str, int] = field(default_factory=dict)
    encoders: tuple[EncoderSize, ...] = ()

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the LoRA's tensors."""
        return [shape for encoder in self.encoders for shape in encoder.shapes]

    def kept(self, samples: int, *, checkpointed: bool) -> int:
        """Values that wait for the backward pass, of so many samples in one forward pass."""
        return sum(encoder.kept(samples, checkpointed=checkpointed) for encoder in self.encoders)

    def flops(self, samples: int, *, checkpointed: bool) -> int:
        """Operations of a forward and backward pass of so many samples; the base's weights get no gradients."""
        times = 6 if checkpointed else 4
        return times * samples * sum(encoder.products * encoder.tokens for encoder in self.encoders)


NO_TEXTS = TextSizes()
