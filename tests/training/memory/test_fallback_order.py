"""Which numbers of blocks a step that is short of memory may take, and what of them is set by the user."""

from __future__ import annotations

from dataclasses import replace

import torch

from lora_trainer.models.compiled import Compiled
from lora_trainer.models.memory.checkpointing import checkpointed_blocks
from lora_trainer.models.memory.streaming import streamable_blocks, streamed_count
from lora_trainer.training.memory.fit import streamed, swap_fallbacks
from lora_trainer.training.state import Fit
from tests.training.memory.test_fit import FOUR, in_forward
from tests.training.tiny_job import TinyPlace, told_in


def test_a_resumed_run_that_is_to_spare_more_does(place: TinyPlace):
    """Than it found for itself when memory ran out: what is set now, where that is more."""
    settings = FOUR | {"train__effective_batch_size": 1, "steps": 6}
    short = in_forward(place.job("more", **settings), lambda call: call == 1)
    stopped, _ = place.train(told_in(short, 3))
    assert stopped.fit.checkpointed is not None
    again = place.job("more", memory__blocks_to_swap=3, memory__gradient_checkpointing="true", **settings)
    state, _ = place.resume(again)
    assert state.fit.checkpointed == stopped.fit.checkpointed < checkpointed_blocks(again.learner.denoiser)
    assert checkpointed_blocks(again.learner.denoiser) == again.planned.checkpointed
    assert streamed_count(again.learner.denoiser) == 3
    fewer = place.job("more", memory__blocks_to_swap=1, **settings)
    assert (streamed(fewer, Fit(streamed=3)), streamed(again, Fit(streamed=2))) == (3, 3)


def test_a_processor_streams_only_where_it_is_asked_to(place: TinyPlace):
    job = place.job("plain", **FOUR)
    assert swap_fallbacks(job) == [0]
    card = replace(job, learner=replace(job.learner, device=torch.device("cuda")))
    blocks = len(streamable_blocks(job.learner.denoiser))
    assert swap_fallbacks(card) == [0, -(-blocks // 4), -(-blocks // 2), blocks]
    recorded = {"enabled": "auto", "mode": "reduce-overhead"}
    wanted = card.config.model_copy(update={"compile": card.config.compile.model_copy(update=recorded)})
    assert len(swap_fallbacks(replace(card, config=wanted))) == 4, "nothing is compiled"
    with_graphs = replace(card.learner, compiled=Compiled("reduce-overhead", dynamic=False, fullgraph=False))
    assert swap_fallbacks(replace(card, config=wanted, learner=with_graphs)) == [0]
    settled = card.config.model_copy(update={"memory": card.config.memory.model_copy(update={"blocks_to_swap": 0})})
    assert swap_fallbacks(replace(card, config=settled)) == [0]
