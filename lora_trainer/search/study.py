"""The study of a search: Optuna's SQLite file, with what the search was ordered with. Its functions load Optuna, not torch.

A trial belongs to the process that holds it (`HOLDER`). If that process died, the next claim takes the trial over, with the
values that it has; so no trial is lost, and none counts twice. Samplers are seeded by the number of the trial: with one
worker, a search that was stopped suggests the same as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock

from lora_trainer.config.toml import shown
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.imports import why_unusable
from lora_trainer.core.randomness import position_key, position_uniform
from lora_trainer.jobs.folders import Shared, shared_from_json
from lora_trainer.jobs.job_state import MOST_DEATHS, is_dead, this_process
from lora_trainer.search.space import Parameter, Scalar, Space, describe, grid_of, space_from_json

if TYPE_CHECKING:
    from optuna.distributions import CategoricalChoiceType
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

STUDY_FILE, CLAIM_LOCK, STUDY_NAME = "study.db", ".claim.lock", "search"
SAMPLERS = {"tpe": 50, "random": 20, "grid": None}  # and the usual number of trials; a grid has its own
PRUNERS = ("hyperband", "median", "none")
OBJECTIVES = {"validation": "validation loss", "verdict": "LoRA score"}
STARTUP_TRIALS = 10  # of TPE, drawn at random
FIRST_STAGE, LAST_STAGE, REDUCTION = 11, 100, 3  # of Hyperband, in percent of a run: stages at 11, 33 and 99
FULL_BEFORE_MEDIAN = 5  # complete trials before the median prunes
TOGETHER = "together"  # attribute of the study: trials that a process trains on one base
# Attributes of trials in the study.
HOLDER, DEATHS, ENDED, REASON, STEPS, SECONDS = "holder", "deaths", "ended", "reason", "steps", "seconds"
TrialState = Literal["complete", "pruned", "failed", "running"]


@dataclass(frozen=True)
class SearchPlan:
    """What must stay the same when a search continues, and the layers of settings that its trials share.

    `settings` are all settings of the trials but those searched, by name; `defaults` are the values of those without a
    search, and `for_trials` the settings that the search itself sets.
    """

    space: Space
    sampler: str
    pruner: str
    objective: str
    seed: int
    shared: Shared
    settings: Mapping[str, Any]
    for_trials: Mapping[str, Mapping[str, Any]]
    defaults: Mapping[str, Any]

    @property
    def maximizes(self) -> bool:
        return self.objective == "verdict"

    def to_json(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name)
            for name in ("sampler", "pruner", "objective", "seed", "settings", "for_trials", "defaults")
        }
        return {**plain, "space": [asdict(each) for each in self.space], "shared": self.shared.to_json()}


def plan_from_json(document: Mapping[str, Any]) -> SearchPlan:
    return SearchPlan(
        **{**document, "space": space_from_json(document["space"]), "shared": shared_from_json(document["shared"])}
    )


@dataclass(frozen=True)
class TrialRow:
    """A trial as the search's files and pages have it. `value` is that of the objective, None without one."""

    number: int
    state: TrialState
    value: float | None
    values: Mapping[str, Scalar]
    reason: str = ""
    steps: int = 0
    seconds: float = 0.0
    losses: Mapping[int, float] = field(default_factory=dict)  # by percent of the run, as the pruner sees them

    @property
    def name(self) -> str:
        """Of its run's folder."""
        return f"{self.number:04d}"


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna without its messages about trials. Raises UsageError where it cannot be used."""
    if (reason := why_unusable("optuna")) is not None:
        raise UsageError(
            Problem("library_missing", f"A search needs Optuna, which {reason}.", "pip install 'lora-trainer[search]'")
        )
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def open_study(folder: Path, plan: SearchPlan | None = None) -> Study:
    """The study in a folder; with a plan it is created where it is missing."""
    import optuna
    from sqlalchemy.engine import URL

    url = URL.create("sqlite", database=str((folder / STUDY_FILE).resolve())).render_as_string()
    storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60.0}})
    if plan is None:
        return optuna.load_study(study_name=STUDY_NAME, storage=storage)
    direction: Literal["maximize", "minimize"] = "maximize" if plan.maximizes else "minimize"
    return optuna.create_study(study_name=STUDY_NAME, storage=storage, direction=direction, load_if_exists=True)


def keep_plan(study: Study, plan: SearchPlan, trials: int) -> None:
    """Keep the plan and the number of trials in the study."""
    study.set_user_attr("plan", plan.to_json())
    study.set_user_attr("trials", trials)


def kept_plan(study: Study) -> SearchPlan | None:
    """The plan that `keep_plan` kept; None for a search that was killed before."""
    kept = study.user_attrs.get("plan")
    return None if kept is None else plan_from_json(kept)


def plan_differences(before: SearchPlan, now: SearchPlan) -> list[str]:
    """What a search cannot continue with: `--sampler tpe → random`, with the old and the new value."""
    found = [
        f"--{name} {getattr(before, name)} → {getattr(now, name)}"
        for name in ("sampler", "pruner", "objective", "seed")
        if getattr(before, name) != getattr(now, name)
    ]
    spaces = [{each.setting: describe(each) for each in plan.space} for plan in (before, now)]
    settings = [{**plan.defaults, **plan.settings} for plan in (before, now)]
    for kind, (old, new) in (("space: ", spaces), ("", settings)):
        for name in dict.fromkeys((*old, *new)):
            if old.get(name) != new.get(name):
                texts = [
                    ("not there" if name not in side else side[name] if kind else shown(side[name]))
                    for side in (old, new)
                ]
                found.append(f"{kind}{name} {texts[0]} → {texts[1]}")
    return found


def make_sampler(plan: SearchPlan, *position: int | str) -> BaseSampler:
    """A sampler whose random numbers depend on the seed and a position only."""
    from optuna.samplers import RandomSampler, TPESampler

    seed = position_key(plan.seed, "search", *position) % 2**32
    if plan.sampler == "tpe":
        return TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
    return RandomSampler(seed=seed)


def make_pruner(plan: SearchPlan) -> BasePruner:
    """A pruner over percents of a run, so that trials of other lengths can be compared."""
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    if plan.pruner == "hyperband":
        return HyperbandPruner(FIRST_STAGE, LAST_STAGE, REDUCTION)
    if plan.pruner == "median":
        return MedianPruner(n_startup_trials=FULL_BEFORE_MEDIAN, n_warmup_steps=FIRST_STAGE)
    return NopPruner()


def claim_trial(folder: Path, study: Study, plan: SearchPlan) -> Trial | None:
    """A trial for this process, with all of its values: one whose process died, else a new one; None when none is left."""
    from optuna.trial import Trial, TrialState

    study.pruner = make_pruner(plan)
    with FileLock(folder / CLAIM_LOCK):
        for lost in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            holder, deaths = lost.user_attrs.get(HOLDER), lost.user_attrs.get(DEATHS, 0)
            if holder and not is_dead(holder, math.inf):
                continue
            if holder and deaths + 1 >= MOST_DEATHS:
                fail_trial(Trial(study, lost._trial_id), f"Its process died {deaths + 1} times without a word.")
                continue
            trial = Trial(study, lost._trial_id)
            trial.set_user_attr(DEATHS, deaths + bool(holder))
            return hold(plan, trial)
        waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        number = waiting[0].number if waiting else len(study.get_trials(deepcopy=False))
        if number >= study.user_attrs["trials"]:
            return None
        if plan.sampler == "grid" and not waiting:
            # In an order that depends on the seed: the first of them are spread over the grid.
            rows = grid_of(plan.space)
            rows.sort(key=lambda row: position_uniform(plan.seed, "grid", *map(str, row.values())))
            study.enqueue_trial(rows[number])
        return hold(plan, study.ask())


def hold(plan: SearchPlan, trial: Trial) -> Trial:
    """Give a trial its values, in the order of the space, and this process as its holder."""
    chosen: dict[str, Any] = {}
    trial.study.sampler = make_sampler(plan, trial.number)
    trial.relative_params  # noqa: B018  drawn here, from this sampler: a trial that is taken over may have values already
    for parameter in plan.space:
        if parameter.is_active(chosen):
            trial.study.sampler = make_sampler(plan, trial.number, parameter.setting)
            chosen[parameter.setting] = suggest(trial, parameter)
    trial.set_user_attr(HOLDER, this_process())
    return trial


def suggest(trial: Trial, parameter: Parameter) -> CategoricalChoiceType:
    if parameter.choices:
        return trial.suggest_categorical(parameter.setting, parameter.choices)
    low, high, step = parameter.low, parameter.high, parameter.step
    if step:  # Optuna warns of a range that its steps do not divide
        high = low + math.floor((high - low) / step + 1e-9) * step
    if parameter.whole:
        return trial.suggest_int(parameter.setting, int(low), int(high), step=int(step or 1), log=parameter.log)
    return trial.suggest_float(parameter.setting, low, high, step=step, log=parameter.log)


def release_trial(trial: Trial) -> None:
    """Let another process take over a trial that was stopped by a signal."""
    trial.set_user_attr(HOLDER, "")


def fail_trial(trial: Trial, reason: str) -> None:
    """End a trial without a value."""
    from optuna.trial import TrialState

    trial.set_user_attr(REASON, reason)
    trial.study.tell(trial.number, state=TrialState.FAIL)


def read_trials(study: Study) -> list[TrialRow]:
    """All trials, by number."""
    return [row_of_trial(each) for each in study.get_trials(deepcopy=False) if each.state.name != "WAITING"]


def row_of_trial(trial: FrozenTrial) -> TrialRow:
    states: dict[str, TrialState] = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
    notes, state = trial.user_attrs, states[trial.state.name]
    return TrialRow(
        number=trial.number,
        state=state,
        value=trial.value if state == "complete" else None,
        values=dict(trial.params),
        reason=notes.get(REASON, ""),
        steps=notes.get(STEPS, 0),
        seconds=notes.get(SECONDS, 0.0),
        losses={step: value for step, value in trial.intermediate_values.items() if math.isfinite(value)},
    )


def best_trial(rows: list[TrialRow], plan: SearchPlan) -> TrialRow | None:
    """The complete trial with the best value; of equal ones the first."""
    sign = -1.0 if plan.maximizes else 1.0
    known = [(sign * row.value, row.number, row) for row in rows if row.state == "complete" and row.value is not None]
    return min(known)[2] if known else None
