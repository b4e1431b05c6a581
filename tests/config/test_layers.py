"""Layers become one config: later wins, origins are kept, all problems are reported at once."""

from __future__ import annotations

import pytest

from lora_trainer.config.layers import Layer, flattened, resolve
from lora_trainer.config.schema import Config
from lora_trainer.config.toml import setting_names
from lora_trainer.core.errors import Problem, UsageError


def problems_of(*layers: Layer) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(layers)
    return str(caught.value)


def test_no_layers_give_the_defaults() -> None:
    resolved = resolve([])
    assert resolved.config == Config()
    assert set(resolved.origin.values()) == {"default"}
    assert list(resolved.origin) == setting_names() == list(flattened(Config()))
    assert "validation.every_n_steps" in resolved.origin  # the key, not the field's name


def test_the_later_layer_wins_and_is_named() -> None:
    file = Layer("a.toml", {"lora": {"rank": 8, "alpha": 4}, "validation": {"every_n_steps": 7}})
    resolved = resolve([Layer("preset 12gb", {"lora": {"rank": 64}}), file, Layer("--set", {"lora": {"alpha": 2}})])
    assert (resolved.config.lora.rank, resolved.config.lora.alpha) == (8, 2.0)
    assert resolved.config.validation.every_n_steps == 7
    assert resolved.origin["lora.rank"] == "a.toml"
    assert resolved.origin["lora.alpha"] == "--set"
    assert resolved.origin["lora.dropout"] == "default"


def test_every_problem_of_every_layer_is_reported_at_once() -> None:
    text = problems_of(
        Layer("a.toml", {"optimizer": {"learning_rte": 1e-3}, "sampel": {"count": 1}}),
        Layer("--set", {"optimizer": {"learning_rate": 20}, "lora": {"rank": 1.5}}),
    )
    assert "optimizer.learning_rte (from a.toml) is not a setting. Did you mean optimizer.learning_rate or" in text
    assert "sampel (from a.toml) is not a section. Did you mean sample?" in text
    assert "optimizer.learning_rate = 20 (from --set): must be at most 10." in text
    assert "lora.rank = 1.5 (from --set): must be a whole number." in text
    assert len(text.splitlines()) == 4


def test_a_wrong_value_is_reported_even_if_a_later_layer_overrides_it() -> None:
    assert "lora.rank = 0 (from a.toml): must be at least 1." in problems_of(
        Layer("a.toml", {"lora": {"rank": 0}}), Layer("--set", {"lora": {"rank": 4}})
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("lora", "rank", "16", 'lora.rank = "16" (from f): must be a whole number.'),
        ("lora", "rank", True, "lora.rank = true (from f): must be a whole number."),
        ("lora", "dropout", 1.0, "lora.dropout = 1.0 (from f): must be less than 1."),
        ("lora", "target_modules", 3, 'must be text or a list such as ["a", "b"].'),
        ("optimizer", "learning_rate", 0, "must be more than 0."),
        ("optimizer", "weight_decay", float("nan"), "must be"),
        ("optimizer", "name", "adam8bit", "Did you mean adamw8bit"),
        (
            "memory",
            "gradient_checkpointing",
            "aut",
            "must be true or false or one of auto or a whole number. Did you mean auto?",
        ),
        ("memory", "gradient_checkpointing", -1, "must be true or false or one of auto or at least 0."),
        ("data", "allow_small_images", "yes", "must be true or false."),
        ("data", "sources", ["a", 1], "must be a list of paths or tables."),
        ("sample", "strengths", [1.0, 9.0], "sample.strengths = [1.0, 9.0] (from f): 9.0 must be at most 4."),
        ("sample", "prompts", 3, "sample.prompts = [3] (from f): 3 must be text."),
        ("sample", "prompts", "none", 'must be a list such as ["none"].'),
        (
            "text_encoder",
            "learning_rates",
            True,
            "text_encoder.learning_rates = [true] (from f): true must be a number.",
        ),
        ("text_encoder", "learning_rates", [5e-5, 99e9, -1e-7], "[5e-5, 99000000000.0, -1e-7] (from f): -1e-7 must be"),
        ("text_encoder", "learning_rates", [-1], "text_encoder.learning_rates = [-1] (from f): -1 must be at least 0."),
        ("hardware", "text_encoder_device", "gpu", "(from f): must be auto, cpu, or a GPU such as cuda:1."),
        ("data", "resolutions", "x", '"x" must be a whole number.'),
        ("run", "output", "none", ""),
    ],
)
def test_wrong_values_are_explained_plainly(section: str, key: str, value: object, expected: str) -> None:
    layer = Layer("f", {section: {key: value}})
    if not expected:
        assert flattened(resolve([layer]).config)[f"{section}.{key}"] == value
    else:
        assert expected in problems_of(layer)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("text_encoder.learning_rates", 5e-5, (5e-5,)),
        ("textual_inversion.placeholder_tokens", "<zobo>", ("<zobo>",)),
        ("sample.prompts", "a cat", ("a cat",)),
        ("sample.strengths", 0.5, (0.5,)),
        ("data.resolutions", 512, (512,)),
        ("data.resolutions", [], ()),
        ("lora.target_modules", "attention", "attention"),
    ],
)
def test_a_lone_value_is_a_list_of_one(name: str, value: object, expected: object) -> None:
    section, key = name.split(".")
    assert flattened(resolve([Layer("--set", {section: {key: value}})]).config)[name] == expected


