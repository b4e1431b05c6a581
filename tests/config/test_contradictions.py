"""Contradictory settings: those of the user are a problem, those of a preset are dropped and named."""

from __future__ import annotations

from inspect import isfunction

import pytest

from lora_trainer.config import contradictions
from lora_trainer.config.layers import Layer, Resolved, flattened, resolve
from lora_trainer.config.options import suited
from lora_trainer.core.errors import UsageError

QUALITY = Layer("preset quality", {"lr_scheduler": {"name": "cosine"}, "optimizer": {"learning_rate": 1e-4}})


def user(**settings: object) -> Layer:
    """A layer of `section__key=value`."""
    values: dict[str, dict[str, object]] = {}
    for name, value in settings.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return Layer("--set", values)


CLASHES = [
    ({"optimizer__name": "prodigy"}, {"optimizer__learning_rate": 1e-4}, 1.0),
    ({"optimizer__name": "adamw_schedulefree"}, {"lr_scheduler__name": "cosine"}, "constant_with_warmup"),
    ({"optimizer__name": "adamw_schedulefree"}, {"train__ema_decay": 0.99}, None),
    ({"optimizer__name": "adamw_schedulefree"}, {"train__swa_start": 0.75}, None),
    ({"optimizer__name": "adamw_schedulefree"}, {"optimizer__beta1": 0.0}, 0.9),
    ({"train__swa_start": 100}, {"train__ema_decay": 0.999}, None),
    ({"train__ema_decay": 0.999}, {"train__swa_every_n_steps": 5}, 10),
    ({}, {"train__swa_learning_rate": 1e-5}, None),
    ({"lr_scheduler__name": "cosine"}, {"lr_scheduler__cycle_momentum": True}, False),
    (
        {"optimizer__name": "adafactor", "lr_scheduler__name": "one_cycle"},
        {"lr_scheduler__cycle_momentum": True},
        False,
    ),
    (
        {"lr_scheduler__name": "one_cycle", "lr_scheduler__cycle_momentum": True},
        {"optimizer__beta1": 0.8},
        0.9,
    ),
    ({"lr_scheduler__name": "one_cycle"}, {"lr_scheduler__base_momentum": 0.8}, 0.85),
    (
        {"optimizer__name": "prodigy", "optimizer__learning_rate": 1.0},
        {"optimizer__layer_learning_rates": {"mid_block.*": 0.5}},
        {},
    ),
    (
        {"optimizer__name": "prodigy", "optimizer__learning_rate": 1.0},
        {"optimizer__stochastic_rounding": True},
        False,
    ),
    ({"optimizer__name": "adamw_schedulefree"}, {"optimizer__stochastic_rounding": True}, False),
    ({"memory__weight_dtype": "fp16"}, {"optimizer__stochastic_rounding": True}, False),
    ({}, {"optimizer__gradient_noise_decay": 0.3}, 0.55),
    ({"optimizer__clip_value": 0.5}, {"optimizer__max_grad_norm": 2.0}, 0.0),
    ({}, {"captions__dropout": 1.0}, 0.0),
    ({}, {"captions__dropout_every_n_epochs": 1}, 0),
    ({}, {"captions__tag_dropout": 1.0}, 0.0),
    ({"captions__separator": ";"}, {"captions__keep_tokens_separator": ";"}, None),
    ({"captions__shuffle": True}, {"captions__variants": 1}, 8),
    ({"data__resolutions": (512, 768)}, {"data__resolution": 512}, None),
    ({"validation__every_n_steps": 0}, {"safeguards__reduce_lr_on_plateau": True}, False),
    ({"validation__every_n_steps": 0}, {"safeguards__early_stopping": True}, False),
    ({"validation__split": 0.0}, {"safeguards__early_stopping": True}, False),
    ({"optimizer__name": "adamw_schedulefree"}, {"safeguards__reduce_lr_on_plateau": True}, False),
    ({"validation__agreement": False}, {"safeguards__early_stopping_metric": "agreement"}, "loss"),
    ({"safeguards__early_stopping": True}, {"checkpoint__export_weights": "last"}, "best"),
    (
        {"optimizer__max_grad_norm": 0.0, "safeguards__loss_spike_lr": 1.0},
        {"safeguards__clip_on_loss_spike": True},
        False,
    ),
    ({"data__bucket_no_upscale": True}, {"data__allow_small_images": True}, False),
    ({"train__deterministic": True}, {"hardware__attention_backend": "xformers"}, "sdpa"),
    ({"train__deterministic": True, "compile__enabled": True}, {"compile__mode": "max-autotune"}, "default"),
    ({"train__deterministic": True}, {"hardware__cudnn_benchmark": True}, False),
    ({"memory__gradient_checkpointing": False}, {"memory__checkpointing_mode": "selective"}, "full"),
    ({"compile__enabled": True}, {"memory__checkpointing_mode": "selective"}, "full"),
    ({"compile__enabled": True, "memory__blocks_to_swap": 4}, {"compile__mode": "max-autotune"}, "default"),
    (
        {"compile__enabled": "auto", "memory__offload_activations": True},
        {"compile__mode": "reduce-overhead"},
        "default",
    ),
    ({"memory__fsdp": "full_shard"}, {"memory__blocks_to_swap": 4}, "auto"),
    ({"memory__fsdp": "full_shard"}, {"memory__offload_activations": True}, False),
    ({"memory__fsdp": "shard_grad_op"}, {"train__auto_find_micro_batch_size": True}, False),
    ({"memory__fsdp": "shard_grad_op"}, {"hardware__channels_last": True}, "auto"),
    ({"compile__enabled": True, "memory__fsdp": "full_shard"}, {"compile__mode": "reduce-overhead"}, "default"),
    ({"memory__weight_dtype": "fp8"}, {"memory__int8_matmul": True}, False),
    (
        {"optimizer__name": "prodigy", "optimizer__learning_rate": 1.0},
        {"text_encoder__learning_rates": (1e-4, 0.0, 1.0)},
        (1.0, 0.0, 1.0),
    ),
    ({}, {"text_encoder__learning_rates": (0.0, 0.0)}, ()),
    ({"text_encoder__learning_rates": ()}, {"text_encoder__lora_rank": 4}, None),
    ({"loss__prior_loss_weight": 0.0}, {"data__num_class_images": 8}, 0),
    ({"data__sources": ["a", {"path": "b", "is_reg": True}]}, {"loss__prior_loss_weight": 0.0}, 1.0),
    ({}, {"text_encoder__lora_alpha": 4.0}, None),
    ({"flow__timestep_sampling": "mode"}, {"flow__logit_std": 2.0}, 1.0),
    ({"flow__timestep_sampling": "uniform"}, {"flow__mode_scale": 0.5}, 1.29),
]


