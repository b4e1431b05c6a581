"""Latents encoded on demand, in place of cached ones: threads decode images ahead, then they are encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, TrainingFailed
from lora_trainer.data.images.pixels import EncodeImage, ShownView, encode_shown, read_shown
from lora_trainer.data.sample import Sample
from lora_trainer.data.steps import Ref
from lora_trainer.data.views import View

MOST_AHEAD = 32  # images; of 1024 x 1024 pixels they take 400 MB

Place = Callable[[Ref], tuple[Sample, View]]


class Fresh:
    """What `Store` is for cached latents, by place in place of key. For one reading thread; `close` it at the end.

    Images are encoded one by one, so that how a step is split changes nothing.
    """

    def __init__(self, place: Place, encode: EncodeImage, workers: int, dtype: torch.dtype = torch.float32) -> None:
        """`place` returns the sample and view of a ref; with no workers images are decoded when they are read."""
        self.place = place
        self._encode: EncodeImage | None = encode
        self._dtype = dtype
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="images") if workers else None
        self._begun: dict[Ref, Future[ShownView]] = {}
        self._next: deque[Ref] = deque()

    def expect(self, refs: Iterable[Ref]) -> None:
        """Decode these next, in their order, at most MOST_AHEAD ahead; all other decoding is canceled."""
        wanted = dict.fromkeys(refs)
        for ref in [ref for ref in self._begun if ref not in wanted]:
            self._begun.pop(ref).cancel()
        self._next = deque(ref for ref in wanted if ref not in self._begun)
        self._begin()

    def read(self, ref: Ref) -> Mapping[str, Tensor]:
        """Mean and spread [C, h, w] of what a place shows, and its mask [1, h, w] where it has one.

        Raises DatasetRefused, naming the file, for an image that cannot be read or changed,
        TrainingFailed for latents that are not finite or too little memory for one image.
        """
        assert self._encode is not None, "closed"
        begun = self._begun.pop(ref, None)
        if begun is None and ref in self._next:
            self._next.remove(ref)
        shown = self._decode(ref) if begun is None else begun.result()
        self._begin()
        entry = {name: tensor[0].cpu() for name, tensor in encode_shown([shown], self._encode, self._dtype).items()}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in entry.values()):
            message = f"The encoder gave values that are not finite for {self.place(ref)[0].path}."
            raise TrainingFailed(Problem("encoding_not_finite", message, "Check the image, or remove it."))
        return entry

    def close(self) -> None:
        """Let the threads end and the encoder leave memory."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._encode = None
        self._begun.clear()
        self._next.clear()

    def _begin(self) -> None:
        while self._pool is not None and self._next and len(self._begun) < MOST_AHEAD:
            ref = self._next.popleft()
            self._begun[ref] = self._pool.submit(self._decode, ref)

    def _decode(self, ref: Ref) -> ShownView:
        return read_shown(*self.place(ref))