def test_a_lone_folder_is_the_data() -> None:
    config = resolve([Layer("--set", {"data": {"sources": "images"}})]).config
    assert [source.path for source in config.data.sources] == ["images"]


def test_a_setting_without_its_section_is_shown_with_it() -> None:
    assert "Did you mean optimizer.learning_rate or textual_inversion.learning_rate?" in problems_of(
        Layer("f", {"learning_rate": 1e-3})
    )
    assert "lora is a section" in problems_of(Layer("f", {"lora": 3})).replace(" (from f)", "")
    assert "Did you mean lora.rank?" in problems_of(Layer("f", {"optimizer": {"rank": 3}}))


def test_steps_and_epochs_contradict() -> None:
    text = problems_of(Layer("a.toml", {"train": {"max_epochs": 3}}), Layer("--max-steps", {"train": {"max_steps": 9}}))
    assert "train.max_steps = 9 (from --max-steps)" in text
    assert "train.max_epochs = 3 (from a.toml)" in text


def test_none_empties_a_setting_that_can_be_empty() -> None:
    below = Layer("preset balanced", {"loss": {"min_snr_gamma": 5.0}, "train": {"max_epochs": 2}})
    above = Layer("--set", {"loss": {"min_snr_gamma": "none"}, "train": {"max_epochs": "none", "max_steps": 3}})
    resolved = resolve([below, above])
    assert resolved.config.loss.min_snr_gamma is None
    assert resolved.config.train.max_steps == 3
    assert resolved.origin["loss.min_snr_gamma"] == "--set"
    assert (
        resolve([Layer("f", {"memory": {"gradient_checkpointing": False}})]).config.memory.gradient_checkpointing
        is False
    )
    assert resolve([Layer("f", {"model": {"path": "none"}})]).config.model.path is None
    assert resolve([Layer("f", {"model": {"path": "./none"}})]).config.model.path == "./none"
    assert "must be a whole number" in problems_of(Layer("f", {"lora": {"rank": "none"}}))


def test_problems_found_before_come_first() -> None:
    with pytest.raises(UsageError) as caught:
        resolve([Layer("f", {"lora": {"rank": 0}})], [Problem("planted", "Unknown flag --lr.")])
    assert [problem.message[:12] for problem in caught.value.problems] == ["Unknown flag", "lora.rank = "]


def test_the_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        resolve([]).config.lora.rank = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"path": "a", "repeat": 3},
            "data.sources, table 2 (a): repeat (from f) is not a setting. Did you mean repeats",
        ),
        ({"repeats": 3}, 'data.sources, table 2: path is missing (from f). For example: path = "images".'),
        ({"path": "a", "repeats": 0}, "data.sources, table 2 (a): repeats = 0 (from f): must be more than 0."),
        ({"path": "a", "crop": "centre"}, 'crop = "centre" (from f): must be one of center or random. Did you mean'),
        (
            {"path": "a", "captions": {"shufle": True}},
            "captions.shufle (from f) is not a setting. Did you mean shuffle?",
        ),
        ({"path": "a", "captions": {"dropout": 2}}, "table 2 (a): captions.dropout = 2 (from f): must be at most 1."),
        ({"path": "a", "captions": 3}, "captions = 3 (from f): must be a table, such as {shuffle = true}."),
        ({"path": "a", "resolutions": ["x"]}, 'resolutions = ["x"] (from f): "x" must be a whole number.'),
    ],
)
def test_problems_of_a_source_name_its_table(source: dict[str, object], expected: str) -> None:
    assert expected in problems_of(Layer("f", {"data": {"sources": ["images", source]}}))


def test_lists_inside_of_a_source_are_read() -> None:
    source = {"path": "a", "resolutions": [512, 768], "captions": {"shuffle": True}}
    (read,) = resolve([Layer("f", {"data": {"sources": [source]}})]).config.data.sources
    assert read.resolutions == (512, 768)
    assert read.captions is not None
    assert read.captions.shuffle


def test_a_path_that_is_not_utf_8_is_named() -> None:
    message = problems_of(Layer("--data", {"data": {"sources": ["good", "caf\udce9"]}}))
    assert "table 2" in message
    assert "UTF-8" in message
