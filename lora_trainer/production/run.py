"""A whole run: check the data, choose for the hardware, cache, train, validate, release, record."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lora_trainer.config.layers import Resolved
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import (
    DONE,
    LORA_REFUSED,
    TRAINING_FAILED,
    DatasetRefused,
    LoraRefused,
    Problem,
    UsageError,
    UserError,
)
from lora_trainer.core.hardware import package_versions
from lora_trainer.core.io import write_json
from lora_trainer.core.launch import is_main_process
from lora_trainer.monitor.progress import duration
from lora_trainer.production.inputs import Inputs, data_sources, read_inputs, with_absolute_paths
from lora_trainer.production.record import FILE as RECORD
from lora_trainer.production.record import Record, read_record, write_record
from lora_trainer.training.interrupt import leaving_on_sigterm

if TYPE_CHECKING:  # torch is loaded after the data has been judged
    from lora_trainer.evaluation.report import LoraReport

UNFINISHED = ("running", "stopped", "failed")
BUG, INTERRUPTED = 1, 130


def train(resolved: Resolved, *, resume: bool, dry_run: bool, enforce_gates: bool) -> int:
    """Train one LoRA and return the exit code.

    With `enforce_gates` a data set or a LoRA that scores below its gate is refused;
    without, only data that cannot be trained on. Raises UserError for everything a user
    can mend; what was trained until then is saved and recorded.
    """
    console = plain_console(quiet=not is_main_process())
    config = resolved.config
    announce(config, console)
    folder = run_folder(config)
    finished = None if dry_run else claim(folder, config, resume=resume, console=console)
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


def cache(resolved: Resolved) -> int:
    """Fill the caches that a run of these settings needs, and train nothing. Raises UserError."""
    console = plain_console()
    announce(resolved.config, console)
    inputs = read_inputs(resolved.config)
    show_report(inputs, console)
    refuse_data(inputs, enforce_gates=False)
    from lora_trainer.production.session import fill, open_session

    fill(open_session(resolved, inputs, run_folder(resolved.config), console))
    return DONE


def run_recorded(
    resolved: Resolved, inputs: Inputs, folder: Path, console: Console, *, resume: bool, enforce_gates: bool
) -> int:
    """Run the session and leave a true `run.json`, however it ends."""
    from lora_trainer.production.flow import run_session
    from lora_trainer.training.checkpoint import list_checkpoints, step_of
    from lora_trainer.training.processes import join_processes

    began = time.monotonic()
    join_processes().wait()  # all must have found the folder free before one of them claims it
    previous, before = read_record(folder), list_checkpoints(folder / "checkpoints")
    record = first_record(resolved, inputs, folder)
    write = partial(write_record, folder) if is_main_process() else discard
    write(record)
    try:
        with leaving_on_sigterm():
            outcome = run_session(resolved, inputs, folder, record, console, resume=resume)
    except BaseException as error:
        trained = list_checkpoints(folder / "checkpoints")
        if isinstance(error, UsageError) and trained == before:
            if is_main_process():
                leave_as_found(folder, previous)
            raise
        record = ended_by(error, replace(record, steps=step_of(trained[0]) if trained else 0))
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


def ended_by(error: BaseException, record: Record) -> Record:
    """The record of a run that an error or a signal outside the loop ended, with the command's exit code."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else INTERRUPTED
        return replace(record, status="stopped", exit_code=code, reason="stopped by a signal")
    code, reason = BUG, f"{type(error).__name__}: {error}"
    if isinstance(error, UserError):
        code, reason = error.exit_code, str(error)
    elif type(error).__name__ == "OutOfMemoryError":  # torch's, which this file does not load
        code, reason = TRAINING_FAILED, "Out of memory."
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        code, reason = TRAINING_FAILED, "The disk is full."
    return replace(record, status="failed", exit_code=code, reason=reason)


def leave_as_found(folder: Path, previous: dict[str, Any] | None) -> None:
    """After a wrong setting that showed before anything was trained: mended, the same command must run."""
    if previous is not None:
        write_json(folder / RECORD, previous)
        return
    for name in (RECORD, "config.toml"):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def discard(record: Record) -> None:
    """What the other processes of a run do with its record."""


def first_record(resolved: Resolved, inputs: Inputs, folder: Path) -> Record:
    """What is known before training; durations of earlier sessions of the run are kept."""
    earlier = read_record(folder) or {}
    return Record(
        name=folder.name,
        started=earlier.get("started") or time.time(),
        config=with_absolute_paths(resolved.config).model_dump(mode="json", by_alias=True),
        origins=dict(resolved.origin),
        scores={"dataset": round(inputs.report.score, 4), "lora": None},
        seconds=earlier.get("seconds", {}),
        versions=package_versions(),
        data_hash=inputs.manifest.data_hash,
        model={"family": inputs.family.name, "path": str(inputs.facts.path.resolve())},
        dataset={"parts": inputs.report.parts, "samples": len(inputs.report.samples)},
    )


def plain_console(*, quiet: bool = False) -> Console:
    """Prints text as it is: captions and file names may hold what rich takes for markup."""
    return Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True)


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


def claim(folder: Path, config: Config, *, resume: bool, console: Console) -> int | None:
    """Refuse a folder in use; an exit code when there is nothing left to do.

    Raises UsageError when the folder holds a run and `--resume` was not given, or cannot be written.
    """
    record = read_record(folder)
    if record is not None and not resume:
        raise UsageError(
            Problem(
                f"{folder} holds a run already (status {record.get('status')}, step {record.get('steps', 0)}).",
                "Add --resume to go on with it, or choose another --name."
                if record.get("status") in UNFINISHED
                else "It is finished: choose another --name.",
            )
        )
    if record is not None and record.get("status") not in UNFINISHED:
        console.print(f"{folder} is finished (status {record['status']}, step {record['steps']}): nothing to do.")
        return int(record.get("exit_code") or DONE)  # that of the gate, where one refused the LoRA
    if record is None and folder.exists() and any(folder.iterdir()):
        raise UsageError(Problem(f"{folder} exists and is no run.", "Choose another --name or --output."))
    for source in data_sources(config):
        if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
            raise UsageError(
                Problem(
                    f"{folder} lies in the data set {source}; nothing is written there.", "Choose another --output."
                )
            )
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
