"""Is the best trial's setting better than the unsearched one? Both are trained again, in pairs, where the search never measured.

The best of many trials looks better than it is: it was also the luckiest on those validation images, with that seed. So each
pair has a new seed and other validation images, which no trial was measured on, or other images altogether (`data`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.layers import Layer, Resolved
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import counted
from lora_trainer.core.intervals import FEWEST_VALUES, mean_interval
from lora_trainer.data.split import split_validation
from lora_trainer.jobs.executors.local import kept_families
from lora_trainer.models.families import FAMILIES
from lora_trainer.run.inputs import Inputs, read_inputs
from lora_trainer.search.study import OBJECTIVES, SearchPlan, TrialRow
from lora_trainer.search.trials import SearchRun, TrialEnd, run_trials, trial_settings, values_layer

if TYPE_CHECKING:
    from rich.console import Console

    from lora_trainer.data.sample import Sample

FOLDER = "confirm"  # of the runs
ARMS = ("best", "default")
SPLITS_TRIED = 1000  # split seeds, to find validation images that no trial was measured on


@dataclass(frozen=True)
class Confirmation:
    """How many pairs are trained; `data` are images in place of the search's own. So many runs train `together` on one base."""

    pairs: int
    data: tuple[str, ...] = ()
    together: int = 1


@dataclass(frozen=True)
class ConfirmedPair:
    """Both settings, trained with the same seed and measured on the same images; None for a run that failed.

    `gain` is how much better the best setting is, above 0 whichever way the objective counts. `measured_before` of the
    validation images were measured by the search too.
    """

    seed: int
    split_seed: int
    measured_before: int
    best: float | None
    default: float | None
    gain: float | None
    reason: str


@dataclass(frozen=True)
class Confirmed:
    """What the pairs say, in words and as the mean gain with its 95 % interval, which needs two pairs."""

    outcome: str  # proven, tied, worse or unmeasured
    text: str
    where: str
    pairs: tuple[ConfirmedPair, ...]
    mean: float | None = None
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def confirm(
    folder: Path, plan: SearchPlan, best: TrialRow, wanted: Confirmation, inputs: Inputs, console: Console
) -> Confirmed:
    """Train what is missing of the pairs, and compare them. Raises UsageError for bad `data`, and Stopped."""
    of_data = [Layer("--confirm-data", {"data": {"sources": list(wanted.data)}})] if wanted.data else []
    measured = {sample.content for sample in inputs.validation}
    if wanted.data:
        inputs, measured = read_other_data(plan, folder, of_data), set()
    splits = other_splits(plan, inputs, wanted.pairs, measured)
    overlap = max(shared for _, shared in splits)
    where = "validation images that no trial was measured on"
    if wanted.data:
        where = f"images that the search never saw ({', '.join(wanted.data)})"
    elif overlap:
        where = f"other validation images, of which up to {overlap} were measured in the search, since there are few"
    console.print(
        f"confirming trial {best.number} against the default setting: {counted(wanted.pairs, 'pair')}, new seeds, {where}"
    )
    families, ends, pairs = kept_families(FAMILIES), dict[tuple[int, str], TrialEnd](), dict[int, ConfirmedPair]()
    runs = list[SearchRun]()

    def ended(number: int, arm: str, end: TrialEnd) -> None:
        ends[number, arm] = end
        of_pair = {arm: ends[number, arm] for arm in ARMS if (number, arm) in ends}
        if len(of_pair) < len(ARMS):
            return
        pairs[number] = pair_of(plan, number, *splits[number - 1], of_pair)
        shown = [f"{arm} {'failed' if end.value is None else format(end.value, '.4g')}" for arm, end in of_pair.items()]
        console.print(f"pair {number}: {OBJECTIVES[plan.objective]} {', '.join(shown)} {pairs[number].reason}".rstrip())

    for number, (split_seed, _) in enumerate(splits, 1):
        values = values_layer("--confirm", {"train.seed": plan.seed + number, "validation.split_seed": split_seed})
        for arm in ARMS:
            searched = [values_layer(f"trial {best.number}", best.values)] if arm == "best" else []
            # A folder of one trial's pairs: with more trials another one may become the best.
            place = folder / FOLDER / f"trial-{best.number:04d}" / f"{arm}-{number}"

            @cache
            def make_settings(place: Path = place, layers: Sequence[Layer] = (*of_data, *searched, values)) -> Resolved:
                return trial_settings(plan, place, layers, lambda resolved: read_inputs(resolved.config).train)

            runs.append(SearchRun(place, make_settings, partial(ended, number, arm)))
    for start in range(0, len(runs), wanted.together):
        run_trials(runs[start : start + wanted.together], plan.objective, families)
    confirmed = compare_pairs([pairs[number] for number in sorted(pairs)], plan, where)
    console.print(confirmed.text)
    return confirmed


