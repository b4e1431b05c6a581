"""The base model's own predictions, while its adapter is in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from peft.tuners.tuners_utils import BaseTunerLayer

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def without_adapter(denoiser: nn.Module) -> Iterator[None]:
    """Inside the block the denoiser predicts as without its adapter; a training adapter stays.

    peft's `enable_adapters` would also change which parameters are trained.
    """
    before = {each: each._disable_adapters for each in denoiser.modules() if isinstance(each, BaseTunerLayer)}
    for layer in before:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in before.items():
            layer._disable_adapters = disabled
