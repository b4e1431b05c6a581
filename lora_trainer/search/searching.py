"""A search from start to end: check, create or continue the study, train the trials, confirm the best, write what was found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.contradictions import from_user
from lora_trainer.config.layers import Resolved, flattened, with_values
from lora_trainer.config.resuming import CHANGES_NOTHING
from lora_trainer.config.toml import shown
from lora_trainer.core.errors import DONE, SIGNALED, TRAINING_FAILED, Problem, UsageError, gathering
from lora_trainer.core.findings import counted
from lora_trainer.core.interrupt import Stopped, listening
from lora_trainer.core.intervals import FEWEST_VALUES, MOST_VALUES
from lora_trainer.core.launch import launched
from lora_trainer.data.split import FEWEST_COMPARED
from lora_trainer.jobs.executors.local import be_worker, kept_families, run_processes
from lora_trainer.jobs.joint_jobs import settings_against
from lora_trainer.models.families import FAMILIES
from lora_trainer.monitor.progress_line import duration
from lora_trainer.optim.optimizers import OPTIMIZERS
from lora_trainer.run.inputs import Inputs, read_inputs, with_absolute_paths
from lora_trainer.run.messages import announce
from lora_trainer.run.order import plain_console, run_folder
from lora_trainer.run.settings import with_installed_libraries
from lora_trainer.run.train import refuse_data
from lora_trainer.run_folder.lock import LOCKS, locked
from lora_trainer.run_folder.record import Record
from lora_trainer.search.confirm import Confirmation, confirm
from lora_trainer.search.outcome import write_outcome
from lora_trainer.search.search_page import write_page
from lora_trainer.search.space import Space, describe, grid_of
from lora_trainer.search.study import (
    DEATHS,
    OBJECTIVES,
    REASON,
    SAMPLERS,
    SECONDS,
    STEPS,
    STUDY_FILE,
    TOGETHER,
    SearchPlan,
    TrialRow,
    best_trial,
    claim_trial,
    fail_trial,
    keep_plan,
    kept_plan,
    open_study,
    plan_differences,
    plan_from_json,
    quiet_optuna,
    read_trials,
    release_trial,
)
from lora_trainer.search.trials import (
    TRIALS,
    SearchRun,
    TrialEnd,
    pruning,
    run_trials,
    trial_settings,
    values_layer,
)

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial
    from rich.console import Console

    from lora_trainer.jobs.folders import Shared
    from lora_trainer.models.family import Family

SHARE_OF_FEW = 0.25  # of fewer images than a run splits by itself
ENDING = "-search"  # of the default name


@dataclass(frozen=True)
class SearchOrder:
    """A search as it was ordered. `trials` is None for the sampler's usual number; `confirmation` for none.

    Each of `jobs` processes trains as many trials `together` on one base model.
    """

    shared: Shared
    resolved: Resolved
    space: Space
    sampler: str = "tpe"
    pruner: str = "hyperband"
    objective: str = "validation"
    trials: int | None = None
    jobs: int = 1
    together: int = 1
    confirmation: Confirmation | None = None

    @property
    def folder(self) -> Path:
        """OUTPUT/NAME; the default name is that of a run with `-search` after it."""
        folder = run_folder(self.resolved.config)
        return folder if self.resolved.config.run.name else folder.with_name(folder.name + ENDING)


def run_search(order: SearchOrder, console: Console) -> int:
    """Train the trials that are left; 5 where every trial failed.

    Raises UsageError, all problems at once, before anything is trained; Stopped for a signal, with everything saved.
    """
    trials = check_order(order)
    with quiet_optuna(), listening():
        announce(order.resolved.config, console)
        inputs, for_trials = read_for_trials(order, console)
        plan = make_plan(order, for_trials, inputs.manifest.data_hash)
        folder = order.folder
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "Wait for it, or choose another --name."):
            study = open_study(folder, plan)
            continue_or_refuse(folder, study, plan, trials)
            study.set_user_attr(TOGETHER, order.together)
            show_plan(order, plan, trials, inputs, console)
            write_outcome(folder, study, plan)
            try:
                train_trials(folder, study, order.jobs, console)
                best, confirmed = best_trial(read_trials(study), plan), None
                if order.confirmation is not None and best is not None:
                    confirmed = confirm(folder, plan, best, order.confirmation, inputs, console)
            except (KeyboardInterrupt, SystemExit):
                ended = sum(row.state != "running" for row in read_trials(study))
                console.print(
                    f"stopped, {ended} of {trials} trials have ended and are kept. The same command continues."
                )
                raise
            write_page(folder, study, plan, write_outcome(folder, study, plan, confirmed))
            return show_outcome(folder, read_trials(study), plan, console)


def check_order(order: SearchOrder) -> int:
    """The number of trials. Raises UsageError with all that is wrong with the order as a whole."""
    problems: list[Problem] = []
    grid = list[Mapping[str, Any]]()
    if order.sampler == "grid":
        with gathering(problems):
            grid = list(grid_of(order.space))
    trials = order.trials or SAMPLERS[order.sampler] or len(grid)
    if grid and trials > len(grid):
        message = f"--trials is {trials}, but the grid has {counted(len(grid), 'combination')}."
        problems.append(Problem("trials_exceed_grid", message, "Leave --trials out to train all of them."))
    for flag, value in (("--trials", order.trials), ("--jobs", order.jobs), ("--together", order.together)):
        if value is not None and value < 1:
            problems.append(Problem("value_out_of_range", f"{flag} is {value}, must be at least 1.", "Set 1 or more."))
    problems.extend(wrong_settings(order))
    if launched():
        message = "A search cannot be started by accelerate launch."
        problems.append(
            Problem(
                "launch_unsupported",
                message,
                "Start it with lora-trainer search; --jobs trains several trials at once.",
            )
        )
    if order.confirmation is not None:
        pairs = order.confirmation.pairs
        if not FEWEST_VALUES <= pairs <= MOST_VALUES:
            message = f"--confirm is {pairs}, must be {FEWEST_VALUES} to {MOST_VALUES}."
            problems.append(Problem("confirm_out_of_range", message, "Each pair trains two runs; 3 to 5 are usual."))
    folder = order.folder
    other = folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - set(LOCKS))
    if other and not (folder / STUDY_FILE).is_file():
        what = "holds a run" if Record.read(folder) is not None else f"exists and has no {STUDY_FILE}"
        problems.append(Problem("folder_unusable", f"{folder} {what}.", "Choose another --name or --output."))
    if problems:
        raise UsageError(problems)
    return trials


def wrong_settings(order: SearchOrder) -> list[Problem]:
    """Settings of all trials that a search cannot have."""
    problems, config = list[Problem](), order.resolved.config
    with gathering(problems):
        with_installed_libraries(order.resolved)
    if order.together > 1 and (against := settings_of_all_against(order)):
        message = f"--together is {order.together}, but every trial would train on a base model of its own: {against}."
        problems.append(
            Problem("trains_alone", message, "Leave it out of the space and the settings, or leave --together out.")
        )
    if config.validation.split == 0.0:
        message = "validation.split is 0, but trials are compared by images that they do not train on."
        problems.append(Problem("no_validation_images", message, "Leave it empty, or set a share such as 0.2."))
    if config.train.max_hours is not None:
        message = "train.max_hours would end trials by the clock, so that they could not be compared."
        problems.append(
            Problem("clock_ends_trials", message, "Leave it out; --trials and --max-steps set how long a search takes.")
        )
    if order.objective == "verdict" and config.gates.lora_check == "off":
        message = "--objective verdict needs a score, but gates.lora_check is off."
        problems.append(Problem("objective_without_score", message, "Leave it empty, or set lite or full."))
    searched = {each.setting for each in order.space}
    name = config.optimizer.name
    if (
        searched & {"optimizer.learning_rate", "optimizer.name"} == {"optimizer.learning_rate"}
        and OPTIMIZERS[name].finds_learning_rate
    ):
        message = f"optimizer.learning_rate is searched, but optimizer.name is {name}, which finds its own."
        problems.append(
            Problem("optimizer_finds_rate", message, "Remove it from the space, or choose another optimizer.")
        )
    return problems


def settings_of_all_against(order: SearchOrder) -> str:
    """The settings for which no two trials can share a base; empty where some can."""
    config = order.resolved.config
    for parameter in order.space:
        if parameter.when:  # not in every trial
            continue
        section, _, key = parameter.setting.partition(".")
        values = parameter.choices or (parameter.low,)
        each_of = [with_values(config, {section: {key: value}}) for value in values]
        config = min(each_of, key=lambda each: len(settings_against(each)))
    return settings_against(config)


def read_for_trials(order: SearchOrder, console: Console) -> tuple[Inputs, dict[str, dict[str, Any]]]:
    """The data, checked, and the settings that the search sets for its trials, where the user did not.

    Raises UsageError and DatasetRefused.
    """
    resolved = order.resolved
    wished: dict[str, dict[str, Any]] = {
        "gates": {"lora_check": "lite" if order.objective == "verdict" else "off", "compare": "off"},
        "sample": {"every_n_steps": 0},
        "checkpoint": {"keep_last": 1},
        "run": {"trackers": ()},
    }
    inputs = read_inputs(resolved.config)
    refuse_data(inputs, enforce_gates=False)
    if len(inputs.validation) < FEWEST_COMPARED and not from_user(resolved.origin["validation.split"]):
        images = len({sample.content for sample in (*inputs.train, *inputs.validation) if not sample.regularization})
        share = min(0.5, max(SHARE_OF_FEW, FEWEST_COMPARED / images))
        wished["validation"] = {"split": share}
        section = resolved.config.validation.model_copy(update={"split": share})
        inputs = read_inputs(resolved.config.model_copy(update={"validation": section}), (inputs.family, inputs.facts))
        console.print(
            f"trials keep {len(inputs.validation)} of {images} images for validation and train on the others"
            f" (validation.split={share:g}), more than an ordinary run of so few images"
        )
    if not inputs.validation:
        message = "No image can be kept for validation: there are too few, or all look alike."
        raise UsageError(
            Problem(
                "no_validation_images", message, "Trials are compared by images that they do not train on: add images."
            )
        )
    ours = {
        section: {key: value for key, value in values.items() if not from_user(resolved.origin[f"{section}.{key}"])}
        for section, values in wished.items()
    }
    return inputs, {section: values for section, values in ours.items() if values}


def make_plan(order: SearchOrder, for_trials: Mapping[str, Mapping[str, Any]], data_hash: str) -> SearchPlan:
    """What must stay the same when this search continues."""
    config = with_absolute_paths(order.resolved.config)
    searched = {each.setting for each in order.space}
    flat = flattened(config)
    settings = {
        name: value
        for name, value in flat.items()
        if name not in searched and name not in CHANGES_NOTHING and not name.startswith("cache.")
    }
    return SearchPlan(
        space=order.space,
        sampler=order.sampler,
        pruner=order.pruner,
        objective=order.objective,
        seed=config.train.seed,
        shared=order.shared,
        settings={**settings, "hash of the data": data_hash},
        for_trials=for_trials,
        defaults={name: flat[name] for name in searched},
    )


def continue_or_refuse(folder: Path, study: Study, plan: SearchPlan, trials: int) -> None:
    """Keep the plan. Raises UsageError where the study is one of another plan, or has more trials already."""
    before = kept_plan(study)
    known = len(read_trials(study))
    if before is not None:
        now = plan_from_json(json.loads(json.dumps(plan.to_json())))  # JSON makes lists of tuples
        if differences := plan_differences(before, now):
            fix = "Continue it as it was started, or choose another --name."
            raise UsageError(
                Problem("search_differs", f"{folder} holds another search: {'; '.join(differences)}.", fix)
            )
    if known > trials:
        message = f"--trials is {trials}, but {folder} has {counted(known, 'trial')} already."
        raise UsageError(Problem("trials_done_already", message, f"Set --trials {known} or more."))
    keep_plan(study, plan, trials)


def show_plan(order: SearchOrder, plan: SearchPlan, trials: int, inputs: Inputs, console: Console) -> None:
    """What will be searched, and what is there already."""
    rows = read_trials(open_study(order.folder))
    console.print(
        f"search in {order.folder}: {counted(trials, 'trial')} by {plan.sampler}, pruned by {plan.pruner},"
        f" objective {OBJECTIVES[plan.objective]} on {counted(len(inputs.validation), 'image')}"
    )
    for each in plan.space:
        console.print(f"  {each.setting}: {describe(each)}")
    if rows:
        ended = sum(row.state != "running" for row in rows)
        cut = ""
        if ended < len(rows):
            cut = f", {len(rows) - ended} {'was cut off and is' if ended + 1 == len(rows) else 'were cut off and are'} continued"
        console.print(f"continues: {counted(ended, 'trial')} of {trials} ended already{cut}")


def train_trials(folder: Path, study: Study, jobs: int, console: Console) -> None:
    """Train until no trial is left, here or in several processes. Raises Stopped."""
    if jobs == 1:
        work_on_trials(folder, kept_families(FAMILIES), console)
        return
    while True:
        rows = read_trials(study)
        left = int(study.user_attrs["trials"]) - len(rows) + sum(row.state == "running" for row in rows)
        if left == 0:
            return
        before = progress_made(study)
        codes = run_processes(search_alone, folder, min(jobs, -(-left // study.user_attrs[TOGETHER])))
        if stopped := [code for code in codes if code > SIGNALED]:
            raise Stopped(stopped[0])
        if progress_made(study) == before:
            raise UsageError(
                Problem("worker_not_started", "No worker process could train a trial.", "Run the search with --jobs 1.")
            )


def progress_made(study: Study) -> list[tuple[int, str]]:
    """Changes with every trial that is begun, ended, or taken over from a process that died."""
    return [(each.user_attrs.get(DEATHS, 0), each.state.name) for each in study.get_trials(deepcopy=False)]


def search_alone(path: str, environment: dict[str, str]) -> None:
    """A worker process."""

    def work() -> None:
        with quiet_optuna():
            work_on_trials(Path(path), kept_families(FAMILIES), plain_console())

    be_worker(environment, work)


def work_on_trials(folder: Path, families: Mapping[str, Family], console: Console) -> None:
    """Train trials, as many at once as train together, until none is left. Raises Stopped."""
    study = open_study(folder)
    plan = kept_plan(study)
    assert plan is not None
    train_images: tuple[Any, ...] | None = None

    def read_train(resolved: Resolved) -> Sequence[Any]:
        nonlocal train_images
        if train_images is None:  # the same in all trials: what it depends on is not searched
            train_images = read_inputs(resolved.config).train
        return train_images

    def run_of(trial: Trial) -> SearchRun:
        number, values, place = trial.number, dict(trial.params), folder / TRIALS / f"{trial.number:04d}"
        console.print(f"trial {number}: {described_values(values)}")

        @cache
        def make_settings() -> Resolved:
            return trial_settings(plan, place, [values_layer(f"trial {number}", values)], read_train)

        def ended(end: TrialEnd) -> None:
            finish_trial(trial, end)
            write_outcome(folder, study, plan)
            console.print(f"trial {number}: {ended_line(study, plan, number, end)}")

        return SearchRun(place, make_settings, ended, lambda: release_trial(trial), pruning(trial, plan))

    while True:
        runs = list[SearchRun]()
        while len(runs) < study.user_attrs[TOGETHER] and (trial := claim_trial(folder, study, plan)) is not None:
            runs.append(run_of(trial))
        if not runs:
            return
        run_trials(runs, plan.objective, families)


def finish_trial(trial: Trial, end: TrialEnd) -> None:
    """Record how a trial ended."""
    from optuna.trial import TrialState

    for key, value in ((REASON, end.reason), (STEPS, end.steps), (SECONDS, end.seconds)):
        trial.set_user_attr(key, value)
    if end.state == "failed":
        fail_trial(trial, end.reason)
    elif end.state == "pruned":
        trial.study.tell(trial.number, state=TrialState.PRUNED)
    else:
        trial.study.tell(trial.number, end.value)


def described_values(values: Mapping[str, Any]) -> str:
    """`optimizer.learning_rate=3.2e-4, lora.rank=16`, numbers with three digits."""
    return ", ".join(
        f"{name}={shown(float(f'{value:.3g}') if isinstance(value, float) else value)}"
        for name, value in values.items()
    )


def ended_line(study: Study, plan: SearchPlan, number: int, end: TrialEnd) -> str:
    """How a trial ended, and whether it is the best so far."""
    took = f"{counted(end.steps, 'step')}, {duration(end.seconds)}"
    if end.value is None:
        reason = end.reason if end.state == "pruned" else f"failed: {end.reason}"
        return f"{reason} ({took})"
    best = best_trial(read_trials(study), plan)
    of_best = (
        "the best so far" if best is None or best.number == number else f"best {best.value:.4g}, trial {best.number}"
    )
    return f"{OBJECTIVES[plan.objective]} {end.value:.4g} ({of_best}; {took})"


def show_outcome(folder: Path, rows: Sequence[TrialRow], plan: SearchPlan, console: Console) -> int:
    """Print what was found; the exit code."""
    counts = {state: sum(row.state == state for row in rows) for state in ("complete", "pruned", "failed")}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    best = best_trial(list(rows), plan)
    if best is None:
        reason = next((row.reason for row in rows if row.state == "failed"), "none was trained to its end")
        console.print(f"error: no trial has a result. First reason: {reason} See {folder / 'report.html'}")
        return TRAINING_FAILED
    console.print(
        f"best: trial {best.number}, {OBJECTIVES[plan.objective]} {best.value:.4g}: {described_values(best.values)}"
    )
    console.print(f"preset: {folder / 'best.toml'} (use it with --config); report: {folder / 'report.html'}")
    return DONE