def read_other_data(plan: SearchPlan, folder: Path, of_data: Sequence[Layer]) -> Inputs:
    """The inputs of `--confirm-data`. Raises UsageError where none of its images can be kept for validation."""
    found: list[Inputs] = []

    def read_train(resolved: Resolved) -> Sequence[Sample]:
        found.append(read_inputs(resolved.config))
        return found[0].train

    trial_settings(plan, folder / FOLDER / "data", of_data, read_train)
    if not found[0].validation:
        message = "None of the images of --confirm-data can be kept for validation."
        raise UsageError(Problem("no_validation_images", message, "Name more images, at least 4 that differ."))
    return found[0]


def other_splits(plan: SearchPlan, inputs: Inputs, count: int, measured: set[str]) -> list[tuple[int, int]]:
    """Split seeds, each with how many of its validation images were `measured` before: none, where there are enough images."""
    share = plan.for_trials.get("validation", {}).get("split", plan.settings["validation.split"])
    before, found = int(plan.settings["validation.split_seed"]), list[tuple[int, int]]()
    for seed in range(before + 1, before + 1 + SPLITS_TRIED):
        validation = split_validation(inputs.report.samples, share, seed, inputs.report.kin)[1]
        found.append((seed, len({sample.content for sample in validation} & measured)))
        if sum(not shared for _, shared in found) == count:
            break
    return sorted(sorted(found, key=lambda each: each[1])[:count])


def pair_of(plan: SearchPlan, number: int, split_seed: int, shared: int, ends: dict[str, TrialEnd]) -> ConfirmedPair:
    best, default = (ends[arm].value for arm in ARMS)
    gain = None
    if best is not None and default is not None:
        gain = best - default if plan.maximizes else default - best
    reason = " ".join(f"{arm}: {end.reason}" for arm, end in ends.items() if end.reason)
    return ConfirmedPair(plan.seed + number, split_seed, shared, best, default, gain, reason)


def compare_pairs(pairs: Sequence[ConfirmedPair], plan: SearchPlan, where: str) -> Confirmed:
    """The mean gain of the pairs that have both results, with Student's 95 % interval."""
    gains = [pair.gain for pair in pairs if pair.gain is not None]
    of = f"of {counted(len(gains), 'pair')} with new seeds on {where}"
    if len(gains) < FEWEST_VALUES:
        text = f"not confirmed: only {counted(len(gains), 'pair')} of {len(pairs)} has both results"
        return Confirmed("unmeasured", text, where, tuple(pairs))
    mean, reach = mean_interval(gains)
    low, high = mean - reach, mean + reach
    usual = statistics.fmean(pair.default for pair in pairs if pair.gain is not None and pair.default is not None)
    what = "higher" if plan.maximizes else "lower"
    numbers = f"{OBJECTIVES[plan.objective]} {what} by {mean:.3g} (95 % interval {low:.3g} to {high:.3g}"
    numbers += (
        f"; {100 * mean / abs(usual):.1f} % of the default's {usual:.4g}), the mean {of}" if usual else f"), {of}"
    )
    if low > 0:
        return Confirmed(
            "proven", f"proven better than the default setting: {numbers}", where, tuple(pairs), mean, low, high
        )
    if high < 0:
        return Confirmed("worse", f"worse than the default setting: {numbers}", where, tuple(pairs), mean, low, high)
    text = f"tied with the default setting, since the interval contains 0: {numbers}"
    return Confirmed("tied", text, where, tuple(pairs), mean, low, high)
