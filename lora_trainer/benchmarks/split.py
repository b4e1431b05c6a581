"""Times the parts of a step: data, forward, backward, optimizer.

Marks are set as a step passes them, on a GPU as events in its stream, so that nothing waits. A split that is not
watching costs a call each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lora_trainer.training.step import StepContext

PARTS = ("data", "forward", "backward", "optimizer")
END = "end"


@dataclass
class Split:
    """Marks of the steps that were watched. A part lasts from its mark to the next one."""

    device: torch.device
    watching: bool = False
    _steps: list[list[tuple[str, Any]]] = field(default_factory=list)

    def forget(self) -> None:
        """What was watched until now."""
        self._steps.clear()

    def begin(self) -> None:
        """A step begins, and it is watched."""
        self.watching = True
        self._steps.append([])
        self.mark(PARTS[0])

    def end(self) -> None:
        """The step is over."""
        self.mark(END)
        self.watching = False

    def mark(self, part: str) -> None:
        """From here on it is that part."""
        if not self.watching:
            return
        now: Any = time.perf_counter()
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._steps[-1].append((part, now))

    def seconds(self) -> Mapping[str, float]:
        """The median of each part over the steps watched; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {part: statistics.median([self._of(step, part) for step in self._steps]) for part in PARTS}

    def _of(self, step: list[tuple[str, Any]], part: str) -> float:
        return sum(self._between(start, end) for (name, start), (_, end) in pairwise(step) if name == part)

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000 if self.device.type == "cuda" else float(end - start)

    def watched(self, context: StepContext) -> StepContext:
        """The same learner, marking the start of forward pass, backward pass and clipping."""

        def predict(*arguments: Any) -> Tensor:
            self.mark("forward")
            return context.predict(*arguments)

        def loss(predicted: Tensor, target: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor:
            found = context.loss(predicted, target, t, mask)
            self.mark("backward")
            return found

        def clip(*arguments: Any) -> Tensor:
            self.mark("optimizer")
            return context.clip(*arguments)

        return replace(context, predict=predict, loss=loss, clip=clip)