def name_of(settings: dict[str, object]) -> str:
    return next(iter(settings)).replace("__", ".")


def test_every_rule_is_checked():
    of_a_rule = {"settings": "Settings", "return": "list[Yields]"}
    functions = {
        each for each in vars(contradictions).values() if isfunction(each) and each.__annotations__ == of_a_rule
    }
    assert functions - {contradictions.contradictions} == set(contradictions.RULES)


@pytest.mark.parametrize(("settings", "other", "value"), CLASHES)
def test_contradictory_user_settings_are_refused(settings, other, value):
    with pytest.raises(UsageError) as caught:
        resolve([user(**settings), user(**other)])
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"{name_of(other)} = ")
    assert "(from --set): " in problem.message
    assert problem.fix


@pytest.mark.parametrize(("settings", "other", "value"), CLASHES)
def test_a_contradictory_preset_setting_is_dropped_and_named(settings, other, value):
    resolved = resolve([Layer("preset some", user(**other).values), user(**settings)])
    assert flattened(resolved.config)[name_of(other)] == value
    assert resolved.origin[name_of(other)].startswith("default")
    (note,) = resolved.notes
    assert note.startswith(f"{name_of(other)} = ")
    assert "(from preset some) becomes " in note


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer__name": "prodigy", "optimizer__learning_rate": 0.5},
        {"optimizer__clip_value": 0.5, "optimizer__max_grad_norm": 0.0},
        {"optimizer__name": "adamw_schedulefree", "lr_scheduler__name": "constant_with_warmup"},
        {"train__ema_decay": 0.999, "lr_scheduler__name": "cosine"},
        {"captions__tag_dropout": 1.0, "captions__keep_tokens": 1},
        {"captions__variants": 1},
        {"optimizer__name": "prodigy", "optimizer__learning_rate": 0.5, "text_encoder__learning_rates": (0.0, 0.5)},
        {"text_encoder__learning_rates": (5e-5,), "text_encoder__lora_rank": 4},
        {"optimizer__name": "lion", "optimizer__learning_rate": 1e-4},
    ],
)
def test_compatible_settings_are_unchanged(settings):
    resolved = resolve([user(**settings)])
    values = flattened(resolved.config)
    assert {name: values[name.replace("__", ".")] for name in settings} == settings
    assert resolved.notes == ()


