"""TOML in and out: user mistakes are reported, and a run's config repeats it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.presets import preset_layers
from lora_trainer.config.toml import parse_assignment, read_toml, to_toml
from lora_trainer.core.errors import Problem, UsageError

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
sources = st.fixed_dictionaries(
    {"path": words},
    optional={
        "repeats": st.floats(1e-3, 1e3),
        "is_reg": st.booleans(),
        "resolutions": st.lists(st.integers(32, 4096), max_size=2),
        "captions": st.fixed_dictionaries(
            {}, optional={"shuffle": st.booleans(), "trigger_word": words, "prefix": words}
        ),
    },
)
settings = st.fixed_dictionaries(
    {},
    optional={
        "model": st.fixed_dictionaries({}, optional={"path": words}),
        "data": st.fixed_dictionaries(
            {},
            optional={
                "sources": st.lists(st.one_of(words, sources), max_size=3),
                "resolution": st.integers(32, 4096),
            },
        ),
        "validation": st.fixed_dictionaries({}, optional={"split": st.floats(0, 0.5)}),
        "lora": st.fixed_dictionaries(
            {"target_modules": st.one_of(words, st.lists(words, max_size=2)), "alpha": st.floats(1e-6, 1e6)}
        ),
        "memory": st.fixed_dictionaries(
            {"gradient_checkpointing": st.one_of(st.booleans(), st.just("auto"), st.integers(0, 99))}
        ),
        "optimizer": st.fixed_dictionaries({"learning_rate": st.floats(1e-30, 10)}),
        "loss": st.fixed_dictionaries({"min_snr_gamma": st.just("none")}),
        "run": st.fixed_dictionaries({"name": words, "offline": st.booleans()}),
    },
)


@hypothesis_settings(deadline=None)
@given(settings)
def test_a_written_config_repeats_the_run_over_any_lower_layer(values: dict[str, object]) -> None:
    config = resolve([Layer("file", values)]).config
    below = preset_layers(["12gb,balanced"]).layers
    assert resolve([*below, Layer("config.toml", tomllib.loads(to_toml(config)))]).config == config


def test_malformed_toml_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[lora]\nrank = = 3\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"settings\.toml is not valid TOML.*line 2"):
        read_toml(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_toml(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"[lora]\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_toml(binary)


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "notepad.toml"
    path.write_bytes(b"\xef\xbb\xbf[lora]\r\nrank = 3\r\n")
    assert read_toml(path) == {"lora": {"rank": 3}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lora.rank=8", 8),
        ("optimizer.learning_rate=1e-4", 1e-4),
        ("lora.target_modules=attention+ff", "attention+ff"),
        ('lora.target_modules=["*.to_k", "*.to_q"]', ["*.to_k", "*.to_q"]),
        ("data.allow_small_images=true", True),
        ("model.path=C:\\models\\sd15", "C:\\models\\sd15"),
        ("run.name='a = b'", "a = b"),
        ("loss.min_snr_gamma=", "none"),
        ("run.name=a # b", "a # b"),
    ],
)
def test_assignments(text: str, value: object) -> None:
    parsed = parse_assignment(text)
    assert not isinstance(parsed, Problem)
    assert parsed[2] == value


@pytest.mark.parametrize("text", ["lora.rank", "rank=3", "=3", "lora.=3", "sample.prompts=[a, b", 'run.name="x', ""])
def test_malformed_assignments_are_refused_with_an_example(text: str) -> None:
    problem = parse_assignment(text)
    assert isinstance(problem, Problem)
    assert text in problem.message
    assert problem.fix


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        ("batch_size", "train.effective_batch_size"),
        ("lora_alpha", "lora.alpha"),
        ("optimizer", "optimizer.name"),
        ("rank", "lora.rank"),
    ],
)
def test_what_people_call_a_setting_comes_before_keys_that_are_alike(word: str, setting: str) -> None:
    problem = parse_assignment(f"{word}=4")
    assert isinstance(problem, Problem)
    assert problem.fix.startswith(f"Did you mean {setting}")
