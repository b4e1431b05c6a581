"""Text encoders that are trained along with the denoiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.core.errors import UsageError
from lora_trainer.models.families import FAMILIES
from lora_trainer.training.checkpoints.checkpoint import newest_valid
from lora_trainer.training.checkpoints.save import restore
from lora_trainer.training.step import backward
from lora_trainer.training.training_run import Run
from tests.training.tiny_run import TinyPlace, outcome


def gradients(run: Run, count: int = 2) -> dict[str, torch.Tensor]:
    """The gradients of the first step, by name."""
    for micro in run.feed.micros(0):
        backward(run.context, micro, count)
    return {
        name: master.grad.clone() for name, master in run.context.adapter.masters.items() if master.grad is not None
    }


def lit(run: Run) -> Run:
    """With nonzero up projections, so that every gradient is meaningful."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in run.context.adapter.masters.values():
            master.copy_(0.05 * torch.randn(master.shape, generator=draw))
    run.context.adapter.copy_to_model()
    return run


def test_the_denoisers_weights_keep_their_names(place):
    """Checkpoints of runs without text encoders are still read."""
    alone, both = place.run("a"), place.run("b", text_encoder__learning_rates=(1e-3,))
    names = list(alone.context.adapter.masters)
    assert list(both.context.adapter.masters)[: len(names)] == names
    others = list(both.context.adapter.masters)[len(names) :]
    assert others
    assert all(name.startswith("text_encoder.") for name in others)
    place.train(alone)
    found, _ = newest_valid(alone.checkpoints)
    assert set(found[1].adapter) == set(names)


def test_each_encoder_has_its_own_learning_rate_after_warmup_and_decay(place, tiny_models):
    here = replace(place, model=tiny_models("sdxl"))
    rates = {"text_encoder__learning_rates": (2e-3, 5e-4), "optimizer__learning_rate": 1e-2}
    run = here.run(
        "a", steps=3, lr_scheduler__name="linear", lr_scheduler__warmup_steps=0, optimizer__weight_decay=0.1, **rates
    )
    here.train(run)
    of = {id(each): group["lr"] for group in run.context.optimizer.param_groups for each in group["params"]}
    shown = {name: of[id(master)] for name, master in run.context.adapter.masters.items()}
    (last,) = {rate for name, rate in shown.items() if not name.startswith("text_encoder")}
    assert 0.0 < last < 1e-2
    for prefix, share in (("text_encoder.", 5), ("text_encoder_2.", 20)):
        (rate,) = {rate for name, rate in shown.items() if name.startswith(prefix)}
        assert rate == pytest.approx(last / share)


@pytest.mark.parametrize("name", ["adamw", "prodigy", "adamw_schedulefree"])
def test_a_run_resumes_with_other_learning_rates(name, place, tiny_models):
    here = replace(place, model=tiny_models("sdxl"))
    fixed = {
        "optimizer__name": name,
        "textual_inversion__placeholder_tokens": ("<zobo>",),
        "lr_scheduler__name": "constant_with_warmup",
        "captions__prefix": "<zobo> ",
    }

    def settings(rate: float, *texts: float) -> dict[str, object]:
        return fixed | {
            "optimizer__learning_rate": rate,
            "text_encoder__learning_rates": texts[:2],
            "textual_inversion__learning_rate": texts[2],
        }

    def second_moments(run: Run) -> dict[str, torch.Tensor]:
        of = run.context.optimizer.state
        return {name: of[master]["exp_avg_sq"].clone() for name, master in run.context.adapter.masters.items()}

    one_rate = (1.0,) * 4 if name == "prodigy" else (1e-2,) * 4
    others = [(1e-2, 5e-3, 5e-3, 5e-3), (5e-3,) * 4, (5e-3, 1e-2, 5e-3, 1e-2)]
    first = here.run("a", steps=2, **settings(*one_rate))
    here.train(first)
    wanted = second_moments(first)
    for rates in [(0.5,) * 4] if name == "prodigy" else others:
        run = here.run("a", steps=4, **settings(*rates))
        found, _ = newest_valid(run.checkpoints)
        restore(run, found[1])
        kept = second_moments(run)
        assert kept.keys() == wanted.keys()
        assert all(torch.equal(kept[key], value) for key, value in wanted.items())
    state, _ = here.resume(run)
    assert state.step == 4
    shown = {id(each): group["lr"] for group in run.context.optimizer.param_groups for each in group["params"]}
    assert len(set(shown.values())) == len(set(rates))


def test_a_learning_rate_of_zero_does_not_train_an_encoder(place, tiny_models):
    run = replace(place, model=tiny_models("sdxl")).run("a", text_encoder__learning_rates=(0.0, 1e-3))
    kinds = {name.partition(".")[0] for name in run.context.adapter.masters if name.startswith("text")}
    assert kinds == {"text_encoder_2"}


def test_only_layers_in_use_are_trained(place, tiny_models):
    """SDXL uses the second-to-last layer of the first encoder: a LoRA on the last one would learn nothing."""
    run = replace(place, model=tiny_models("sdxl")).run("a", text_encoder__learning_rates=(1e-3, 1e-3))
    found = gradients(lit(run))
    assert found.keys() == run.context.adapter.masters.keys()
    assert all(float(gradient.abs().max()) > 0.0 for gradient in found.values())
    encoder = run.context.texts.parts.encoders["text_encoder"]
    last = f"text_encoder.encoder.layers.{encoder.config.num_hidden_layers - 1}."
    assert not any(name.startswith(last) for name in found)


