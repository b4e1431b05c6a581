"""The planned memory of trained text encoders, compared with what they keep and with the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora, sum_updates
from lora_trainer.adapters.target_modules import matching_modules
from lora_trainer.config.layers import Layer
from lora_trainer.memory_plan.estimate import parts_of
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.memory.texts import EncoderSize, TextSizes
from lora_trainer.models.t5 import T5_TARGETS
from lora_trainer.models.unet import CLIP_TARGETS
from lora_trainer.run.plans.plan import architecture_of, make_demand, make_plan
from lora_trainer.run.settings import settle
from lora_trainer.training.texts import checkpoint_layers, drop_nothing

LAYERS, WIDTH, INNER, RANK = 3, 128, 512, 8


def bytes_kept(encoder, tokens):
    """Bytes that a forward pass keeps for the backward pass, each storage once, without the encoder's own."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*encoder.parameters(), *encoder.buffers())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = encoder(tokens)[0]
    output.sum().backward()
    return sum(size for place, size in kept.items() if place not in own)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_clip_keeps_the_predicted_memory(checkpointed):
    config = CLIPTextConfig(
        vocab_size=99, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=2
    )
    encoder = CLIPTextModel(config).requires_grad_(False).train()
    inject_lora(encoder, matching_modules(encoder, CLIP_TARGETS), AdapterOptions(RANK, 8.0), 0)
    sum_updates(encoder)
    if checkpointed:
        checkpoint_layers(encoder)
    forward = bytes_kept(encoder, torch.zeros(2, 77, dtype=torch.long))
    sizes = EncoderSize(LAYERS, WIDTH, INNER, rank=RANK, tokens=77)
    expected = 4 * sizes.kept(2, checkpointed=checkpointed)
    if checkpointed:  # those of its layers come in turn, outside of the hooks
        expected -= 4 * 2 * 77 * (8 * WIDTH + 3 * INNER + 6 * RANK)
    assert forward == pytest.approx(expected, rel=0.08)
    trained = [tuple(each.shape) for each in encoder.parameters() if each.requires_grad]
    assert sorted(trained) == sorted(sizes.shapes)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_t5_keeps_the_predicted_memory(checkpointed):
    heads, each, tokens = 2, 32, 96
    config = T5Config(
        vocab_size=99,
        d_model=WIDTH,
        d_kv=each,
        num_heads=heads,
        d_ff=INNER,
        num_layers=LAYERS,
        feed_forward_proj="gated-gelu",
    )
    encoder = T5EncoderModel(config).requires_grad_(False).bfloat16().train()
    drop_nothing(encoder)
    inject_lora(encoder, matching_modules(encoder, T5_TARGETS), AdapterOptions(RANK, 8.0), 0)
    encoder.bfloat16()
    sum_updates(encoder)
    if checkpointed:
        checkpoint_layers(encoder)
    forward = bytes_kept(encoder, torch.zeros(2, tokens, dtype=torch.long))
    sizes = EncoderSize(LAYERS, WIDTH, INNER, attention=heads * each, scores=heads, rank=RANK, tokens=tokens)
    expected = 2 * sizes.kept(2, checkpointed=checkpointed)
    if checkpointed:  # those of its layers come in turn, outside of the hooks
        assert forward < expected
        expected -= 2 * 2 * tokens * (8 * WIDTH + 4 * heads * each + 7 * INNER + 7 * RANK)
    assert forward == pytest.approx(expected, rel=0.3 if checkpointed else 0.08)
    trained = [tuple(each.shape) for each in encoder.parameters() if each.requires_grad]
    assert sorted(trained) == sorted(sizes.shapes)


def demand_of(family: str, **settings: object):
    values: dict[str, dict[str, object]] = {"model": {"family": family}}
    for key, value in settings.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    resolved = settle([], [Layer("--set", values)])
    named, architecture = architecture_of(resolved.config, FAMILIES)
    return resolved, make_demand(resolved, named, architecture, None)


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd3", "flux"])
def test_the_plan_counts_trained_text_encoders(family):
    rates = (1e-5,) * len(FAMILIES[family].text.clips)
    _, without = demand_of(family)
    resolved, along = demand_of(family, text_encoder__learning_rates=rates, text_encoder__lora_rank=4)
    less, more = (parts_of(each, 1, 0, "bf16") for each in (without, along))
    clip = {"sd15": 123_060_480, "flux": 123_060_480}.get(family, 123_060_480 + 694_659_840)
    assert (more.weights - less.weights) * 2**30 == pytest.approx(2 * clip, rel=0.01)  # T5 is not there
    assert more.activations > less.activations
    assert more.adapter > less.adapter
    assert more.tflop > less.tflop
    assert parts_of(along, 1, 1, "bf16").activations < more.activations
    half = replace(along, texts=replace(along.texts, encoders=along.texts.encoders[:1]))
    assert parts_of(half, 1, 0, "bf16").activations <= more.activations
    assert make_plan(resolved).to_json()["peak_gib"] > 0.0


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_t5_is_counted_when_it_is_trained(family):
    _, without = demand_of(family)
    _, along = demand_of(family, text_encoder__learning_rates=(*([0.0] * len(FAMILIES[family].text.clips)), 1e-5))
    less, more = (parts_of(each, 1, 0, "bf16") for each in (without, along))
    assert (more.weights - less.weights) * 2**30 > 2 * 4_762_310_656
    assert [encoder.layers for encoder in along.texts.encoders] == [24]
    assert sum(a * b for a, b in along.texts.shapes) == 24 * 32 * (4 * 2 * 4096 + 3 * (4096 + 10240))


def test_host_memory_holds_t5_when_it_is_trained():
    """Published in bf16: read into memory for fp32, memory mapped for bf16."""

    def training(precision: str, *rates: float) -> float:
        resolved, _ = demand_of("flux", text_encoder__learning_rates=rates, memory__weight_dtype=precision)
        return make_plan(resolved).phases["train"].host_gib

    clip = 4 * 123_060_480 / 2**30
    assert clip < training("fp32", 1e-5) - training("fp32") < 2 * clip
    assert training("fp32", 1e-5, 1e-5) - training("fp32", 1e-5) > 4 * 4_762_310_656 / 2**30
    assert training("bf16", 1e-5, 1e-5) - training("bf16") < 8.0


def test_nothing_is_counted_when_no_encoder_is_trained():
    _, without = demand_of("sdxl")
    assert without.texts == TextSizes()
    _, one = demand_of("sdxl", text_encoder__learning_rates=(0.0, 1e-5))
    assert [(each.layers, each.width) for each in one.texts.encoders] == [(32, 1280)]
    assert sum(one.texts.held.values()) > 8e8  # the other encodes captions next to it
