"""kohya's form, which ComfyUI, A1111, Forge and sd-scripts load: lora_down, lora_up and alpha by module."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_trainer.export.keys import (
    KOHYA_ALPHA,
    KOHYA_DOWN,
    KOHYA_UP,
    ONE_TEXT_ENCODER,
    ambiguous_names,
    kohya_name,
)
from lora_trainer.export.layout import Names
from lora_trainer.export.weights import LoraWeights


def kohya_tensors(weights: LoraWeights, names: Names = ONE_TEXT_ENCODER) -> dict[str, Tensor]:
    """The file's tensors: down `[r, in]`, up `[out, r]`, alpha a 0-dim float32.

    Raises ValueError for modules whose kohya name would not lead back to them.
    """
    lost = ambiguous_names(weights.modules, names.prefixes)
    if lost:
        raise ValueError(f"no unambiguous kohya name for {', '.join(lost[:3])}: add its parts to keys.COMPOUND")
    tensors: dict[str, Tensor] = {}
    for module, pair in weights.modules.items():
        name = kohya_name(module, names.prefixes)
        tensors[name + KOHYA_DOWN] = pair.down
        tensors[name + KOHYA_UP] = pair.up
        tensors[name + KOHYA_ALPHA] = torch.tensor(pair.alpha, dtype=torch.float32)
    return tensors
