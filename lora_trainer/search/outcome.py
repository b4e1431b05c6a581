"""What a search leaves beside its runs: `search.json`, the preset `best.toml`, and `report.html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from lora_trainer.core.errors import DONE, TRAINING_FAILED
from lora_trainer.core.findings import counted
from lora_trainer.core.io import read_json, write_json, write_text
from lora_trainer.core.version import __version__
from lora_trainer.report.read import mapping
from lora_trainer.search.space import describe
from lora_trainer.search.study import OBJECTIVES, SearchPlan, TrialRow, best_trial, read_trials
from lora_trainer.search.trials import TRIALS

if TYPE_CHECKING:
    from optuna.study import Study

    from lora_trainer.search.confirm import Confirmed

DOCUMENT, PRESET = "search.json", "best.toml"
FEWEST_FOR_IMPORTANCE = 4  # complete trials: with fewer the numbers are noise


def write_outcome(folder: Path, study: Study, plan: SearchPlan, confirmed: Confirmed | None = None) -> dict[str, Any]:
    """Bring `search.json` and `best.toml` up to date; the document. An earlier confirmation of the best trial is kept."""
    rows = read_trials(study)
    best = best_trial(rows, plan)
    earlier: Mapping[str, Any] = {}
    # A damaged document is written anew: all but the confirmation is in the study.
    with suppress(OSError, ValueError):
        earlier = mapping(read_json(folder / DOCUMENT))
    kept = (
        earlier.get("confirmed")
        if best is not None and (earlier.get("best") or {}).get("number") == best.number
        else None
    )
    confirmation = kept if confirmed is None else confirmed.to_json()
    document = {
        "objective": OBJECTIVES[plan.objective],
        "direction": "maximize" if plan.maximizes else "minimize",
        "sampler": plan.sampler,
        "pruner": plan.pruner,
        "seed": plan.seed,
        "space": {each.setting: describe(each) for each in plan.space},
        "settings_of_trials": plan.for_trials,
        "default_values": plan.defaults,
        "planned": study.user_attrs["trials"],
        **{state: sum(row.state == state for row in rows) for state in ("complete", "pruned", "failed", "running")},
        "exit_code": DONE if best is not None else TRAINING_FAILED,
        "best": None if best is None else row_to_json(best),
        "confirmed": confirmation,
        "importance": importance_of(study, rows),
        "trials": [row_to_json(row) for row in rows],
        "version": __version__,
    }
    write_json(folder / DOCUMENT, document)
    if best is not None:
        write_text(folder / PRESET, preset_text(folder, plan, rows, best, confirmation))
    return document


def row_to_json(row: TrialRow) -> dict[str, Any]:
    return {
        "number": row.number,
        "folder": f"{TRIALS}/{row.name}",
        "state": row.state,
        "value": row.value,
        "values": dict(row.values),
        "reason": row.reason or None,
        "steps": row.steps,
        "seconds": row.seconds,
        "losses": {str(percent): value for percent, value in row.losses.items()},
    }


def importance_of(study: Study, rows: Sequence[TrialRow]) -> dict[str, float]:
    """Each parameter's share of the importance by PED-ANOVA (arXiv:2304.10255); empty with too few trials.

    Of the parameters that complete trials have with more than one value.
    """
    from optuna.importance import get_param_importances

    complete = [row.values for row in rows if row.state == "complete"]
    names = dict.fromkeys(name for values in complete for name in values)
    varied = [name for name in names if len({values[name] for values in complete if name in values}) > 1]
    if len(complete) < FEWEST_FOR_IMPORTANCE or not varied:
        return {}
    return get_param_importances(study, params=varied)


def preset_text(
    folder: Path,
    plan: SearchPlan,
    rows: Sequence[TrialRow],
    best: TrialRow,
    confirmed: Mapping[str, Any] | None,
) -> str:
    """`best.toml`: the values of the best trial, with what speaks for them in comments and as evidence."""
    complete = [row for row in rows if row.state == "complete"]
    named = OBJECTIVES[plan.objective]
    evidence = f"best of {counted(len(rows), 'trial')} ({plan.sampler}), {named} {best.value:.4g}"
    counts = {state: sum(row.state == state for row in rows) for state in ("complete", "pruned", "failed")}
    lines = [f"Trial {best.number} of the search {folder.name}: the {evidence}."]
    lines.append(", ".join(f"{count} {state}" for state, count in counts.items()) + ".")
    second = sorted((row.value for row in complete if row.value is not None), reverse=plan.maximizes)[1:2]
    if second:
        lines.append(f"The second best trial has {second[0]:.4g}.")
    lines.append(
        confirmed["text"][:1].upper() + confirmed["text"][1:] + "."
        if confirmed
        else "Not confirmed with other seeds and images: the best of many trials looks better than it is (--confirm 3)."
    )
    lines += ["", "Searched, with the settings of the search otherwise:"]
    lines += [f"  {each.setting}: {describe(each)}" for each in plan.space]
    lines += ["", "Use it with the search's other flags:", "  lora-trainer train --config best.toml ..."]
    sections: dict[str, dict[str, Any]] = {}
    for name, value in best.values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    sections["evidence"] = dict.fromkeys(best.values, evidence)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{comment}\n{tomli_w.dumps(sections)}"