@pytest.mark.exact
@pytest.mark.parametrize(
    "settings",
    [
        {"memory__gradient_checkpointing": "true"},
        {"memory__gradient_checkpointing": "true", "memory__checkpointing_mode": "selective"},
        {"memory__blocks_to_swap": 2},
    ],
)
def test_gradients_reach_the_encoders_through_gradient_checkpointing(settings, place):
    plain, saving = (
        lit(place.run(name, text_encoder__learning_rates=(1e-3,), **more))
        for name, more in (("a", {}), ("b", settings))
    )
    wanted, found = gradients(plain), gradients(saving)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_captions_equal_those_of_a_cached_run(place):
    """The same text, with and without dropout and weights, at the same position of the same step."""
    settings = {
        "captions__dropout": 0.4,
        "captions__shuffle": True,
        "captions__prefix": "(a:1.5) ",
        "captions__prompt_weighting": True,
    }
    cached, spoken = place.run("a", **settings), place.run("b", text_encoder__learning_rates=(1e-3,), **settings)
    weighted = 0
    for step in range(4):
        for one, other in zip(cached.feed.micros(step), spoken.feed.micros(step), strict=True):
            assert not other.cond
            embeds = spoken.context.texts.encode(other.captions, {})
            assert all(torch.allclose(embeds[name], value, atol=1e-5) for name, value in one.cond.items())
            assert other.part(0, 1).captions == other.captions[:1]
            weighted += sum(not isinstance(caption, str) for caption in other.captions)
    assert weighted


def test_validation_captions_use_the_current_encoders(place):
    run = place.run("a", text_encoder__learning_rates=(1e-2,), validation__every_n_steps=2)
    before = run.validate(2)
    masters = run.context.adapter.masters
    with torch.no_grad():
        for name, master in masters.items():
            if name.startswith("text_encoder."):
                master.add_(0.2)
    assert run.validate(2) != before
    assert all(module.training for module in run.context.modules)


def test_more_learning_rates_than_trainable_encoders_are_refused(place):
    with pytest.raises(UsageError, match=r"text_encoder.learning_rates holds 2 rates"):
        place.run("a", text_encoder__learning_rates=(1e-3, 1e-3))
    with pytest.raises(UsageError, match=r"at most 1 rate: --set 'text_encoder.learning_rates=\[0\.002\]'"):
        FAMILIES["sd15"].text_rates((2e-3, 1e-3))
    assert FAMILIES["sdxl"].text_rates((0.0, 1e-4, 0.0)) == {"text_encoder_2": 1e-4}


@pytest.fixture
def twice(place: TinyPlace) -> Callable[..., list[dict]]:
    """The outcome of two runs with the given settings."""

    def run(**settings: object) -> list[dict]:
        runs = [place.run(name, steps=3, **settings) for name in ("a", "b")]
        for run in runs:
            place.train(run)
        return [outcome(run) for run in runs]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_half_precision_run_keeps_fp32_masters_and_is_reproducible(precision, twice):
    one, other = twice(text_encoder__learning_rates=(1e-3,), memory__weight_dtype=precision, lora__dropout=0.1)
    assert one == other


def test_out_of_memory_splits_captions_too(place: TinyPlace, tmp_path: Path):
    """The step is repeated in halves, each with its own captions: equal up to rounding."""
    whole, halves = (
        place.run(
            name, steps=1, text_encoder__learning_rates=(1e-3,), train__effective_batch_size=4, data__max_aspect=1.0
        )
        for name in ("a", "b")
    )
    encode, failed = halves.context.texts.encode, []

    def short(captions, known):
        if len(captions) > 2:
            failed.append(len(captions))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(captions, known)

    halves = replace(halves, context=replace(halves.context, texts=replace(halves.context.texts, encode=short)))
    place.train(whole)
    place.train(halves)
    assert failed
    one, other = (outcome(run)["metrics.jsonl"][0]["loss"] for run in (whole, halves))
    assert one == pytest.approx(other, rel=1e-4)


def test_only_new_tokens_are_trained_and_at_their_own_learning_rate(place, tiny_models):
    """Without a LoRA on the text encoders: only the token embeddings, without weight decay."""
    here = replace(place, model=tiny_models("sdxl"))
    words = {
        "textual_inversion__placeholder_tokens": ("<zobo>", "<zub>"),
        "textual_inversion__num_vectors": 3,
        "captions__prefix": "<zobo> <zub> ",
    }
    run = here.run(
        "a",
        steps=2,
        lr_scheduler__warmup_steps=0,
        optimizer__weight_decay=0.5,
        textual_inversion__learning_rate=0.05,
        **words,
    )
    parts = run.context.texts.parts
    before = {
        name: {key: value.clone() for key, value in each.state_dict().items()} for name, each in parts.encoders.items()
    }
    here.train(run)
    own = {name: master for name, master in run.context.adapter.masters.items() if name.startswith("text_encoder")}
    assert sorted(name.partition(".")[0] for name in own) == ["text_encoder", "text_encoder_2"]
    for group in run.context.optimizer.param_groups:
        if any(each is master for each in group["params"] for master in own.values()):
            assert (group["lr"], group["weight_decay"]) == (0.05, 0.0)
    for component, encoder in parts.encoders.items():
        after = encoder.state_dict()
        changed = {key for key, value in after.items() if not torch.equal(value, before[component][key])}
        assert {key.rpartition(".")[2] for key in changed} == {"learned"}
        assert all(
            len(after[key]) == 6 and bool((after[key] != before[component][key]).any(dim=-1).all()) for key in changed
        )
