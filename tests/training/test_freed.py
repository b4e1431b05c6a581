"""After training nothing of the trained model stays in memory beside the fresh one that evaluates its LoRA."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch import Tensor

from lora_trainer.run.after_training import free_step_context
from tests.training.tiny_run import TinyPlace


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"train__ema_decay": 0.9, "text_encoder__learning_rates": "[1e-4]"},
        {"memory__blocks_to_swap": 1, "memory__weight_dtype": "int8", "memory__gradient_checkpointing": "true"},
    ],
    ids=["average and text encoder", "swapped and quantized"],
)
def test_every_tensor_of_the_trained_model_is_freed(settings: dict[str, object], place: TinyPlace) -> None:
    run = place.run("freed", steps=2, **settings)
    place.train(run)
    run.feed.close()
    context = run.context
    tensors: list[Tensor] = [*context.adapter.masters.values(), *context.adapter.copies.values()]
    tensors += [tensor for module in context.modules for tensor in (*module.parameters(), *module.buffers())]
    tensors += context.average.values.values() if context.average else []
    tensors += [each for kept in context.optimizer.state.values() for each in kept.values() if isinstance(each, Tensor)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    assert len(alive) > 100
    del tensors
    free_step_context(context)
    gc.collect()
    assert sum(tensor() is not None for tensor in alive) == 0
    assert run.context.built.shapes  # which the export and the record still read
