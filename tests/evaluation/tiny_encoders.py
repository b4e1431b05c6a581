"""Tiny image encoders with random weights, in folders as transformers writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SEEN = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}


def save_tiny_dino(folder: Path) -> Path:
    """A DINOv2 of one layer that reads 4 x 4 patches."""
    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**SMALL, image_size=56, patch_size=14)).save_pretrained(folder)
    BitImageProcessorPil(**SEEN).save_pretrained(folder)
    return folder
