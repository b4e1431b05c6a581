"""`report.html` of a search: the best trial, the confirmation, Optuna's own plots, and every trial. One file, opens offline."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.config.toml import shown
from lora_trainer.core.findings import counted
from lora_trainer.core.imports import why_unusable
from lora_trainer.core.io import write_text
from lora_trainer.monitor.progress_line import duration
from lora_trainer.report import FILE
from lora_trainer.report.write import render
from lora_trainer.search.outcome import PRESET
from lora_trainer.search.space import describe
from lora_trainer.search.study import SearchPlan, TrialRow, best_trial, read_trials
from lora_trainer.search.trials import TRIALS

if TYPE_CHECKING:
    from optuna.study import Study

TEMPLATES = Path(__file__).parent / "page"
NO_PLOTLY = "Optuna's plots need plotly: pip install 'lora-trainer[search]', then run the same search command again."
TONES = {"proven": "good", "tied": "fair", "worse": "bad", "unmeasured": "fair"}
HEADLINES = {
    "proven": "Trial {} is proven better than the default setting",
    "tied": "Trial {} is not proven better: tied with the default setting",
    "worse": "Trial {} is worse than the default setting on new seeds and images",
    "unmeasured": "Trial {} could not be confirmed",
}


def write_page(folder: Path, study: Study, plan: SearchPlan, document: Mapping[str, Any]) -> None:
    """Write the page beside `search.json`, whose `document` it shows."""
    rows = read_trials(study)
    best, confirmed = best_trial(rows, plan), document["confirmed"]
    plots = plots_of(study, rows)
    page = render(
        "search.html",
        folder=TEMPLATES,
        scripts=scripts_of_plots() if plots else (),
        title=f"{folder.name}: search",
        name=folder.name,
        document=document,
        tone="bad" if best is None else TONES[confirmed["outcome"]] if confirmed else "open",
        figures=tiles(document, rows),
        **words_for(folder, plan, document, best),
        pairs=[
            {
                **pair,
                **{name: "–" if pair[name] is None else f"{pair[name]:.4g}" for name in ("best", "default", "gain")},
            }
            for pair in (confirmed or {"pairs": []})["pairs"]
        ],
        plots=plots,
        no_plots=NO_PLOTLY if not scripts_of_plots() else "There are plots when two trials are complete.",
        settings=[each.setting for each in plan.space],
        rows=[page_row(row, plan, best) for row in rows],
    )
    write_text(folder / FILE, page)


def words_for(folder: Path, plan: SearchPlan, document: Mapping[str, Any], best: TrialRow | None) -> dict[str, Any]:
    """The headline with its lines, the best trial's settings beside the default ones, and both commands."""
    if best is None:
        lines = ["No trial has a result. The table below has each one's reason."]
        return {"headline": "No trial was trained to its end", "lines": lines, "best": [], "use": "", "again": ""}
    confirmed = document["confirmed"]
    lines = [
        f"Its {document['objective']} is {best.value:.4g}, the best of {counted(document['complete'], 'complete trial')}."
    ]
    if not confirmed:
        lines.append(
            "It was chosen by these very images and this seed, so an ordinary run will look worse."
            " Whether it is better than the default setting is not known: run the same command with --confirm 3."
        )
    defaults = document["default_values"]
    config, name = folder / TRIALS / best.name / "config.toml", f"{folder.name}-best"
    again = ["lora-trainer", "train", "--config", str(config), "--output", str(folder.parent), "--name", name]
    return {
        "headline": HEADLINES[confirmed["outcome"]].format(best.number)
        if confirmed
        else f"Trial {best.number} is the best so far",
        "lines": lines,
        "best": [
            (each.setting, short_value(best.values[each.setting]), shown(defaults[each.setting]), describe(each))
            for each in plan.space
            if each.setting in best.values
        ],
        "use": f"lora-trainer train --config {shlex.quote(str(folder / PRESET))}",
        "again": shlex.join(again),
    }


def tiles(document: Mapping[str, Any], rows: list[TrialRow]) -> list[dict[str, str]]:
    """The numbers at the top."""
    seconds = sum(row.seconds for row in rows)
    steps = sum(row.steps for row in rows)
    counts = f"{document['complete']} complete, {document['pruned']} pruned, {document['failed']} failed"
    most = max(document["importance"].items(), key=lambda item: item[1], default=None)
    found = [
        {"name": "Trials", "value": f"{len(rows)} of {document['planned']}", "beside": counts},
        {"name": "Trained", "value": f"{steps:,} steps", "beside": duration(seconds)},
    ]
    if most:
        found.append(
            {
                "name": "Most important",
                "value": most[0].partition(".")[2],
                "beside": f"{100 * most[1]:.0f} % (PED-ANOVA)",
            }
        )
    return found


def page_row(row: TrialRow, plan: SearchPlan, best: TrialRow | None) -> dict[str, Any]:
    """A line of the trials' table."""
    cells = ["–" if each.setting not in row.values else short_value(row.values[each.setting]) for each in plan.space]
    return {
        "number": row.number,
        "value": "–" if row.value is None else f"{row.value:.4g}",
        "cells": cells,
        "steps": row.steps,
        "time": duration(row.seconds),
        "ended": row.reason if row.state == "pruned" else f"{row.state}: {row.reason}" if row.reason else row.state,
        "is_best": best is not None and row.number == best.number,
    }


def short_value(value: Any) -> str:
    """A value of a setting with three digits."""
    return shown(float(f"{value:.3g}")) if isinstance(value, float) else shown(value)


def scripts_of_plots() -> tuple[str, ...]:
    """plotly's script, and the one that draws with it; nothing where plotly cannot be used."""
    if why_unusable("plotly") is not None:
        return ()
    from plotly.offline import get_plotlyjs

    return get_plotlyjs(), (TEMPLATES / "plots.js").read_text(encoding="utf-8")


def plots_of(study: Study, rows: list[TrialRow]) -> list[tuple[str, str, str, int]]:
    """Title, meaning, figure as JSON and height in px of Optuna's plots; none without plotly, or for a single trial."""
    from optuna import visualization as drawn

    complete = [row for row in rows if row.state == "complete"]
    if not drawn.is_available() or len(complete) < 2:
        return []
    names = dict.fromkeys(name for row in complete for name in row.values)
    varied = [name for name in names if len({row.values[name] for row in complete if name in row.values}) > 1]
    wanted: list[tuple[str, str, Callable[..., Any], int]] = [
        (
            "Optimization history",
            "Each complete trial, and the best so far.",
            partial(drawn.plot_optimization_history, study),
            340,
        )
    ]
    if len(complete) >= 4 and varied:
        about = "How much each setting decides whether a trial is among the best (PED-ANOVA, arXiv:2304.10255)."
        wanted.append(("Parameter importance", about, partial(drawn.plot_param_importances, study, params=varied), 320))
    if any(row.losses for row in rows):
        about = "What the pruner compares, by percent of a run's steps. A line that ends early was pruned."
        wanted.append(("Learning curves", about, partial(drawn.plot_intermediate_values, study), 340))
    if varied:
        about = "The objective over each setting. The darker a mark, the later its trial."
        wanted.append(("Slices", about, partial(drawn.plot_slice, study, params=varied), 340))
    if len(varied) > 1:
        about = "Each line is a complete trial."
        wanted.append(
            ("Parallel coordinates", about, partial(drawn.plot_parallel_coordinate, study, params=varied), 380)
        )
    return [(title, about, draw().to_json(), height) for title, about, draw, height in wanted]
