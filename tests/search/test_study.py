"""The study: the same trials however often the process dies, none lost, none counted twice. Nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from lora_trainer.jobs.folders import Shared
from lora_trainer.jobs.job_state import this_process
from lora_trainer.search import study as studies
from lora_trainer.search.space import Parameter
from lora_trainer.search.study import (
    SearchPlan,
    best_trial,
    claim_trial,
    keep_plan,
    kept_plan,
    open_study,
    plan_differences,
    read_trials,
    release_trial,
)

SPACE = (
    Parameter("optimizer.learning_rate", low=1e-5, high=1e-2, log=True),
    Parameter("optimizer.name", choices=("adamw", "lion")),
    Parameter("optimizer.weight_decay", low=1e-5, high=1e-2, log=True, when={"optimizer.name": ("adamw",)}),
    Parameter("lora.rank", low=4, high=64, step=4, whole=True),
)


def make_plan(sampler: str = "tpe", **changed: Any) -> SearchPlan:
    values = {"pruner": "none", "objective": "validation", "seed": 42, "settings": {}, "for_trials": {}, "defaults": {}}
    return SearchPlan(**{"space": SPACE, "sampler": sampler, "shared": Shared((), ()), **values, **changed})


def loss_of(values: dict[str, Any]) -> float:
    return (values["optimizer.learning_rate"] - 1e-3) ** 2 + values["lora.rank"] / 1e4


def begin(folder: Path, plan: SearchPlan, trials: int) -> None:
    folder.mkdir()
    keep_plan(open_study(folder, plan), plan, trials)


def search(folder: Path, plan: SearchPlan, until: int = 99) -> None:
    """Claim and end trials as one process does, up to a number of trials."""
    study = open_study(folder)
    while len(read_trials(study)) < until and (trial := claim_trial(folder, study, plan)) is not None:
        study.tell(trial.number, loss_of(trial.params))


def values_in(folder: Path) -> list[tuple[Any, ...]]:
    return [(row.number, row.state, row.value, dict(row.values)) for row in read_trials(open_study(folder))]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_that_was_killed_suggests_the_same(sampler, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "STARTUP_TRIALS", 3)  # so that TPE's own suggestions are among seven
    plan = make_plan(sampler)
    begin(tmp_path / "whole", plan, 7)
    search(tmp_path / "whole", plan)
    begin(tmp_path / "killed", plan, 7)
    search(tmp_path / "killed", plan, until=4)
    host, number, started, machine = json.loads(this_process())
    with monkeypatch.context() as dead:
        dead.setattr(studies, "this_process", lambda: json.dumps([host, number, started - 1000, machine]))
        lost = claim_trial(tmp_path / "killed", open_study(tmp_path / "killed"), plan)
    assert lost is not None
    assert lost.number == 4
    search(tmp_path / "killed", plan)
    assert values_in(tmp_path / "killed") == values_in(tmp_path / "whole")
    assert len({json.dumps(values, sort_keys=True) for _, _, _, values in values_in(tmp_path / "whole")}) == 7


def test_a_trial_of_a_living_process_is_left_alone_and_a_released_one_is_not(tmp_path):
    plan = make_plan("random")
    begin(tmp_path / "a", plan, 2)
    study = open_study(tmp_path / "a")
    first, second = claim_trial(tmp_path / "a", study, plan), claim_trial(tmp_path / "a", study, plan)
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (0, 1)
    assert claim_trial(tmp_path / "a", study, plan) is None, "no more than --trials"
    release_trial(second)
    again = claim_trial(tmp_path / "a", study, plan)
    assert again is not None
    assert (again.number, again.params) == (1, second.params)


def test_a_trial_that_kills_each_process_fails_in_the_end(tmp_path, monkeypatch):
    plan = make_plan("random")
    begin(tmp_path / "a", plan, 2)
    host, number, started, machine = json.loads(this_process())
    monkeypatch.setattr(studies, "this_process", lambda: json.dumps([host, number, started - 1000, machine]))
    claimed = [claim_trial(tmp_path / "a", open_study(tmp_path / "a"), plan) for _ in range(4)]
    assert [trial.number for trial in claimed if trial is not None] == [0, 0, 0, 1]
    first, second = read_trials(open_study(tmp_path / "a"))
    assert (first.state, second.state) == ("failed", "running")
    assert first.reason == "Its process died 3 times without a word."


def test_a_grid_trains_each_combination_once(tmp_path):
    space = (Parameter("lora.rank", choices=(4, 8)), Parameter("optimizer.name", choices=("adamw", "lion")), SPACE[2])
    space = (*space[:2], Parameter("lora.dropout", choices=(0.1, 0.2), when={"optimizer.name": ("lion",)}))
    plan = make_plan("grid", space=space)
    begin(tmp_path / "a", plan, 6)
    study = open_study(tmp_path / "a")
    while (trial := claim_trial(tmp_path / "a", study, plan)) is not None:
        study.tell(trial.number, 1.0)
    values = [json.dumps(row.values, sort_keys=True) for row in read_trials(study)]
    assert len(values) == len(set(values)) == 6
    assert sum("lora.dropout" in each for each in values) == 4


def test_the_best_trial_is_that_of_the_objectives_direction(tmp_path):
    for objective, best in (("validation", 1), ("verdict", 2)):
        plan = make_plan("random", objective=objective)
        begin(tmp_path / objective, plan, 3)
        study = open_study(tmp_path / objective)
        for value in (0.5, 0.1, 0.9):
            trial = claim_trial(tmp_path / objective, study, plan)
            assert trial is not None
            study.tell(trial.number, value)
        found = best_trial(read_trials(study), plan)
        assert found is not None
        assert found.number == best


def test_what_changed_is_named(tmp_path):
    plan = make_plan(settings={"train.max_steps": 10})
    begin(tmp_path / "a", plan, 3)
    kept = kept_plan(open_study(tmp_path / "a"))
    assert kept == plan
    other = make_plan(
        "random",
        space=(Parameter("optimizer.learning_rate", low=1e-4, high=1e-2, log=True), *SPACE[1:3]),
        settings={"train.max_steps": 20},
    )
    assert plan_differences(kept, other) == [
        "--sampler tpe → random",
        "space: optimizer.learning_rate 1e-5 to 0.01, log → 0.0001 to 0.01, log",
        "space: lora.rank 4 to 64, step 4 → not there",
        "train.max_steps 10 → 20",
    ]
