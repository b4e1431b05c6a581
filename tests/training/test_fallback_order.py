"""The fallbacks of a step that runs out of memory, and the user's settings among them."""

from __future__ import annotations

from dataclasses import replace

import torch

from lora_trainer.models.compiled import Compiled
from lora_trainer.models.memory.block_swap import swappable_blocks, swapped_count
from lora_trainer.models.memory.checkpointing import checkpointed_blocks
from lora_trainer.training.oom_fallback import swap_fallbacks, swapped
from lora_trainer.training.state import OomFallback
from tests.training.test_fit import FOUR, in_forward
from tests.training.tiny_run import TinyPlace, signal_at_step


def test_a_resumed_run_can_save_more_memory(place: TinyPlace):
    """The current setting applies if it saves more than the fallback found earlier."""
    settings = FOUR | {"train__effective_batch_size": 1, "steps": 6}
    short = in_forward(place.run("more", **settings), lambda call: call == 1)
    stopped, _ = place.train(signal_at_step(short, 3))
    assert stopped.fit.checkpointed is not None
    again = place.run("more", memory__blocks_to_swap=3, memory__gradient_checkpointing="true", **settings)
    state, _ = place.resume(again)
    assert state.fit.checkpointed == stopped.fit.checkpointed < checkpointed_blocks(again.context.denoiser)
    assert checkpointed_blocks(again.context.denoiser) == again.planned.checkpointed
    assert swapped_count(again.context.denoiser) == 3
    fewer = place.run("more", memory__blocks_to_swap=1, **settings)
    assert (swapped(fewer, OomFallback(swapped=3)), swapped(again, OomFallback(swapped=2))) == (3, 3)


def test_a_cpu_swaps_blocks_only_when_set(place: TinyPlace):
    run = place.run("plain", **FOUR)
    assert swap_fallbacks(run) == [0]
    gpu = replace(run, context=replace(run.context, device=torch.device("cuda")))
    blocks = len(swappable_blocks(run.context.denoiser))
    assert swap_fallbacks(gpu) == [0, -(-blocks // 4), -(-blocks // 2), blocks]
    recorded = {"enabled": "auto", "mode": "reduce-overhead"}
    wanted = gpu.config.model_copy(update={"compile": gpu.config.compile.model_copy(update=recorded)})
    assert len(swap_fallbacks(replace(gpu, config=wanted))) == 4, "nothing is compiled"
    with_graphs = replace(gpu.context, compiled=Compiled("reduce-overhead", dynamic=False, fullgraph=False))
    assert swap_fallbacks(replace(gpu, config=wanted, context=with_graphs)) == [0]
    settled = gpu.config.model_copy(update={"memory": gpu.config.memory.model_copy(update={"blocks_to_swap": 0})})
    assert swap_fallbacks(replace(gpu, config=settled)) == [0]
