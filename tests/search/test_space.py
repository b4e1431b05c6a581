"""The search space: every mistake at once, conditions, and the grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_trainer.core.errors import UsageError
from lora_trainer.search.space import DEFAULT_SPACE, grid_of, read_space

CONDITIONAL = """
[parameters."optimizer.weight_decay"]
choices = [0.0, 0.1]
when = {"optimizer.name" = ["adamw", "adamw8bit"]}

[parameters."optimizer.name"]
choices = ["adamw", "lion"]

[parameters."train.effective_batch_size"]
type = "int"
low = 1
high = 4
step = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "space.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        read_space(write(folder, text))
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def test_the_default_space_is_that_of_the_documentation():
    found = {each.setting: each for each in read_space(DEFAULT_SPACE)}
    assert set(found) == {"optimizer.learning_rate", "lora.rank", "lora.dropout", "optimizer.weight_decay"}
    rate, decay = found["optimizer.learning_rate"], found["optimizer.weight_decay"]
    assert (rate.low, rate.high, rate.log) == (decay.low, decay.high, decay.log) == (1e-5, 1e-2, True)
    assert (found["lora.dropout"].low, found["lora.dropout"].high) == (0.1, 0.5)


def test_every_mistake_is_named_at_once(tmp_path):
    found = problems_of(
        tmp_path,
        """
        [parameters."optimizer.learning_rte"]
        choices = [1.0]
        [parameters."optimizer.weight_decay"]
        type = "float"
        low = 1e-2
        high = 1e-5
        [parameters."lora.rank"]
        choices = [4, 99999]
        [parameters."lora.dropout"]
        type = "float"
        low = 0.0
        high = 0.5
        lag = true
        [parameters."validation.split"]
        choices = [0.1, 0.2]
        [parameters."optimizer.beta2"]
        choices = [0.9]
        when = {"optimizer.nme" = "adamw", "lora.dropout" = 1}
        [parameters.train.max_steps]
        choices = [1]
        [parameters."lora.alpha"]
        type = "int"
        low = 1.5
        [parameters."loss.min_snr_gamma"]
        type = "float"
        low = 0
        high = 5
        log = true
        step = 1
        """,
    )
    expected = (
        "optimizer.learning_rte is not a setting. Did you mean optimizer.learning_rate",
        "optimizer.weight_decay: low is 0.01 and high is 1e-5.",
        "lora.rank = 99999 (from",
        "lora.dropout.lag is not known. Did you mean log?",
        "validation.split cannot be searched",
        'the name needs quotes, since it has a dot: [parameters."train.max_steps"]',
        "lora.alpha.low is 1.5, must be a whole number.",
        "lora.alpha has no high.",
        "loss.min_snr_gamma: low is 0 and log is true.",
        "loss.min_snr_gamma has step and log.",
        "names optimizer.nme, which is not a parameter of this space.",
    )
    for text in expected:
        assert any(text.lower() in problem.lower() for problem in found), text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no parameters"),
        ("[parameter.x]\nlow = 1", "parameter is not known. Did you mean parameters?"),
        ('[parameters."lora.rank"]\nlow = 1\nhigh = 2', "has no type"),
        ('[parameters."lora.rank"]\nchoices = []', "must be a list"),
        ('[parameters."lora.rank"]\nchoices = [4, 4]', "has a value twice"),
        ('[parameters."train.seed"]\nchoices = [1, 2]', "cannot be searched"),
        (CONDITIONAL.replace('["adamw", "adamw8bit"]}', '"sgd"}'), "optimizer.name is never"),
    ],
)
def test_a_mistake_has_its_reason(text, reason, tmp_path):
    assert any(reason in problem for problem in problems_of(tmp_path, text))


def test_conditions_that_are_a_circle_are_refused(tmp_path):
    text = '[parameters."lora.rank"]\nchoices = [4]\nwhen = {"lora.type" = "lora"}\n'
    text += '[parameters."lora.type"]\nchoices = ["lora"]\nwhen = {"lora.rank" = 4}\n'
    assert "a circle" in problems_of(tmp_path, text)[0]


def test_a_grid_has_conditional_parameters_only_where_they_are_active(tmp_path):
    space = read_space(write(tmp_path, CONDITIONAL.replace(', "adamw8bit"', "")))
    assert [each.setting for each in space][-1] == "optimizer.weight_decay", "after the parameter that it depends on"
    rows = grid_of(space)
    assert len(rows) == 2 * (2 + 1)
    assert [row.get("optimizer.weight_decay", "none") for row in rows if row["optimizer.name"] == "lion"] == [
        "none"
    ] * 2
    assert {row["train.effective_batch_size"] for row in rows} == {1, 3}


def test_a_range_without_steps_has_no_grid():
    with pytest.raises(UsageError, match="learning_rate is a range"):
        grid_of(read_space(DEFAULT_SPACE))
