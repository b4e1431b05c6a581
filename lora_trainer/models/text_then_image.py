"""Qwen-Image 2.1's transformer where its sequence is a text and one image: laid out from their sizes alone.

diffusers' own forward pass reads from a tensor which tokens are the image's, so it waits for a GPU five times, and cannot be
traced without data. Its answers are the same (`tests/models/test_qwen_image21.py`), but that it rounds times to the model's type,
in bf16 0.999 to 1: here they stay exact, as for the other families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor


class TextThenImageTransformer(QwenImage21Transformer2DModel):  # type: ignore[misc]
    """diffusers' transformer; prompts of several lengths, with images, or with a strength of a LoRA are left to its own code."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_shapes: Sequence[Sequence[tuple[int, int, int]]],
        img_mask: Tensor | None = None,
        **named: Any,
    ) -> tuple[Tensor] | Transformer2DModelOutput:
        """Tokens [B, h * w, 64] behind a text [B, L, D] at times [B] from 0 to 1 -> tokens [B, L + h * w, 64], and in mode
        `cached` [B, h * w, 64]. `img_mask` is read where there are other images."""
        mode, caches = named.get("kv_cache_mode"), named.get("kv_cache")
        if (
            len(img_shapes[0]) > 1
            or named.get("encoder_hidden_states_mask") is not None
            or named.get("attention_kwargs")
        ):
            usual = super().forward(hidden_states, encoder_hidden_states, timestep, img_shapes, img_mask, **named)
            return cast("tuple[Tensor]", usual)
        length, device = encoder_hidden_states.shape[1], hidden_states.device
        image = self.img_in(hidden_states)
        states = torch.cat([self.txt_in(encoder_hidden_states), image], dim=1)
        rotary = self.rotary_positions(length, img_shapes[0][-1], device)
        is_image = torch.arange(states.shape[1], device=device) >= length if self.config.causal_condition else None
        if is_image is not None:  # the text is modulated as at time 0
            timestep = torch.cat([timestep, timestep.new_zeros(1)])
        embedded = self.time_text_embed(timestep, states)
        modulation = self.modulation(embedded)
        if mode == "cached":  # the text's keys and values are those of the first step
            states, rotary = image, rotary[length:]
            is_image = None if is_image is None else is_image[length:]
        segments = None if mode == "cached" else [(0, length, True)]
        kept = slice(0, length) if mode == "extract" else None
        for number, block in enumerate(self.transformer_blocks):
            cache = None if caches is None else caches.get_layer(number)
            arguments = (states, modulation, rotary, None, is_image, cache, mode, kept, segments, None)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                states = self._gradient_checkpointing_func(block, *arguments)
            else:
                states = block(*arguments)
        output = self.proj_out(self.norm_out(states, embedded, is_image))
        return Transformer2DModelOutput(sample=output) if named.get("return_dict", True) else (output,)

    def rotary_positions(self, length: int, shape: tuple[int, int, int], device: torch.device) -> Tensor:
        """The rotary positions [L + h * w, d / 2], complex: of the text one after another on all three axes, of the image
        the text's end, and its rows and columns from the middle."""
        self.pos_embed.freqs = [table.to(device) for table in self.pos_embed.freqs]
        text, (_, height, width) = torch.arange(length, device=device), shape
        rows, columns = (torch.arange(side, device=device) - (side - side // 2) for side in (height, width))
        image = (
            torch.full((height * width,), length, device=device),
            rows.repeat_interleave(width),
            columns.repeat(height),
        )
        places = (torch.cat([text, own]) for own in image)
        return torch.cat([table[each] for table, each in zip(self.pos_embed.freqs, places, strict=True)], dim=-1)
