"""`validate LORA`: score a LoRA file with the LoRA gate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from lora_trainer.core.errors import DONE, LORA_REFUSED
from lora_trainer.core.findings import printable_lines
from lora_trainer.evaluation.lora_report import NO_ENCODER
from lora_trainer.evaluation.part_words import WORDS, own_value
from lora_trainer.evaluation.verdict import SCALES
from lora_trainer.monitor.console import Console
from lora_trainer.run.score_lora import score_lora

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config
    from lora_trainer.evaluation.lora_choice import LoraChoice
    from lora_trainer.evaluation.lora_report import LoraReport


def validate_command(lora: str | Path, data: str | Path | None, as_json: bool, config: Config) -> int:
    """Score a LoRA file and print the report. Returns 0 if it passes `gates.lora`, else 4. Raises UserError."""
    path = Path(lora)
    report = score_lora(path, None if data is None else Path(data), config, say)
    return show(path, report, as_json=as_json)


def show(path: Path, report: LoraReport, *, as_json: bool) -> int:
    """Print a report. Returns the exit code of its outcome."""
    if as_json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_report(path, report)
    return DONE if report.outcome == "passed" else LORA_REFUSED


def print_report(path: Path, report: LoraReport) -> None:
    """Print the report as text on stdout."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(Text(f"{path.name}: {report.outcome or 'not measured'}", style="bold"))
    for name, part in report.parts.items():
        about = f"not measured: {part.reason}"
        if part.measure is not None:
            rate = own_value(name, part.measure, SCALES[name].at(report.gate)) if WORDS[name].unit else ""
            about = f"{part.outcome(report.gate):<11}  {rate}".rstrip()
        console.print(f"  {WORDS[name].title:<17} {about}")
    compared = [] if report.encoder == NO_ENCODER else [f"images also compared by {report.encoder}"]
    for line in (*compared, *_numbers(report.numbers)):
        console.print(f"  {line}")
    if report.choice is not None:
        print_choice(report.choice, console)
    for finding in report.findings:
        console.print(f"  {finding.severity}: {finding.message}")
        if finding.fix:
            console.print(f"    {finding.fix}")


def print_choice(choice: LoraChoice, console: Console) -> None:
    """The compared strengths and steps, each with its score, its difference from the first and its least part; the advice."""
    for each in choice.scores:
        score, gain = each.score, each.gain
        beside = "as it is" if each is choice.usual else each.standing
        console.print(f"  {each.candidate.name}: {score.value:.2f} ({score.low:.2f} to {score.high:.2f})  {beside}")
        if each is not choice.usual:
            console.print(f"    {gain.value:+.2f} ({gain.low:+.2f} to {gain.high:+.2f}); {each.samples} samples")
        console.print(f"    least: {WORDS[each.least].title.lower() if each.least else 'not measured'}")
    console.print(f"  advice: {choice.advice}")
    if choice.sheet is not None:
        console.print(f"  images of them: {choice.sheet}")


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
        used = health.get("rank_used")
        ranks = "" if used is None else f", rank used {used:.0%}"
        lines.append(f"largest update {health['largest']:.3f} of its weight{ranks}")
    return lines


def say(line: str) -> None:
    print(printable_lines(line), file=sys.stderr)
