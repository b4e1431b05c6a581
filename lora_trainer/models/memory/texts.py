"""What text encoders that are trained along take of a card. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# Values that a layer of CLIP keeps of a token for its backward pass, with its base frozen and a LoRA on all of its
# products: for each of its width, of its inner width, of the LoRA's rank. Counted on the processor (tests/production).
OF_WIDTH, OF_INNER, OF_RANK = 8, 3, 6


@dataclass(frozen=True)
class TextSizes:
    """`held` counts the weights of all text encoders that stay in memory.

    `layers` are (layers, width, inner width) of each encoder that gradients go through; those with a LoRA have its
    rank in `ranks`, 0 for none. `tokens` are those of a caption.
    """

    held: int = 0
    layers: tuple[tuple[int, int, int], ...] = ()
    ranks: tuple[int, ...] = ()
    tokens: int = 0

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The LoRA's tensors: of four products from width to width, one to the inner width and one back."""
        found: list[tuple[int, ...]] = []
        for (count, width, inner), rank in zip(self.layers, self.ranks, strict=True):
            square = [(rank, width), (width, rank)] * 4
            found += [*square, (rank, width), (inner, rank), (rank, inner), (width, rank)] * count if rank else []
        return found

    def kept(self, samples: int, *, checkpointed: bool) -> int:
        """Values that wait for the backward pass, of so many samples in one forward pass."""
        values = 0
        for (count, width, inner), rank in zip(self.layers, self.ranks, strict=True):
            layer = OF_WIDTH * width + OF_INNER * inner + OF_RANK * rank
            values += (count + 1) * width + layer if checkpointed else count * layer + 2 * width
        return samples * self.tokens * values

    def flops(self, samples: int, *, checkpointed: bool) -> int:
        """Operations of a forward and backward pass of so many samples; the base's weights get no gradients."""
        times = 6 if checkpointed else 4
        weights = sum(count * (4 * width * width + 2 * width * inner) for count, width, inner in self.layers)
        return times * weights * samples * self.tokens


NO_TEXTS = TextSizes()
