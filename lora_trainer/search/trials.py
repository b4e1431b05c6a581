"""One run of a search: its settings, its training, and how it ended. Loads torch when it trains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from lora_trainer.config.contradictions import from_user
from lora_trainer.config.layers import Layer, Resolved, with_values
from lora_trainer.core.errors import DONE, LORA_REFUSED, SIGNALED, UsageError
from lora_trainer.core.interrupt import Stopped, stop_if_signalled
from lora_trainer.jobs.joint_jobs import base_of
from lora_trainer.jobs.worker import RunLog, last_words, run_together
from lora_trainer.monitor.console import Console
from lora_trainer.run.inputs import arithmetic
from lora_trainer.run.order import make_order
from lora_trainer.run.settings import settle
from lora_trainer.run.train import ended_by, train
from lora_trainer.run_folder.record import Record
from lora_trainer.search.study import ENDED, SearchPlan, TrialState
from lora_trainer.training.steering import RegularValidation, Steering

if TYPE_CHECKING:
    from optuna.trial import Trial

    from lora_trainer.data.sample import Sample
    from lora_trainer.models.family import Family
    from lora_trainer.training.run_group import Member

TRIALS = "trials"  # the folder of their runs
VALIDATIONS = 9  # of a trial, unless validation.every_n_steps is set: a ninth of a run is the pruner's first stage
CHECKPOINTS = 3
NO_LOSS = "Its validation loss is not finite."


@dataclass(frozen=True)
class TrialEnd:
    """How a run of a search ended, with the value of the objective where it has one."""

    state: TrialState
    value: float | None = None
    reason: str = ""
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class SearchRun:
    """A run that a search trains: its folder, settings and steering; `ended` is called with its end, `stopped` if a signal came first."""

    folder: Path
    make_settings: Callable[[], Resolved]
    ended: Callable[[TrialEnd], None]
    stopped: Callable[[], None] = lambda: None
    steering: Steering = field(default_factory=Steering)


def trial_settings(
    plan: SearchPlan, place: Path, layers: Sequence[Layer], read_train: Callable[[Resolved], Sequence[Sample]]
) -> Resolved:
    """The settings of a run in `place`: the search's shared ones with `layers` above them.

    Where the user sets no intervals, it validates nine times and saves three checkpoints; its steps depend on the images
    that `read_train` returns. Raises UsageError for settings that exclude each other.
    """
    of_search = Layer("search", {name: dict(values) for name, values in plan.for_trials.items()})
    # Not once for each trial.
    silent = {"copy_to": None, "on_finish": None, "on_failure": None}
    where = Layer("search", {"run": {"output": str(place.parent), "name": place.name, **silent}})
    resolved = settle(plan.shared.presets, [*plan.shared.user, of_search, *layers, where], say=lambda line: None)
    config, train_images = resolved.config, tuple(read_train(resolved))
    total = arithmetic(config, train_images, config.train.effective_batch_size, processes=1).total
    intervals = {
        "validation": -(-total // VALIDATIONS),
        "checkpoint": min(config.checkpoint.every_n_steps, -(-total // CHECKPOINTS)),
    }
    ours = {
        section: steps
        for section, steps in intervals.items()
        if not from_user(resolved.origin[f"{section}.every_n_steps"])
    }
    return replace(
        resolved,
        config=with_values(config, {section: {"every_n_steps": steps} for section, steps in ours.items()}),
        origin={**resolved.origin, **{f"{section}.every_n_steps": "search" for section in ours}},
    )


def values_layer(name: str, values: Mapping[str, Any]) -> Layer:
    """Values by `section.key` as a layer."""
    sections: dict[str, dict[str, Any]] = {}
    for setting, value in values.items():
        section, _, key = setting.partition(".")
        sections.setdefault(section, {})[key] = value
    return Layer(name, sections)


def run_trials(runs: Sequence[SearchRun], objective: str, families: Mapping[str, Family]) -> None:
    """Train these runs, or what is left of them: those that can share a base on one, at once. Raises Stopped for a signal."""
    left = {run.folder: run for run in runs}

    def work(run: SearchRun, stop: object = None, member: Member | None = None) -> None:
        del stop
        run.ended(run_trial(run, objective, families, member))
        del left[run.folder]

    try:
        for group in runs_by_base(runs):
            if len(group) == 1:
                work(group[0])
            else:
                run_together({run.folder.name: partial(work, run) for run in group})
            stop_if_signalled()  # a signal that came when a run was as good as done
    except (KeyboardInterrupt, SystemExit):
        for run in left.values():
            run.stopped()
        raise


def runs_by_base(runs: Sequence[SearchRun]) -> list[list[SearchRun]]:
    """Runs that can share a base, and each of the others by itself; one with wrong settings reports them when it is run."""
    groups: list[tuple[object, list[SearchRun]]] = []
    for run in runs:
        base: object = None
        if len(runs) > 1:
            with contextlib.suppress(UsageError):
                base = base_of(run.make_settings().config)
        group = next((group for known, group in groups if base is not None and known == base), None)
        if group is None:
            groups.append((base, [run]))
        else:
            group.append(run)
    return [group for _, group in groups]


def run_trial(run: SearchRun, objective: str, families: Mapping[str, Family], member: Member | None = None) -> TrialEnd:
    """Train one run, or what is left of it, alone or as a member of a group. Its output goes to its own log.

    Raises Stopped for a signal; no other error.
    """
    folder = run.folder
    with RunLog(folder) as log:
        console = Console(file=cast("IO[str]", log), highlight=False, markup=False, emoji=False, soft_wrap=True)
        try:
            record = Record.read(folder)
            if record is None or not record.is_finished:
                order = make_order(run.make_settings(), resume=True, console=console)
                result = train(replace(order, families=families, steering=run.steering, member=member))
                if result.exit_code >= SIGNALED:
                    raise Stopped(result.exit_code)
                record = result.record or Record(folder.name)
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:  # noqa: BLE001  the other trials must continue
            log.write(last_words(error))
            ended = ended_by(error, Record(folder.name))
            record = Record.read(folder) or ended
            reason = (ended.reason or type(error).__name__).splitlines()[0]
            return TrialEnd("failed", None, reason, record.steps, seconds_of(record))
    return end_of(record, objective)


def end_of(record: Record, objective: str) -> TrialEnd:
    """The end of a finished run. A value that is not finite is no value."""
    steps, seconds = record.steps, seconds_of(record)
    if record.exit_code not in (DONE, LORA_REFUSED):
        return TrialEnd("failed", None, record.reason or "", steps, seconds)
    if ended := record.training["control"]["ended"]:
        return TrialEnd("failed" if ended == NO_LOSS else "pruned", None, ended, steps, seconds)
    value = measured_value(record, objective)
    if value is None or not math.isfinite(value):
        reason = "It has no LoRA score." if objective == "verdict" else NO_LOSS
        return TrialEnd("failed", None, reason, steps, seconds)
    return TrialEnd("complete", value, "", steps, seconds)


def measured_value(record: Record, objective: str) -> float | None:
    """The LoRA's score, or the plain validation loss of the weights that were exported."""
    if objective == "verdict":
        return record.scores["lora"]
    is_best = record.setting("checkpoint.export_weights") == "best"
    loss: float | None = record.training["best_val_loss" if is_best else "val_loss"]
    return loss


