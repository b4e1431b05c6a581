"""A whole run: check the data, choose for the hardware, cache, train, validate, release, record."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lora_trainer.config.layers import Resolved
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import (
    DONE,
    LORA_REFUSED,
    DatasetRefused,
    LoraRefused,
    Problem,
    UsageError,
    UserError,
)
from lora_trainer.core.hardware import package_versions
from lora_trainer.core.launch import is_main_process
from lora_trainer.monitor.progress import duration
from lora_trainer.production.inputs import Inputs, data_sources, read_inputs
from lora_trainer.production.record import Record, read_record, write_record

if TYPE_CHECKING:  # torch is loaded after the data has been judged
    from lora_trainer.evaluation.report import LoraReport

UNFINISHED = ("running", "stopped", "failed")


def train(resolved: Resolved, *, resume: bool, dry_run: bool, enforce_gates: bool) -> int:
    """Train one LoRA and return the exit code.

    With `enforce_gates` a data set or a LoRA that scores below its gate is refused;
    without, only data that cannot be trained on. Raises UserError for everything a user
    can mend; what was trained until then is saved and recorded.
    """
    console = Console(quiet=not is_main_process(), highlight=False, soft_wrap=True)
    config = resolved.config
    announce(config, console)
    folder = run_folder(config)
    finished = None if dry_run else claim(folder, resume=resume, console=console)
    if finished is not None:
        return finished
    inputs = read_inputs(config)
    show_report(inputs, console)
    refuse_data(inputs, enforce_gates=enforce_gates)
    if dry_run:
        from lora_trainer.production.dry_run import show_plan

        show_plan(resolved, inputs, folder, console)
        return DONE
    return run_recorded(resolved, inputs, folder, console, resume=resume, enforce_gates=enforce_gates)


def fill(resolved: Resolved) -> int:
    """Fill the caches that a run of these settings needs, and train nothing. Raises UserError."""
    console = Console(highlight=False, soft_wrap=True)
    announce(resolved.config, console)
    inputs = read_inputs(resolved.config)
    show_report(inputs, console)
    refuse_data(inputs, enforce_gates=False)
    from lora_trainer.production.session import fill_only

    fill_only(resolved, inputs, console)
    return DONE


def run_recorded(
    resolved: Resolved, inputs: Inputs, folder: Path, console: Console, *, resume: bool, enforce_gates: bool
) -> int:
    """Run the session and leave a true `run.json`, however it ends."""
    from lora_trainer.production.session import run_session

    began = time.monotonic()
    record = first_record(resolved, inputs, folder)
    write = partial(write_record, folder) if is_main_process() else discard
    write(record)
    try:
        outcome = run_session(resolved, inputs, folder, record, console, resume=resume)
    except BaseException as error:
        code = error.exit_code if isinstance(error, UserError) else 1
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        record = replace(record, status="failed", exit_code=code, reason=reason)
        write(record.with_seconds(total=time.monotonic() - began))
        raise
    record = outcome.record.with_seconds(total=time.monotonic() - began)
    if outcome.signal_exit is not None:
        write(replace(record, status="stopped", exit_code=outcome.signal_exit, reason="stopped by a signal"))
        console.print(f"stopped at step {record.steps}; everything is saved. Go on with --resume.")
        return outcome.signal_exit
    report = outcome.lora
    if report is None:  # not the main process
        return DONE
    refused = enforce_gates and not report.passed
    record = replace(record, status="refused" if refused else "done", exit_code=LORA_REFUSED if refused else DONE)
    write(record)
    show_end(record, report, folder, outcome.comparison, console)
    if refused:
        raise LoraRefused(
            Problem(
                f"The LoRA scores {report.score:.2f}, under the gate of {report.gate:.2f}; it stays in {folder}, marked.",
                "The findings above say what to change.",
            )
        )
    return DONE


def discard(record: Record) -> None:
    """What the other processes of a run do with its record."""


def first_record(resolved: Resolved, inputs: Inputs, folder: Path) -> Record:
    """What is known before training; durations of earlier sessions of the run are kept."""
    return Record(
        name=folder.name,
        config=resolved.config.model_dump(mode="json", by_alias=True),
        origins=dict(resolved.origin),
        scores={"dataset": round(inputs.report.score, 4), "lora": None},
        seconds=(read_record(folder) or {}).get("seconds", {}),
        versions=package_versions(),
        data_hash=inputs.manifest.data_hash,
        model={"family": inputs.family.name, "path": str(inputs.facts.path.resolve())},
        dataset={"parts": inputs.report.parts, "samples": len(inputs.report.samples)},
    )


def announce(config: Config, console: Console) -> None:
    """Say first what stands in for a model or data that was not given."""
    if config.model.path is None:
        console.print("No --model: using the built-in base, a miniature Stable Diffusion 1.5 (128 px).")
    if not config.data.sources:
        console.print("No --data: using the built-in data set of a small robot named zobo.")


def run_folder(config: Config) -> Path:
    """OUTPUT/NAME; the name comes from the data's folder when it is not given."""
    name = config.run.name or data_sources(config)[0].resolve().stem
    if Path(name).name != name:
        raise UsageError(Problem(f"--name {name!r} is a path.", "Give a plain name, and the folder with --output."))
    return Path(config.run.output) / name


