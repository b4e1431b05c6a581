"""`validate LORA`: score a LoRA file with the LoRA gate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lora_trainer.config.schema import Config
from lora_trainer.core.errors import DONE, LORA_REFUSED
from lora_trainer.core.findings import printable_lines
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.verdict import SCALES, WORDS, VerdictPart
from lora_trainer.monitor.console import Console
from lora_trainer.run.score_lora import score_lora


def validate_command(lora: str | Path, data: str | Path | None, as_json: bool, config: Config) -> int:
    """Score a LoRA file and print the report. Returns 0 if it passes `gates.lora`, else 4. Raises UsageError."""
    path = Path(lora)
    report = score_lora(path, None if data is None else Path(data), config, _say)
    if as_json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_report(path, report)
    return DONE if report.outcome == "passed" else LORA_REFUSED


def print_report(path: Path, report: LoraReport) -> None:
    """Print the report as text on stdout."""
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, part in report.parts.items():
        table.add_row(*part_row(name, part, report.gate))
    score = "not measured" if report.score is None else f"{report.score:.2f}"
    console.print(Text(f"{path.name}: {report.outcome}, score {score} (minimum {report.gate:.2f})", style="bold"))
    console.print(table)
    for line in (f"images compared by the features of: {report.encoder}", *_numbers(report.numbers)):
        console.print(Text(f"  {line}"), soft_wrap=not console.is_terminal)
    for finding in report.findings:
        console.print(
            Text(f"  {finding.severity}: {finding.message} {finding.fix}".rstrip()), soft_wrap=not console.is_terminal
        )


def part_row(name: str, part: VerdictPart, minimum: float) -> tuple[str, ...]:
    """A part's line: title, score with its interval, outcome, and its own value against its gate."""
    if part.measure is None:
        return f"  {WORDS[name].title}", "", "not measured", part.reason
    value, low, high = part.scores
    needed = f"{'at most' if part.smaller_is_better else 'at least'} {SCALES[name].gate:.2f}"
    own = f"{part.measure.value:.2f} ({part.measure.low:.2f} to {part.measure.high:.2f}), {needed} required"
    return f"  {WORDS[name].title}", f"{value:.2f} ({low:.2f} to {high:.2f})", str(part.outcome(minimum)), own


def _numbers(numbers: Any) -> list[str]:
    lines = []
    if learned := numbers.get("learning"):
        lines.append(
            f"validation loss {learned['base']:.4f} -> {learned['lora']:.4f}: {learned['mean']:.1%} lower "
            f"(95 % interval {learned['low']:.1%} to {learned['high']:.1%})"
        )
    if "drift" in numbers:
        lines.append(f"drift on unrelated prompts {numbers['drift']:.1%}")
    if health := numbers.get("health"):
        lines.append(f"largest update {health['largest']:.3f} of its weight, rank used {health['rank_used']:.0%}")
    return lines


def _say(line: str) -> None:
    print(printable_lines(line), file=sys.stderr)