def test_the_rules_apply_to_captions_of_a_source():
    source = {"path": "a", "captions": {"dropout": 1.0, "shuffle": True, "variants": 1}}
    with pytest.raises(UsageError) as caught:
        resolve([user(data__sources=["b", source])])
    first, second = (problem.message for problem in caught.value.problems)
    assert first.startswith("data.sources[1].captions.dropout = 1.0: every caption would be empty")
    assert second.startswith("data.sources[1].captions.variants = 1: captions.shuffle makes several texts")
    assert resolve([user(data__sources=["b", {**source, "captions": {"shuffle": True}}])]).notes == ()


def test_prodigy_never_takes_a_learning_rate_for_adamw():
    """Neither the default nor that of the built-in model's preset, which is large enough to pass for a factor."""
    for layers in ([], [QUALITY], [Layer("family preset builtin", {"optimizer": {"learning_rate": 0.02}})]):
        assert resolve([*layers, user(optimizer__name="prodigy")]).config.optimizer.learning_rate == 1.0


def test_lion_takes_a_third_of_a_learning_rate_that_is_meant_for_adamw():
    for layers in ([], [QUALITY]):
        resolved = resolve([*layers, user(optimizer__name="lion", textual_inversion__placeholder_tokens=("<zobo>",))])
        assert resolved.config.optimizer.learning_rate == pytest.approx(3.3e-5)
        assert resolved.config.textual_inversion.learning_rate == pytest.approx(3.3e-4)
        rates = [note.partition(" = ")[0] for note in resolved.notes if "learning_rate" in note]
        assert rates == ["optimizer.learning_rate", "textual_inversion.learning_rate"]


def test_a_resolved_config_resolves_to_itself():
    first = resolve([QUALITY, user(optimizer__name="adamw_schedulefree", optimizer__clip_value=0.5)])
    file = Layer("--config run.toml", first.config.model_dump())
    again = resolve([file])
    assert again.config == first.config
    assert again.notes == ()


def with_min_snr(layer: str) -> Resolved:
    return resolve([Layer(layer, {"loss": {"min_snr_gamma": 5.0}})])


def test_a_presets_option_that_the_model_lacks_is_dropped_and_named():
    resolved = suited(with_min_snr("preset balanced"), "flow")
    assert resolved.config.loss.min_snr_gamma is None
    assert resolved.origin["loss.min_snr_gamma"].startswith("default")
    assert "loss.min_snr_gamma = 5.0 (from preset balanced) becomes none" in resolved.notes[0]
    assert suited(with_min_snr("preset balanced"), "epsilon") == with_min_snr("preset balanced")


def test_min_snr_of_a_preset_is_for_models_that_predict_noise():
    dropped = suited(with_min_snr("preset balanced"), "v_prediction")
    assert dropped.config.loss.min_snr_gamma is None
    assert "weights its noisiest timesteps near 0" in dropped.notes[0]
    assert suited(with_min_snr("--set"), "v_prediction") == with_min_snr("--set")
    assert len(suited(with_min_snr("preset balanced"), "flow").notes) == 1


