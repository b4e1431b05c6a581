"""Training T5: encoded in each step, in full and without dropout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lora_trainer.core.errors import UsageError
from lora_trainer.models.families import FAMILIES
from lora_trainer.training.step import backward
from tests.training.test_texts import gradients, lit

RATES = {"sd3": (0.0, 0.0, 1e-3), "flux": (0.0, 1e-3)}
SETTINGS: dict[str, object] = {"text_encoder__max_sequence_length": 16, "data__resolution": 64}


@pytest.fixture(params=RATES)
def here(request, place, tiny_models):
    return replace(place, model=tiny_models(request.param))


def rates(here) -> tuple[float, ...]:
    return RATES["sd3" if (here.model / "text_encoder_3").is_dir() else "flux"]


def test_attention_and_feed_forward_layers_train_as_in_sd_scripts(here):
    run = here.run("a", text_encoder__learning_rates=rates(here), text_encoder__lora_rank=2, **SETTINGS)
    found = gradients(lit(run))
    t5 = {name: gradient for name, gradient in found.items() if ".encoder.block." in name}
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in t5} == {*"qkvo", "wi_0", "wi_1", "wo"}
    assert len(t5) == 2 * 2 * 7  # halves, blocks, products
    assert all(float(gradient.abs().max()) > 0.0 for gradient in t5.values())
    names = [name for name in found if name.startswith("text_encoder")]
    assert len(names) == len(t5)  # no other encoder learns


def test_no_dropout_and_captions_are_encoded_as_in_sampling(here):
    cached = here.run("a", **SETTINGS)
    spoken = here.run("b", text_encoder__learning_rates=rates(here), **SETTINGS)
    for one, other in zip(cached.feed.micros(0), spoken.feed.micros(0), strict=True):
        assert not other.cond  # nothing of it is cached
        embeds = spoken.context.texts.encode(other.captions, {})
        assert embeds.keys() == one.cond.keys()
        assert all(torch.allclose(embeds[name], value, atol=1e-5) for name, value in one.cond.items())


def test_a_step_is_the_same_split_whole_and_recomputed(here):
    def gradient(run) -> torch.Tensor:
        micros = lit(run).feed.micros(0)
        for micro in micros:
            backward(run.context, micro, sum(len(each.latents) for each in micros))
        return torch.cat([master.grad.flatten() for master in run.context.adapter.masters.values()])

    common = {**SETTINGS, "text_encoder__learning_rates": rates(here), "train__effective_batch_size": 2}
    whole, ones, again = (
        gradient(here.run(name, steps=1, **common, **more))
        for name, more in (
            ("a", {}),
            ("b", {"train__max_micro_batch_size": 1}),
            ("c", {"memory__gradient_checkpointing": "true"}),
        )
    )
    assert float((ones - whole).norm() / whole.norm()) < 1e-5
    assert torch.equal(again, whole)


def test_a_learning_rate_for_a_missing_encoder_is_refused(place, tiny_models):
    family = FAMILIES["sd3"]
    with pytest.raises(UsageError, match=r"text_encoder_3, which model\.without_t5 skips"):
        replace(place, model=tiny_models("sd3")).run(
            "a", text_encoder__learning_rates=RATES["sd3"], model__without_t5=True
        )
    with pytest.raises(UsageError, match=r"text_encoder_3, which .* lacks"):
        replace(place, model=tiny_models("sd3-without-t5")).run("a", text_encoder__learning_rates=RATES["sd3"])
    with pytest.raises(UsageError, match="language model"):
        FAMILIES["z_image"].text_rates((1e-3,))
    assert family.text.clips == ("text_encoder", "text_encoder_2")