def claim(folder: Path, *, resume: bool, console: Console) -> int | None:
    """Refuse a folder in use; an exit code when there is nothing left to do.

    Raises UsageError when the folder holds a run and `--resume` was not given, or cannot be written.
    """
    record = read_record(folder)
    if record is not None and not resume:
        raise UsageError(
            Problem(
                f"{folder} holds a run already (status {record.get('status')}, step {record.get('steps', 0)}).",
                "Add --resume to go on with it, or choose another --name.",
            )
        )
    if record is not None and record.get("status") not in UNFINISHED:
        console.print(f"{folder} is finished (status {record['status']}, step {record['steps']}): nothing to do.")
        return int(record.get("exit_code") or DONE)
    if record is None and folder.exists() and any(folder.iterdir()):
        raise UsageError(Problem(f"{folder} exists and is no run.", "Choose another --name or --output."))
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(Problem(f"{existing} cannot be written to.", "Choose another --output."))
    return None


def show_report(inputs: Inputs, console: Console) -> None:
    """The data set's score and what was found, worst first."""
    report = inputs.report
    console.print(f"data set: {len(report.samples)} samples, score {report.score:.2f} (gate {report.gate:.2f})")
    ranks = {"error": 0, "warning": 1, "note": 2}
    for finding in sorted(report.findings, key=lambda each: ranks[each.severity])[:8]:
        where = f"{finding.path.name}: " if finding.path else ""
        console.print(f"  {finding.severity}: {where}{finding.message} {finding.fix}".rstrip())
    if len(report.findings) > 8:
        console.print(f"  … and {len(report.findings) - 8} more: lora-trainer check shows all")


def refuse_data(inputs: Inputs, *, enforce_gates: bool) -> None:
    """Raise DatasetRefused for data that cannot be trained on, or, with gates, that scores too low."""
    report = inputs.report
    if report.refusals:
        raise DatasetRefused(report.refusals)
    if enforce_gates and not report.passed:
        raise DatasetRefused(
            Problem(
                f"The data set scores {report.score:.2f}, under the gate of {report.gate:.2f}.",
                "lora-trainer check shows what to mend; --set gates.dataset=… changes the gate.",
            )
        )


def show_end(record: Record, report: LoraReport, folder: Path, comparison: Path | None, console: Console) -> None:
    """Both scores with what was found, and where everything is."""
    console.print()
    console.rule(f"{record.name}: {record.steps} steps in {duration(record.seconds['total'])}", style="dim")
    parts = ", ".join(f"{name} {value:.2f}" for name, value in report.parts.items())
    console.print(f"data set score  {record.scores['dataset']:.2f}")
    console.print(f"LoRA score      {report.score:.2f}  ({parts})")
    for finding in report.findings:
        console.print(f"  {finding.severity}: {finding.message} {finding.fix}".rstrip())
    where = {
        "for ComfyUI, Forge, A1111": folder / f"{record.name}.safetensors",
        "for diffusers": folder / f"{record.name}.diffusers.safetensors",
        "before / after": comparison,
        "the run's record": folder / "run.json",
    }
    for what, path in where.items():
        console.print(f"{what:<26}{path}", soft_wrap=True)
