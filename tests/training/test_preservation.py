"""Output preservation (`loss.output_preservation_weight`): its target, its draws, its cost in the plan, and what it excludes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lora_trainer.config.layers import Layer
from lora_trainer.config.schema import CaptionsSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.sample import ControlImage, Sample
from lora_trainer.run.plans.plan import make_plan
from lora_trainer.run.preserved_prompts import class_captions, general_prompts, refuse_preservation
from lora_trainer.run.settings import settle
from lora_trainer.training.fallbacks import split_micro_batches
from lora_trainer.training.objectives.preservation import CLASS_SHARE, EMPTY_SHARE, PreservedPrompts
from lora_trainer.training.objectives.without_adapter import without_adapter
from lora_trainer.training.step import StepSettings, backward, train_step
from tests.training.tiny_run import TinyPlace

WEIGHT = {"loss__output_preservation_weight": 0.5}


def test_the_target_is_what_the_base_predicts_for_other_prompts(place: TinyPlace) -> None:
    run = place.run("target", **WEIGHT)
    context = run.context
    for parameter in context.adapter.copies.values():  # a trained LoRA, which changes predictions
        parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    usual, kept = (
        [each for each in run.feed.micros(0) if each.keeps_base is keeps_base] for keeps_base in (False, True)
    )
    assert [len(each.t) for each in kept] == [len(each.t) for each in usual]
    for plain, micro in zip(usual, kept, strict=True):
        assert torch.equal(micro.latents, plain.latents)
        assert torch.equal(micro.noise, plain.noise)
        assert torch.equal(micro.t, plain.t)
        assert not torch.equal(micro.cond["embeds"], plain.cond["embeds"])
        assert micro.weights.eq(0.5).all()
        noisy = context.process.add_noise(micro.latents, micro.added, micro.t)
        with torch.no_grad(), without_adapter(context.denoiser):
            base = context.predict(context.denoiser, noisy, micro.t, micro.cond, micro.sizes)
        assert torch.equal(context.target(context, micro, noisy), base)
        with torch.no_grad():
            own = context.predict(context.denoiser, noisy, micro.t, micro.cond, micro.sizes)
        assert not torch.equal(own, base)
        expected = 0.5 * (own - base).square().mean(dim=(1, 2, 3))
        torch.testing.assert_close(backward(context, micro, 1)[1], expected)


def test_an_untrained_lora_has_nothing_to_preserve(place: TinyPlace) -> None:
    """Its gradient is that of the trained samples alone, and so is the loss; preserved samples are not counted."""
    results = []
    for name, settings in (("plain", {}), ("kept", WEIGHT)):
        run = place.run(name, **settings)
        result = train_step(run.context, run.feed.micros(0), run.feed.samples_in(0), StepSettings(1e-3))
        results.append((result, [master.clone() for master in run.context.masters]))
    (plain, weights), (kept, others) = results
    assert torch.equal(plain.loss, kept.loss)
    assert sum(map(len, plain.losses)) == sum(map(len, kept.losses))
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_may_be_split(place: TinyPlace) -> None:
    run = place.run("split", **WEIGHT, train__effective_batch_size=4, train__max_micro_batch_size=4)
    whole = [each for each in run.feed.micros(0) if each.keeps_base]
    single = [each for each in split_micro_batches(run.feed.micros(0), 1) if each.keeps_base]
    assert sum(len(each.t) for each in whole) == len(single)
    again = [
        each
        for each in place.run(
            "split2", **WEIGHT, train__effective_batch_size=4, train__max_micro_batch_size=1
        ).feed.micros(0)
        if each.keeps_base
    ]
    order = {each.noise.sum().item(): each for each in again}
    for each in single:
        assert torch.equal(order[each.noise.sum().item()].cond["embeds"], each.cond["embeds"])


def test_only_every_nth_step_preserves(place: TinyPlace) -> None:
    run = place.run("third", **WEIGHT, loss__output_preservation_every_n_steps=3)
    assert [any(micro.keeps_base for micro in run.feed.micros(step)) for step in range(6)] == [True, False, False] * 2


def test_prompts_are_drawn_by_position_in_their_shares() -> None:
    prompts = PreservedPrompts("empty", ("class 1", "class 2"), tuple(f"general {number}" for number in range(8)))
    draws = [prompts.key_at(7, step, (f"image {place}", 0)) for step in range(100) for place in range(20)]
    assert draws == [prompts.key_at(7, step, (f"image {place}", 0)) for step in range(100) for place in range(20)]
    counts = Counter(draws)
    assert set(counts) == {"empty", *prompts.of_class, *prompts.general}
    assert counts["empty"] / 2000 == pytest.approx(EMPTY_SHARE, abs=0.03)
    of_class = CLASS_SHARE * (1 - EMPTY_SHARE)
    assert sum(counts[each] for each in prompts.of_class) / 2000 == pytest.approx(of_class, abs=0.05)
    alone = replace(prompts, of_class=())
    assert {alone.key_at(7, step, ("image", 0)) for step in range(200)} == {"empty", *prompts.general}
    bare = PreservedPrompts("empty", (), ())
    assert {bare.key_at(7, step, ("image", 0)) for step in range(20)} == {"empty"}


def config_of(**loss: object) -> SimpleNamespace:
    word = loss.pop("trigger_word", "sks")
    values = {f"output_preservation_{name}": value for name, value in loss.items()}
    defaults = {"output_preservation_weight": 1.0, "output_preservation_class": None, "output_preservation_prompts": ()}
    return SimpleNamespace(
        captions=CaptionsSection(trigger_word=word),
        data=SimpleNamespace(sources=(), num_class_images=0),
        loss=SimpleNamespace(**{**defaults, **values}),
        model=SimpleNamespace(path="real", family=None),
    )


def sample(caption: str, **values: object) -> Sample:
    return Sample(Path("a.png"), caption, 8, 8, caption, **values)


def test_the_class_replaces_the_trigger_word() -> None:
    samples = [
        sample("a photo of SKS, smiling"),
        sample("sks"),
        sample("asks sks-like"),
        sample("a dog", regularization=True),
    ]
    assert class_captions(config_of(**{"class": "a person"}), samples) == (
        "a photo of a person, smiling",
        "a person",
        "asks a person-like",
    )
    assert class_captions(config_of(), samples) == ()
    assert class_captions(config_of(weight=0.0, **{"class": "a person"}), samples) == ()


def test_weighted_captions_lose_their_brackets_and_a_class_is_no_pattern() -> None:
    weighted = sample("a photo of (sks:1.3), smiling", weighted=True)
    assert class_captions(config_of(**{"class": r"a \wide dog"}), [weighted]) == (r"a photo of a \wide dog, smiling",)


def test_pairs_with_control_images_are_refused() -> None:
    with pytest.raises(UsageError) as raised:
        refuse_preservation(config_of(), [sample("make it red", controls=(ControlImage(Path("b.png"), "b"),))])
    assert raised.value.problems[0].code == "preservation_with_controls"
    refuse_preservation(config_of(weight=0.0), [sample("make it red", controls=(ControlImage(Path("b.png"), "b"),))])


def test_the_cached_prompts_are_those_that_are_drawn(place: TinyPlace) -> None:
    """Each key reads the embeddings of its own prompt."""
    words = {"captions__trigger_word": "sks", "loss__output_preservation_class": "a thing"}
    run = place.run("keys", **WEIGHT, **words, loss__output_preservation_prompts=("a house",))
    preservation = run.context.add_micros.__self__
    prompts, texts = preservation.prompts, preservation.texts
    assert len(prompts.general) == 1
    assert prompts.of_class
    assert len({prompts.empty, *prompts.general, *prompts.of_class}) == 2 + len(prompts.of_class)
    assert prompts.empty == run.feed.data.empty_key
    trained = {key for keys in run.feed.data.text_keys for key in keys}
    assert not trained & {prompts.empty, *prompts.general, *prompts.of_class}
    for key in (prompts.empty, *prompts.general, *prompts.of_class):
        assert texts.read(key)["embeds"].dim() == 2


@pytest.mark.parametrize("word", [None, "other"])
def test_a_class_needs_a_trigger_word_in_captions(word: str | None) -> None:
    with pytest.raises(UsageError) as raised:
        class_captions(config_of(trigger_word=word, **{"class": "a person"}), [sample("a photo of sks")])
    assert raised.value.problems[0].code == "no_trigger_word"


def test_prompts_of_the_user_replace_the_general_ones() -> None:
    assert general_prompts(config_of(prompts=("a car", "a cat", "a car"))) == ("a car", "a cat")
    assert general_prompts(config_of(weight=0.0)) == ()
    assert len(general_prompts(config_of())) == 32


def test_the_plan_counts_preserved_steps(place: TinyPlace) -> None:
    """The plan's operations are those that torch counts, within 3 %."""
    counted, planned = {}, {}
    for name, weight in (("plain", 0.0), ("kept", 1.0)):
        run = place.run(name, steps=1, loss__output_preservation_weight=weight, lora__rank=4)
        with FlopCounterMode(display=False) as counter:
            for micro in run.feed.micros(0):
                backward(run.context, micro, run.feed.samples_in(0))
        counted[name] = counter.get_total_flops()
        loss = {"output_preservation_weight": weight}
        layer = {"model": {"path": str(place.model)}, "lora": {"rank": 4}, "memory": {"weight_dtype": "fp32"}}
        planned[name] = make_plan(settle([], [Layer("test", {**layer, "loss": loss})])).fit.parts.tflop
    assert planned["kept"] / planned["plain"] == pytest.approx(counted["kept"] / counted["plain"], rel=0.03)


@pytest.mark.parametrize(
    "trained", [{"text_encoder__learning_rates": (1e-4,)}, {"textual_inversion__placeholder_tokens": ("<a>",)}]
)
def test_text_encoders_must_be_frozen(trained: dict[str, object], place: TinyPlace) -> None:
    with pytest.raises(UsageError, match="trains its text encoders"):
        place.run("both", **WEIGHT, **trained)
