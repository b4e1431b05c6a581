"""Pipelines that diffusers has as modular blocks alone, called as the others are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import AnimaModularPipeline
from diffusers.modular_pipelines import PipelineState, SequentialPipelineBlocks
from diffusers.modular_pipelines.anima.before_denoise import (
    AnimaPrepareLatentsStep,
    AnimaSetTimestepsStep,
    AnimaTextInputStep,
)
from diffusers.modular_pipelines.anima.denoise import AnimaDenoiseStep
from diffusers.modular_pipelines.anima.modular_blocks_anima import AnimaDecodeStep


class AnimaPipeline(AnimaModularPipeline):  # type: ignore[misc]
    """diffusers' blocks of Anima, which may get text embeddings in place of prompts, and a guidance scale."""

    def __init__(self) -> None:
        super().__init__()
        steps = {
            "input": AnimaTextInputStep(),
            "latents": AnimaPrepareLatentsStep(),
            "timesteps": AnimaSetTimestepsStep(),
            "denoise": AnimaDenoiseStep(),
            "decode": AnimaDecodeStep(),
        }
        self.guidance_scale = self.guider.guidance_scale
        self.after_text = SequentialPipelineBlocks.from_blocks_dict(steps)
        for block in (*_inner(self._blocks), *_inner(self.after_text)):
            if hasattr(block, "set_progress_bar_config"):
                block.set_progress_bar_config(disable=True)

    @torch.no_grad()
    def __call__(self, *, guidance_scale: float | None = None, **inputs: Any) -> PipelineState:
        """The state after all blocks, whose `images` are those that were drawn.

        `inputs` are those of diffusers' blocks, with `prompt`, or with `prompt_embeds` [B, 512, D] and, for guidance,
        `negative_prompt_embeds`.
        """
        scale = self.guidance_scale if guidance_scale is None else guidance_scale
        encoded = "prompt_embeds" in inputs
        unguided = encoded and inputs.get("negative_prompt_embeds") is None
        self.guider.guidance_scale = 1.0 if unguided else scale or 1.0
        return self.after_text(self, PipelineState(values=inputs))[1] if encoded else super().__call__(**inputs)


def _inner(blocks: Any) -> Iterator[Any]:
    """The blocks inside of blocks, at any depth."""
    for block in blocks.sub_blocks.values():
        yield block
        yield from _inner(block) if hasattr(block, "sub_blocks") else ()