def test_min_snr_gives_way_to_another_weighting():
    preset = Layer("preset balanced", {"loss": {"min_snr_gamma": 5.0}})
    resolved = resolve([preset, user(loss__weighting="debiased")])
    assert resolved.config.loss.min_snr_gamma is None
    with pytest.raises(UsageError, match=r"loss\.weighting=debiased does not use it"):
        resolve([user(loss__weighting="debiased", loss__min_snr_gamma=5.0)])


@pytest.mark.parametrize(("weighting", "prediction"), [("debiased", "flow"), ("v_as_epsilon", "epsilon")])
def test_a_weighting_that_the_model_lacks_is_refused_before_anything_is_cached(weighting, prediction):
    resolved = resolve([user(loss__weighting=weighting)])
    with pytest.raises(
        UsageError, match=rf'loss\.weighting = "{weighting}" \(from --set\): the model predicts {prediction}'
    ):
        suited(resolved, prediction)
    assert suited(resolved, "v_prediction") == resolved


def test_a_users_option_that_the_model_lacks_is_refused():
    with pytest.raises(UsageError, match=r"min_snr_gamma = 5.0 \(from --set\): the model predicts flow"):
        suited(with_min_snr("--set"), "flow")
    zero = resolve([user(noise__zero_terminal_snr=True)])
    with pytest.raises(UsageError, match=r"zero_terminal_snr = true .*predicts velocity"):
        suited(zero, "epsilon")
    assert suited(zero, "v_prediction") == zero


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"noise__offset": 0.05}, "a flow-matching model samples from plain noise"),
        ({"noise__multires_iterations": 4}, "a flow-matching model samples from plain noise"),
        ({"noise__zero_terminal_snr": True}, "only a model that predicts velocity"),
        ({"loss__min_snr_gamma": 5.0}, "signal-to-noise ratio"),
    ],
)
def test_diffusion_only_options_are_refused_on_a_flow_model(settings, reason):
    with pytest.raises(UsageError, match=f"the model predicts flow, and .*{reason}"):
        suited(resolve([user(**settings)]), "flow")


@pytest.mark.parametrize(
    "settings", [{"flow__timestep_sampling": "uniform"}, {"flow__shift": 3.0}, {"flow__logit_mean": 0.5}]
)
def test_flow_timesteps_are_refused_on_a_diffusion_model(settings):
    resolved = resolve([user(**settings)])
    assert suited(resolved, "flow") == resolved
    for prediction in ("epsilon", "v_prediction"):
        with pytest.raises(UsageError, match="timesteps can be chosen only for flow-matching"):
            suited(resolved, prediction)


def test_momentum_does_not_cycle_above_its_maximum():
    cycled = {"lr_scheduler__name": "one_cycle", "lr_scheduler__cycle_momentum": True}
    with pytest.raises(UsageError, match=r"base_momentum = 0\.97 .*base_momentum=0\.97 is above .*max_momentum=0\.95"):
        resolve([user(**cycled, lr_scheduler__base_momentum=0.97)])
    with pytest.raises(UsageError, match=r"max_momentum = 0\.8 .*base_momentum=0\.85 is above .*max_momentum=0\.8"):
        resolve([user(**cycled, lr_scheduler__max_momentum=0.8)])
    assert resolve([user(**cycled, lr_scheduler__base_momentum=0.95)]).config.lr_scheduler.base_momentum == 0.95


def test_a_factor_below_0_is_refused_with_its_pattern():
    with pytest.raises(UsageError, match=r'layer_learning_rates = \{"mid_block\.\*" = -1\.0\} .* must be at least 0'):
        resolve([user(optimizer__layer_learning_rates={"mid_block.*": -1.0})])
    with pytest.raises(UsageError, match="must be a table such as"):
        resolve([user(optimizer__layer_learning_rates=0.5)])
