"""What a run tells people at its beginning and at its end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lora_trainer.config.schema import Config
from lora_trainer.monitor.progress import duration
from lora_trainer.production.inputs import Inputs
from lora_trainer.production.record import Record

if TYPE_CHECKING:
    from lora_trainer.evaluation.report import LoraReport


MOST_FINDINGS = 8


def announce(config: Config, console: Console) -> None:
    """Say first what stands in for a model or data that was not given."""
    if config.model.path is None:
        console.print("No --model: using the built-in base, a miniature Stable Diffusion 1.5 (128 px).")
    if not config.data.sources:
        console.print("No --data: using the built-in data set of a small robot named zobo.")


def show_report(inputs: Inputs, console: Console) -> None:
    """The data set's score and what was found, worst first."""
    report = inputs.report
    console.print(f"data set: {len(report.samples)} samples, score {report.score:.2f} (gate {report.gate:.2f})")
    ranks = {"warning": 0, "note": 1}
    # Errors end the run: they are told there, each kind once.
    found = sorted(
        (each for each in report.findings if each.severity != "error"), key=lambda each: ranks[each.severity]
    )
    for finding in found[:MOST_FINDINGS]:
        where = f"{report.name_of(finding.path)}: " if finding.path else ""
        console.print(f"  {finding.severity}: {where}{finding.message} {finding.fix}".rstrip())
    if len(found) > MOST_FINDINGS:
        console.print(f"  … and {len(found) - MOST_FINDINGS} more: lora-trainer check shows all")


def show_end(record: Record, report: LoraReport, folder: Path, comparison: Path | None, console: Console) -> None:
    """Both scores with what was found, and where everything is."""
    console.print()
    console.rule(f"{record.name}: {record.steps} steps in {duration(record.seconds['total'])}", style="dim")
    parts = ", ".join(f"{name} {value:.2f}" for name, value in report.parts.items())
    console.print(f"data set score  {record.scores['dataset']:.2f}")
    console.print(f"LoRA score      {report.score:.2f}  ({parts})")
    for finding in report.findings:
        console.print(f"  {finding.severity}: {finding.message} {finding.fix}".rstrip())
    console.print(f"released        step {record.released['step']}: {record.released['reason']}")
    where = {
        "for ComfyUI, Forge, A1111": folder / f"{record.name}.safetensors",
        "for diffusers": folder / f"{record.name}.diffusers.safetensors",
        "before / after": comparison,
        "the run's report": folder / "report.html" if record.files.get("report") else None,
        "the run's record": folder / "run.json",
    }
    for what, path in where.items():
        if path is not None:
            console.print(f"{what:<26}{path}", soft_wrap=True)