def seconds_of(record: Record) -> float:
    return round(record.seconds["total"], 1)


def pruning(trial: Trial, plan: SearchPlan) -> Steering:
    """Ends a trial's run where the pruner decides so, or where its loss is not finite.

    The pruner compares trials at the same percent of their steps. A decision is kept in the study: the pruner asked again,
    after the process was killed, would not decide the same.
    """

    def end(seen: RegularValidation) -> str:
        kept: dict[str, str] = trial.user_attrs.get(ENDED, {})
        if str(seen.step) in kept:
            return kept[str(seen.step)]
        if not math.isfinite(seen.loss):
            return NO_LOSS
        value = seen.loss
        if plan.maximizes:  # the share by which it is below the loss before training
            value = 1.0 - seen.loss / seen.base if seen.base else -seen.loss
        percent = 100 * seen.step // seen.total
        if percent not in trial.study.trials[trial.number].intermediate_values:
            trial.report(value, percent)
        if seen.step == seen.total or not trial.should_prune():
            return ""
        reason = f"pruned at step {seen.step} of {seen.total} by {plan.pruner}, at a validation loss of {seen.loss:.4g}"
        trial.set_user_attr(ENDED, {str(seen.step): reason})
        return reason

    return Steering(end=None if plan.pruner == "none" else end)
