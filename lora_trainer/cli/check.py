"""`lora-trainer check`: the dataset gate, for people or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lora_trainer.config.schema import Config
from lora_trainer.core.errors import DATASET_REFUSED, DONE
from lora_trainer.core.findings import Finding
from lora_trainer.core.io import finite
from lora_trainer.data.check import DataReport
from lora_trainer.data.split import split_held_out
from lora_trainer.data.steps import StepArithmetic
from lora_trainer.models.family import ModelFacts
from lora_trainer.production.inputs import arithmetic, read_data

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
SEVERITIES = ("error", "warning", "note")


def check_command(config: Config, as_json: bool, facts: ModelFacts) -> int:
    """Print the report; 0 when the data passes the gate, 3 when it does not."""
    report = read_data(config, facts)[1]
    train, held_out = split_held_out(report.samples, config.data.held_out)
    steps = arithmetic(config, train, config.batch.max_micro or config.batch.effective, processes=1)
    if as_json:
        document = report.to_json(steps.to_json() | {"held_out": len(held_out)})
        sys.stdout.write(json.dumps(finite(document), indent=2, ensure_ascii=False) + "\n")
    else:
        show_report(report, steps, len(held_out), Console())
    return DONE if report.passed else DATASET_REFUSED


def show_report(report: DataReport, steps: StepArithmetic, held_out: int, console: Console) -> None:
    """Findings grouped by code, the score with its parts, and what would be trained."""
    if report.findings:
        console.print(_findings_table(report.findings))
    for note in report.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for line in report.plan.lines:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"{steps.line}; {held_out} held out", markup=False, soft_wrap=True)
    parts = ", ".join(f"{name} {value:.3f}" for name, value in report.parts.items())
    verdict = "passes" if report.passed else "refused"
    console.print(
        f"score {report.score:.3f} (gate {report.gate:.2f}): {verdict}", markup=False, highlight=False, soft_wrap=True
    )
    console.print(f"parts: {parts}", markup=False, highlight=False, soft_wrap=True)
    for problem in report.refusals:
        console.print(str(problem), style="red", markup=False, soft_wrap=True)


def _findings_table(findings: Sequence[Finding]) -> Table:
    groups: dict[tuple[int, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((SEVERITIES.index(finding.severity), finding.code), []).append(finding)
    table = Table("severity", "finding", "files", "first", "fix")
    for (rank, code), group in sorted(groups.items()):
        path, message = group[0].path, group[0].message
        first = f"{path.name} {message}" if path is not None else message
        severity = f"[{COLOURS[SEVERITIES[rank]]}]{SEVERITIES[rank]}[/]"
        table.add_row(severity, code, str(len(group)), _plain(first), _plain(group[0].fix))
    return table


def _plain(text: str) -> str:
    """Names may hold brackets, which rich would take for markup."""
    return text.replace("[", r"\[")
